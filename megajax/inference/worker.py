"""What runs the steps of an engine: a thread of its own, or the caller's until many prompts are answered.

Other threads submit and cancel requests of a `Worker`, and only its thread runs steps. A fault of the device ends the
engine: all requests end with an error, and `failure` is the exception. The process should then exit, so that a
supervisor restarts it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.config.errors import UserError
from megajax.inference.engine import Engine
from megajax.inference.request import Finish, Output, PromptImage, RefusedRequest, Request
from megajax.inference.sampling_settings import Sampling
from megajax.inference.statistics import Statistics

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
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any], bool]] = deque()
        self._calling = False
        self._closing = False
        self._beat = time.monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start running steps."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RefusedRequest."""
        request = self.engine.check(request)
        with self._changed:
            if self._closing or self.failure is not None:
                raise RefusedRequest("draining", "the engine takes no more requests")
            # The engine's thread may move a request meanwhile: it may count twice for a moment, but is never missed.
            open_requests = self.engine.requests + len(self._inbox)
            if open_requests >= self.engine.capacity:
                message = f"{open_requests} requests are not finished; {self.engine.capacity} may be"
                raise RefusedRequest("queue_full", message)
            # A copy: the engine's thread takes requests out without the lock.
            if any(waiting.identifier == request.identifier for waiting in tuple(self._inbox)):
                raise RefusedRequest("invalid", f"identifier {request.identifier!r} is in use", "identifier")
            # The time before this request is none of the thread's.
            self._beat = self._beat if self._busy() else time.monotonic()
            self._inbox.append(request)
            self._changed.notify()

    def cancel(self, identifier: str) -> None:
        """End a request before the next step, with the finish "cancelled". Does nothing if it has ended."""
        with self._changed:
            self._cancelled.append(identifier)
            self._changed.notify()

    def call[T](self, work: Callable[[Engine], T], *, idle: bool = False, first: bool = False) -> Future[T]:
        """Run `work` on the engine's thread between two steps -> its result.

        idle: when all requests before it have ended, unless the engine is paused or asleep; those after it wait.
        first: before the calls that wait. Raises RefusedRequest if the engine has ended.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closing or self.failure is not None:
                raise RefusedRequest("draining", "the engine has ended")
            (self._calls.appendleft if first else self._calls.append)((work, future, idle))
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
        waits = self._calling or self.engine.paused or self.engine.asleep or not self._busy()
        return self.engine.finite and (waits or time.monotonic() - self._beat < self._patience)

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
            self._submit_all()
            self.engine.end_all("cancelled")
            self._accept()
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
                self._changed.wait_for(self._has_work)
                if self._closing:
                    return
                self._beat = time.monotonic()
            self._accept()
            self.engine.step()
            self._beat = time.monotonic()

    def _has_work(self) -> bool:
        stands = self.engine.paused or self.engine.asleep
        runs = self._inbox or (self.engine.requests and not stands)
        return bool(runs or self._closing or self._cancelled or self._calls)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
        self.engine.fail()
        for request in self._inbox:
            _end(request, "error")
        self._inbox.clear()
        for _, future, _ in self._calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(RefusedRequest("draining", "the engine has ended"))

    def _accept(self) -> None:
        """Process requests, cancellations and calls since the last step."""
        if not self._holds():
            self._submit_all()
        while self._cancelled:
            self._cancel(self._cancelled.popleft())
        while self._calls and not self._holds():
            work, future, idle = self._calls.popleft()
            # A call may refuse what was accepted before it, such as requests for an adapter that it drops.
            if not idle:
                self._submit_all()
            if not future.set_running_or_notify_cancel():
                continue
            self._calling = True
            try:
                future.set_result(work(self.engine))
            except Exception as error:
                future.set_exception(error)
            finally:
                self._beat, self._calling = time.monotonic(), False

    def _holds(self) -> bool:
        """Whether the next call waits for the engine's requests to end, and further requests for that call."""
        waits = bool(self._calls) and self._calls[0][2] and self.engine.requests > 0
        return waits and not (self.engine.paused or self.engine.asleep)

    def _cancel(self, identifier: str) -> None:
        self.engine.cancel(identifier)
        for request in tuple(self._inbox):
            if request.identifier == identifier:
                self._inbox.remove(request)
                _end(request, "cancelled")

    def _submit_all(self) -> None:
        while self._inbox:
            request = self._inbox[0]
            try:
                self.engine.submit(request)
            except RefusedRequest as refusal:
                # The engine has changed since `submit`: for example, an adapter was dropped.
                _end(request, "error", refusal.message if refusal.reason == "invalid" else "")
            self._inbox.popleft()


def _end(request: Request, finish: Finish, problem: str = "") -> None:
    """End each answer of a request that never ran. problem: as in `Output`."""
    with suppress(Exception):
        for number in range(request.sampling.n):
            request.deliver(Output(number, finish=finish, problem=problem))


def complete(
    engine: Engine,
    requests: Iterable[tuple[tuple[int, ...], Sampling]],
    show: Callable[[Output], None] = lambda output: None,
    interrupted: Callable[[], bool] = lambda: False,
    images: tuple[PromptImage, ...] = (),
    *,
    experts: bool = False,
) -> Iterator[list[Output]]:
    """Yield the answers to prompts in order, as soon as they and all earlier ones are complete.

    The engine runs on the caller's thread. requests: prompts and their settings, consumed as the engine has capacity.
    show: called with each output; interrupted: called before each step, True ends all answers at once; images: of each
    prompt; experts: see `Request`. Raises RefusedRequest.
    """
    waiting, running, number, more = iter(requests), deque[tuple[str, list[Output]]](), 0, True

    def deliver(answers: list[Output], output: Output) -> None:
        answers[output.choice] = answers[output.choice].merge(output)
        show(output)

    while more or running:
        while more and engine.requests < engine.capacity:
            following = next(waiting, None)
            more = following is not None
            if following is not None:
                prompt, sampling = following
                name, answers = f"complete {number}", [Output(choice) for choice in range(sampling.n)]
                collect = partial(deliver, answers)
                inputs: Any = {"prompt": prompt, "sampling": sampling, "images": images, "experts": experts}
                engine.submit(Request(identifier=name, deliver=collect, **inputs))
                running.append((name, answers))
                number += 1
        if interrupted():
            for name, _ in running:
                engine.cancel(name)
        engine.step()
        while running and all(answer.finish for answer in running[0][1]):
            yield running.popleft()[1]
