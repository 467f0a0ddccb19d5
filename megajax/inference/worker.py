"""The thread of an engine: other threads submit and cancel requests, and only this thread runs steps.

A fault of the device ends the engine: all requests end with an error, and `failure` is the exception. The process
should then exit, so that a supervisor restarts it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megajax.config.errors import UserError
from megajax.inference.engine import Engine, Statistics
from megajax.inference.request import Output, Refused, Request

LOG = logging.getLogger(__name__)


class Worker:
    """A thread-safe engine. Outputs are delivered on the engine's thread."""

    def __init__(self, engine: Engine, *, patience: float = 60.0, prepare: Iterable[object] = ()):
        """patience: seconds without a step, while there are requests, after which `healthy` is false; prepare: work
        for the thread before the first step, in parts, such as compilations."""
        self.engine = engine
        self.failure: BaseException | None = None
        """The exception that ended the engine, which does not restart."""
        self.ready = prepare == ()
        """Whether `prepare` has ended."""
        self._patience, self._prepare = patience, prepare
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[str] = deque()
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._closing = False
        self._beat = time.monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start running steps."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Refused."""
        self.engine.check(request)
        with self._changed:
            if self._closing or self.failure is not None:
                raise Refused("draining", "the engine takes no more requests")
            # The engine's thread may move a request meanwhile: it may count twice for a moment, but is never missed.
            open_requests = self.engine.requests + len(self._inbox)
            if open_requests >= self.engine.capacity:
                message = f"{open_requests} requests are not finished; {self.engine.capacity} may be"
                raise Refused("queue_full", message)
            # A copy: the engine's thread takes requests out without the lock.
            if any(waiting.identifier == request.identifier for waiting in tuple(self._inbox)):
                raise Refused("invalid", f"identifier {request.identifier!r} is in use", "identifier")
            self._inbox.append(request)
            self._changed.notify()

    def cancel(self, identifier: str) -> None:
        """End a request before the next step, with the finish "cancelled". Does nothing if it has ended."""
        with self._changed:
            self._cancelled.append(identifier)
            self._changed.notify()

    def call[T](self, work: Callable[[Engine], T]) -> Future[T]:
        """Run `work` on the engine's thread between two steps -> its result. Raises Refused if the engine has ended."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing or self.failure is not None:
                raise Refused("draining", "the engine has ended")
            self._calls.append((work, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel unfinished requests, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def healthy(self) -> bool:
        """Whether the thread makes progress and the last step gave finite logits."""
        if self.failure is not None or not self._thread.is_alive():
            return False
        return self.engine.finite and (not self._busy() or time.monotonic() - self._beat < self._patience)

    def statistics(self) -> Statistics:
        """Counts of the engine, with the requests it takes before its next step. Approximate while a step runs: a
        request may count twice for a moment, but is never missed."""
        inbox, counts = tuple(self._inbox), self.engine.statistics()
        rows = sum(request.sampling.n for request in inbox)
        return replace(counts, waiting=counts.waiting + rows, requests=counts.requests + len(inbox))

    def _busy(self) -> bool:
        return bool(self._inbox or self.engine.requests)

    def _run(self) -> None:
        try:
            if self._prepared():
                self._beat, self.ready = time.monotonic(), True
                self._steps()
            self._accept()
            self.engine.end_all("cancelled")
        except BaseException as error:
            if not isinstance(error, UserError):
                LOG.exception("the engine's thread ends")
            self._fail(error)

    def _prepared(self) -> bool:
        """Prepare -> False if the worker was closed meanwhile."""
        return not any(self._closing for _ in self._prepare)

    def _steps(self) -> None:
        """Run steps until the worker is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._busy() or self._closing or self._cancelled or self._calls)
                if self._closing:
                    return
                self._beat = time.monotonic()
            self._accept()
            self.engine.step()
            self._beat = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
        self.engine.fail()
        for request in self._inbox:
            _end(request)
        self._inbox.clear()
        for _, future in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(Refused("draining", "the engine has ended"))

    def _accept(self) -> None:
        """Process requests, cancellations and calls since the last step."""
        self._submit_all()
        while self._cancelled:
            self.engine.cancel(self._cancelled.popleft())
        while self._calls:
            work, future = self._calls.popleft()
            # A call may refuse what was accepted before it, such as requests for an adapter that it drops.
            self._submit_all()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(self.engine))
            except Exception as error:
                future.set_exception(error)

    def _submit_all(self) -> None:
        while self._inbox:
            request = self._inbox[0]
            try:
                self.engine.submit(request)
            except Refused as refusal:
                LOG.error("request %s was accepted, then rejected: %s", request.identifier, refusal)
                _end(request)
            self._inbox.popleft()


def _end(request: Request) -> None:
    """Deliver an error for each answer of a request that never ran."""
    with suppress(Exception):
        for number in range(request.sampling.n):
            request.deliver(Output(number, finish="error"))
