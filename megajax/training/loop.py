"""The plain training loop: dispatches a step, then yields the report of the step before it.

A run wraps it: `megajax.training.guarded.loop` puts the guard, stop flags, timed phases and the watchdog around
`Steps`, and hooks between the steps, each in a file of its own.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array

from megajax.batch import SAMPLE, Batch
from megajax.faults.signals import StopWaiting
from megajax.training.limits.step import StepControl
from megajax.training.observations import measurements
from megajax.training.program import Program
from megajax.training.state import TrainState
from megajax.training.step import Metrics
from megajax.training.step_report import StepInfo

KEYS = ("loss", "grad_norm", "lr", "loss_scale", "skipped")


class StepInput(NamedTuple):
    """A batch on the devices and its accounts, kept until its step needs no rerun."""

    step: int
    batch: Batch
    consumed: int
    metrics: Mapping[str, float] = MappingProxyType({})
    """What was measured when the batch was made."""
    phases: Mapping[str, float] = MappingProxyType({})
    account: Array | None = None
    """float32 [devices, phases]: seconds of each phase in each process, exchanged with the step if `fresh`."""
    fresh: bool = False

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.batch[SAMPLE].size


class Flight(NamedTuple):
    """A dispatched step whose metrics have not been fetched."""

    step_input: StepInput
    metrics: Metrics
    dispatched: float


class Running(Protocol):
    """What the loop reads and writes of a `megajax.training.session.Run`."""

    state: TrainState

    @property
    def program(self) -> Program: ...
    @property
    def batches(self) -> Iterator[tuple]: ...
    @property
    def steps_done(self) -> int: ...


@contextmanager
def computing(run: Running) -> Generator[None]:
    """The mesh and the matmul precision of a run."""
    with jax.set_mesh(run.program.mesh), jax.default_matmul_precision(run.program.cfg.precision.matmul_precision()):
        yield


class Steps:
    """Reads batches of a `Run`, dispatches steps and fetches their numbers. Wrappers have the same methods."""

    def __init__(self, run: Running):
        self.run, self._last_end = run, time.monotonic()

    def read(self, step: int) -> StepInput:
        """The next batch. Raises StopWaiting if the wait is ended."""
        with jax.set_mesh(self.run.program.mesh):
            return StepInput(step, *next(self.run.batches))

    def dispatch(self, step_input: StepInput, *control: StepControl) -> Flight:
        """control: inputs of the step besides state and batch."""
        dispatched = time.monotonic()
        with computing(self.run), jax.profiler.StepTraceAnnotation("train", step_num=step_input.step):
            self.run.state, metrics = self.run.program.train_step(self.run.state, step_input.batch, *control)
        return Flight(step_input, metrics, dispatched)

    def fetch(self, flight: Flight) -> StepInfo:
        """Waits for a step; what it gives to wrappers remains in `metrics` of the report."""
        values = jax.device_get(dict(flight.metrics))
        since, self._last_end = max(self._last_end, flight.dispatched), time.monotonic()
        observed = self.run.program.observed
        observations = {path: values.pop(path) for path in observed if path in values}
        numbers = {name: value.tolist() for name, value in values.items()}  # scalars, but for those of wrappers
        return StepInfo(
            flight.step_input.step,
            **{name: numbers.pop(name) for name in KEYS},
            consumed_samples=flight.step_input.consumed,
            rows=flight.step_input.rows,
            seconds=self._last_end - since,
            metrics=numbers | dict(flight.step_input.metrics),
            phases=dict(flight.step_input.phases),
            measured=measurements(observed, observations),
        )

    def land(self, flights: deque[Flight]) -> StepInfo:
        """Removes the oldest step from `flights` and returns its report."""
        return self.fetch(flights.popleft())


def run_step(run: Running, batch: Batch) -> StepInfo:
    """Train on a batch, and wait for the report."""
    steps, number, consumed = Steps(run), run.steps_done + 1, int(run.state.consumed_samples)
    return steps.fetch(steps.dispatch(StepInput(number, batch, consumed + batch[SAMPLE].size)))


type Between = Callable[[int, Callable[[], Iterator[StepInfo]]], Iterator[StepInfo]]
"""Called after each step with its number, and with a function that waits for all dispatched steps and yields their
reports; yields these reports, or none. StopWaiting raised in it ends the loop."""


def run_steps(
    run: Running, last: int, steps: Any = None, between: Between = lambda step, reports: iter(())
) -> Iterator[StepInfo]:
    """Train up to and including step `last`, yielding the report of each step one step late.

    Metrics are fetched while the next step runs, so that reports never delay the devices.

    steps: a wrapper of `Steps`, by default the plain ones; between: work between steps.
    """
    steps, flights = steps or Steps(run), deque[Flight]()

    def landed(remaining: int) -> Iterator[StepInfo]:
        while len(flights) > remaining:
            yield steps.land(flights)

    with suppress(StopWaiting):
        for step in range(run.steps_done + 1, last + 1):
            flights.append(steps.dispatch(steps.read(step)))
            yield from landed(1)
            yield from between(step, lambda: landed(0))
    yield from landed(0)
