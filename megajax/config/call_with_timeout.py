"""Calls that may never return, with a limit: a disk that does not answer, a pipe that nobody reads, a lost service."""

import contextlib
import threading
from collections.abc import Callable

OUTPUT_SECONDS = 2.0
"""How long a process that ends may take to print why: its standard error may be a pipe that nobody reads."""

DISK_SECONDS = 5.0
"""How long a process that ends may take to write to the run folder or to its beats: the disk may be what hangs."""


def with_time_limit[T](call: Callable[[], T], seconds: float) -> T | None:
    """The result of `call`, which runs in another thread; None if it takes too long or fails."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
