"""Waiting for a state, with a time limit."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether a condition holds within some time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return bool(condition())
