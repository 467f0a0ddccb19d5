"""The thread of an engine: clients on other threads, cancellation, errors."""

import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from stand_in import StandIn, expected
from user_errors import user_error
from waiting import wait_until

from megajax.inference.engine import Engine
from megajax.inference.request import Output, RefusedRequest, Request
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import Worker


class Waiting:
    """A request, and an event at its end."""

    def __init__(self, name: str, prompt: tuple[int, ...], max_tokens: int = 9):
        self.pieces: list[Output] = []
        self.ended, self.began = threading.Event(), threading.Event()
        sampling = Sampling(temperature=0, max_tokens=max_tokens)
        self.request = Request(identifier=name, prompt=prompt, sampling=sampling, deliver=self.deliver)

    def deliver(self, piece: Output) -> None:
        self.pieces.append(piece)
        self.began.set()
        if piece.finish is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def finish(self) -> str | None:
        assert self.ended.wait(100)
        return self.pieces[-1].finish


class Gated(StandIn):
    """Steps when allowed; the step `fails` raises."""

    def __init__(self, fails: int = -1, **settings: Any):
        super().__init__(**settings)
        self.gate, self.fails = threading.Event(), fails
        self.gate.set()

    def start(self, work: Any) -> Any:
        assert self.gate.wait(100)
        if self.steps == self.fails:
            raise RuntimeError("device lost")
        return super().start(work)


@pytest.fixture
def started(request: pytest.FixtureRequest):
    """Workers, which end with the test."""
    workers: list[Worker] = []

    def start(device: StandIn, **settings: Any) -> Worker:
        worker = Worker(Engine(device, queue=settings.pop("queue", 128)), **settings)
        workers.append(worker)
        worker.start()
        return worker

    yield start
    for worker in workers:
        worker.engine.device.gate.set()
        worker.close()
        assert not worker._thread.is_alive()


def held(started: Any, **settings: Any) -> tuple[Worker, Gated, Waiting]:
    """A worker whose request is in a step, which lasts until the gate of its device opens."""
    worker, request = started(device := Gated(**settings)), Waiting("first", (1, 2))
    device.gate.clear()
    worker.submit(request.request)
    assert wait_until(lambda: worker.engine.requests == 1)
    return worker, device, request


def test_many_threads_submit_and_cancel(started: Any) -> None:
    worker = started(Gated(rows=4, blocks=24))
    clients = [Waiting(f"{number}", (number, 1), max_tokens=20) for number in range(48)]

    def submit(part: list[Waiting]) -> None:
        for number, client in enumerate(part):
            worker.submit(client.request)
            if number % 3 == 2:
                worker.cancel(client.request.identifier)

    threads = [threading.Thread(target=submit, args=(clients[first::8],)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, client in enumerate(clients):
        finish = client.finish
        assert finish == "length" or ((number // 8) % 3 == 2 and finish == "cancelled")
        assert client.tokens == expected((number, 1), len(client.tokens))
    assert wait_until(lambda: not worker.statistics().requests)
    statistics = worker.statistics()
    assert (statistics.requests, statistics.blocks_used) == (0, 0) and worker.healthy()


def test_requests_that_come_during_a_step_count_as_waiting(started: Any) -> None:
    """A step that hangs must not hide the requests that wait for its end."""
    worker, device, first = held(started, rows=1)
    clients = [first, *(Waiting(f"{number}", (number, 1)) for number in range(1, 5))]
    for client in clients[1:]:
        worker.submit(client.request)
    counts = worker.statistics()
    assert (counts.running, counts.waiting, counts.requests) == (1, 4, 5)
    device.gate.set()
    assert {client.finish for client in clients} == {"length"}
    assert wait_until(lambda: worker.statistics().requests == 0)


def test_the_thread_prepares_before_its_first_step_and_stops_preparing_when_closed(started: Any) -> None:
    go, parts = threading.Event(), []

    def prepare() -> Iterator[None]:
        for part in range(3):
            assert go.wait(100)
            parts.append(part)
            yield

    worker, client = started(Gated(rows=1), prepare=prepare()), Waiting("a", (1, 2))
    worker.submit(client.request)
    assert not worker.ready and not client.began.wait(0.05)
    go.set()
    assert client.finish == "length" and worker.ready and parts == [0, 1, 2]

    go.clear()
    closed = started(Gated(rows=1), prepare=prepare())
    closing = threading.Thread(target=closed.close)
    closing.start()
    assert wait_until(lambda: closed._closing)
    go.set()
    closing.join(100)
    assert not closed.ready and parts == [0, 1, 2, 0]


def test_an_identifier_is_unique_among_running_requests(started: Any) -> None:
    worker, device, _ = held(started)
    worker.submit(Waiting("same", (1,)).request)
    for name in ("first", "same"):
        with user_error(kind=RefusedRequest):
            worker.submit(Waiting(name, (1,)).request)
    device.gate.set()


def test_calls_run_between_steps(started: Any) -> None:
    """They run on the engine's thread, also without requests, and an exception is the caller's alone."""
    worker = started(device := Gated())
    assert worker.call(lambda engine: threading.current_thread().name).result(100) == "engine"
    device.gate.clear()
    client = Waiting("a", (1, 2))
    worker.submit(client.request)
    after, cancelled = worker.call(lambda engine: device.steps), worker.call(lambda engine: 1 / 0)
    failing = worker.call(lambda engine: 1 / 0)
    assert cancelled.cancel()
    device.gate.set()
    assert client.finish == "length" and 0 <= after.result(100) < 9
    with pytest.raises(ZeroDivisionError):
        failing.result(100)
    worker.close()
    with user_error(kind=RefusedRequest):
        worker.call(lambda engine: None)


def test_calls_that_wait_end_with_the_engine(started: Any) -> None:
    worker, device, _ = held(started, fails=0)
    call = worker.call(lambda engine: None)
    device.gate.set()
    with user_error(kind=RefusedRequest):
        call.result(100)
    assert isinstance(worker.failure, RuntimeError) and not worker.healthy()
    with user_error(kind=RefusedRequest):
        worker.submit(Waiting("late", (1,)).request)


def test_a_call_follows_the_requests_before_it(started: Any) -> None:
    """It follows those too that were submitted after the engine has looked for requests."""
    worker = started(Gated())
    client, numbers = Waiting("a", (1, 2)), list[int]()

    def first(engine: Engine) -> None:
        worker.submit(client.request)
        worker.call(lambda engine: numbers.append(engine.requests))

    worker.call(first).result(100)
    assert client.finish == "length" and numbers == [1]


def test_a_call_for_an_idle_engine_waits_for_the_requests_before_it_and_not_for_those_after(started: Any) -> None:
    worker, device, first = held(started, rows=2)
    late, dropped = Waiting("late", (1, 2)), Waiting("dropped", (1, 2))
    future = worker.call(lambda engine: (engine.requests, first.ended.is_set()), idle=True)
    for waiting in (late, dropped):
        worker.submit(waiting.request)
    worker.cancel("dropped")
    device.gate.set()
    assert future.result(100) == (0, True)
    assert dropped.finish == "cancelled" and not dropped.tokens
    assert late.finish == "length" and late.tokens == expected((1, 2), 9)


def test_a_paused_engine_is_healthy_and_uses_no_processor_time(started: Any) -> None:
    worker = started(Gated(rows=2), patience=0.05)
    worker.call(lambda engine: engine.pause()).result(100)
    waiting = Waiting("waiting", (1, 2))
    worker.submit(waiting.request)
    assert wait_until(lambda: worker.engine.requests == 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    time.sleep(0.3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.2
    assert worker.healthy() and not waiting.pieces
    # It does not wait for requests that cannot end.
    assert worker.call(lambda engine: engine.requests, idle=True).result(100) == 1
    worker.call(lambda engine: engine.resume()).result(100)
    assert waiting.finish == "length"


def test_a_request_after_an_idle_time_finds_a_healthy_engine_unless_it_stands_still(started: Any) -> None:
    device = Gated(rows=2)
    worker = started(device, patience=3.0)
    time.sleep(3.2)
    device.gate.clear()
    worker.submit(Waiting("first", (1, 2)).request)
    assert worker.healthy()
    assert wait_until(lambda: not worker.healthy())
    device.gate.set()
    assert wait_until(worker.healthy)


def test_closing_ends_requests_that_wait_for_a_call(started: Any) -> None:
    (worker, device, first), late = held(started, rows=2), Waiting("late", (1, 2))
    future = worker.call(lambda engine: engine.requests, idle=True)
    worker.submit(late.request)
    closing = threading.Thread(target=worker.close)
    closing.start()
    assert wait_until(lambda: worker._closing)
    device.gate.set()
    closing.join(100)
    assert (first.finish, late.finish) == ("cancelled", "cancelled") and future.result(100) == 0
    assert not worker.healthy() and worker.failure is None
