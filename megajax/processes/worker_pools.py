"""Pools of worker processes, and their results in order."""

import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, Self

from megajax.config.errors import UserError

_POLL_SECONDS = 0.1
"""Interval at which interrupts are handled while waiting for workers."""


class WorkerDied(UserError):
    """A worker process ended before finishing. code: its exit code; if negative, the signal that killed it."""

    code = 1

    def __init__(self, code: int | None):
        cause = "died"
        if code is not None:
            cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        memory = " The system may be out of memory: try fewer --workers." * (code == -signal.SIGKILL)
        super().__init__(f"A worker process {cause}; nothing was written.{memory}")


class Pool(Protocol):
    """Calls functions in other processes. Leaving its block stops the calls that are no longer needed."""

    workers: int

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Call a function of a module."""
        ...


def in_order(
    pool: Pool, calls: Iterable[tuple[Any, tuple[Any, ...]]], handle_pending: Callable[[], None]
) -> Generator[tuple[Any, Any]]:
    """(task, (function, its arguments)) -> tasks with results, in order. handle_pending: see `deferred_interrupts`."""
    waiting: deque[tuple[Any, Future[Any]]] = deque()

    def first() -> tuple[Any, Any]:
        task, future = waiting.popleft()
        while not wait([future], timeout=_POLL_SECONDS).done:
            handle_pending()
        handle_pending()
        return task, future.result()

    for task, call in calls:
        waiting.append((task, pool.submit(*call)))
        if len(waiting) > 2 * pool.workers:
            yield first()
    while waiting:
        yield first()


def parts_of(first: int, last: int, workers: int, least: int) -> list[tuple[int, int]]:
    """Parts of range(first, last) as their first and last + 1: about four for each worker, so that a lost one costs
    little, but of `least` items or more as long as each worker has a part."""
    count = last - first
    size = max(1, math.ceil(count / (4 * workers)), min(least, math.ceil(count / workers)))
    return [(start, min(start + size, last)) for start in range(first, last, size)]


class LocalPool:
    """Processes of this machine."""

    def __init__(self, workers: int):
        self.workers = workers
        self._others = multiprocessing.active_children()
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, initializer=_start_worker)
        self._processes: dict[int | None, multiprocessing.process.BaseProcess] = {}

    def __enter__(self) -> Self:
        return self

    def submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        future = self._pool.submit(function, *arguments)
        self._processes |= {process.pid: process for process in self._started()}
        return future

    def _started(self) -> list[multiprocessing.process.BaseProcess]:
        return [process for process in multiprocessing.active_children() if process not in self._others]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises WorkerDied if a worker was killed."""
        if error is not None and not isinstance(error, BrokenProcessPool):
            # The results are no longer needed: stop the workers instead of waiting for them.
            for process in self._started():
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            # The pool has ended the other workers with SIGTERM.
            codes = (process.exitcode for process in self._processes.values())
            raise WorkerDied(next((code for code in codes if code not in (0, None, -signal.SIGTERM)), None)) from error


@contextmanager
def deferred_interrupts() -> Generator[Callable[[], None]]:
    """Defers SIGINT and SIGTERM until the yielded function is called or the block ends.

    The process pools of the standard library do not survive an exception that a signal handler raises inside them:
    after an interrupt at the last instruction of `Condition.__enter__`, a Python function, its lock is never released,
    and everything that waits for the pool hangs. So the previous handlers are called only where no lock is held.

    A signal without a Python handler still ends the process at once. Does nothing outside the main thread, since other
    threads receive no signals.
    """
    pending: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if in_main}
    former = {number: handler for number, handler in handlers.items() if callable(handler)}

    def handle_pending() -> None:
        if pending:
            number = pending[0]
            pending.clear()
            former[number](number, None)

    for number in former:
        signal.signal(number, lambda number, frame: pending.append(number))
    try:
        yield handle_pending
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    handle_pending()


def _start_worker() -> None:
    """Makes a worker end silently on Ctrl-C and with its parent; disables threads of the tokenizers library."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
