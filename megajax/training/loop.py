"""The plain training loop: dispatches a step, then yields the report of the step before it.

A run wraps it: `megajax.training.guarded.loop` puts the guard, stop flags, timed phases and the watchdog around
`Steps`, and hooks between the steps, each in a file of its own.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax import Array

from megajax.batch import SAMPLE
from megajax.faults.signals import StopWaiting
from megajax.training.observations import measurements
from megajax.training.step import Metrics
from megajax.training.step_report import StepInfo

KEYS = ("loss", "grad_norm", "lr", "loss_scale", "skipped")


class StepInput(NamedTuple):
    """A batch on the devices and its accounts, kept until its step needs no rerun."""

    step: int
    batch: Any
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


@contextmanager
def computing(run: Any) -> Generator[None]:
    """The mesh and the matmul precision of a run."""
    with jax.set_mesh(run.mesh), jax.default_matmul_precision(run.cfg.precision.matmul_precision()):
        yield


class Steps:
    """Reads batches of a `Run`, dispatches steps and fetches their numbers. Wrappers have the same methods."""

    def __init__(self, run: Any):
        self.run, self._last_end = run, time.monotonic()

    def read(self, step: int) -> StepInput:
        """The next batch. Raises StopWaiting if the wait is ended."""
        with jax.set_mesh(self.run.mesh):
            return StepInput(step, *next(self.run.batches))

    def dispatch(self, step_input: StepInput, *control: Any) -> Flight:
        """control: inputs of the step besides state and batch."""
        dispatched = time.monotonic()
        with computing(self.run), jax.profiler.StepTraceAnnotation("train", step_num=step_input.step):
            self.run.state, metrics = self.run.train_step(self.run.state, step_input.batch, *control)
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


type Between = Callable[[int, Callable[[], Iterator[StepInfo]]], Iterator[StepInfo]]
"""Called after each step with its number, and with a function that waits for all dispatched steps and yields their
reports; yields these reports, or none. StopWaiting raised in it ends the loop."""


def run_steps(
    run: Any, last: int, steps: Any = None, between: Between = lambda step, reports: iter(())
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
        for step in range(run.step + 1, last + 1):
            flights.append(steps.dispatch(steps.read(step)))
            yield from landed(1)
            yield from between(step, lambda: landed(0))
    yield from landed(0)
