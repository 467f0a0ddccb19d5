"""The thread of an engine: others submit and cancel, it alone runs steps.

A fault of the device ends the engine: every request ends with an error, and `failure` says what it was. The process
should end then, so that a supervisor starts another.
"""

import logging
import threading
import time
from collections import deque
from contextlib import suppress

from megajax.inference.engine import Engine, Statistics
from megajax.inference.request import Piece, Refused, Request

LOG = logging.getLogger(__name__)


class Worker:
    """Safe for threads. Pieces are delivered on the engine's thread."""

    def __init__(self, engine: Engine, *, patience: float = 60.0):
        """patience: seconds without a step, while requests wait for one, after which `healthy` is false."""
        self.engine = engine
        self.failure: BaseException | None = None
        """What ended the engine; it does not start again."""
        self._patience = patience
        self._inbox: deque[Request] = deque()
        self._cancelled: deque[str] = deque()
        self._closing = False
        self._beat = time.monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to run steps."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Raises Refused, before anything is delivered."""
        self.engine.check(request)
        with self._changed:
            if self._closing or self.failure is not None:
                raise Refused("draining", "the engine takes no more requests")
            # Read while the engine's thread may step: a request counts twice for a moment, never not at all.
            open_requests = self.engine.requests + len(self._inbox)
            if open_requests >= self.engine.capacity:
                message = f"{open_requests} requests are not finished; {self.engine.capacity} may be"
                raise Refused("queue_full", message)
            if any(other.identifier == request.identifier for other in self._inbox):
                raise Refused("invalid", f"identifier {request.identifier!r} is in use", "identifier")
            self._inbox.append(request)
            self._changed.notify()

    def cancel(self, identifier: str) -> None:
        """Ends a request before the next step, with the finish "cancelled". Nothing happens if it has ended."""
        with self._changed:
            self._cancelled.append(identifier)
            self._changed.notify()

    def close(self) -> None:
        """Cancels what is not finished, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def healthy(self) -> bool:
        """The thread advances, and the last step gave finite logits."""
        if self.failure is not None or not self._thread.is_alive():
            return False
        return self.engine.finite and (not self._busy() or time.monotonic() - self._beat < self._patience)

    def statistics(self) -> Statistics:
        """Counts of the engine, as of about now."""
        return self.engine.statistics()

    def _busy(self) -> bool:
        return bool(self._inbox or self.engine.requests)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._busy() or self._closing or self._cancelled)
                    if self._closing:
                        break
                    self._beat = time.monotonic()
                self._accept()
                self.engine.step()
                self._beat = time.monotonic()
            self._accept()
            self.engine.end_all("cancelled")
        except BaseException as error:
            LOG.exception("the engine's thread ends")
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
        self.engine.fail()
        for request in self._inbox:
            _end(request)
        self._inbox.clear()

    def _accept(self) -> None:
        """Requests and cancellations since the last step."""
        while self._inbox:
            request = self._inbox[0]
            try:
                self.engine.submit(request)
            except Refused as refusal:
                LOG.error("request %s was taken, then refused: %s", request.identifier, refusal)
                _end(request)
            self._inbox.popleft()
        while self._cancelled:
            self.engine.cancel(self._cancelled.popleft())


def _end(request: Request) -> None:
    """An error for each answer of a request that never ran."""
    with suppress(Exception):
        for number in range(request.sampling.n):
            request.deliver(Piece(number, "", (), (), "error"))
