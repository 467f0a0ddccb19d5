"""Measures the time between steps by phase, and its differences between processes."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import Mesh

from megajax.faults.activity import COMPILE, DATA_WAIT, EVALUATION, SAVE, STEP, Activity
from megajax.mesh.named_shardings import each_process
from megajax.training.limits.step import SECONDS, StepControl
from megajax.training.loop import Flight, StepInput, Steps
from megajax.training.step_report import StepInfo

INTEGRITY = "integrity"
"""Checks for silent corruption: timed but not exchanged."""
PHASES = (DATA_WAIT, EVALUATION, SAVE)
HOST, STALLED = "host", "stalled"
"""Time of a process outside of all phases and of waits for its devices, and time in which it did not run. They are
exchanged to find the process that the others wait for."""
EXCHANGED = (*PHASES, HOST, STALLED)
PER_STEP = (DATA_WAIT, HOST, STALLED)
"""Phases of every step: their means per step are exchanged; of the other phases, the sums."""


class PhaseTimes:
    """Seconds by phase, on this process and, every `exchange_every` steps, of all processes.

    The seconds are exchanged within a train step, as stop flags are, so no process waits for another. exchange_every:
    None for a single process. stalled: total seconds in which this process did not run.
    """

    def __init__(self, mesh: Mesh, exchange_every: int | None, stalled: Callable[[], float] = lambda: 0.0):
        self._mesh, self._every, self._stalled_so_far = mesh, exchange_every, stalled
        self._since_step: dict[str, float] = {}
        self.forget()
        self._account: Array | None = None if exchange_every is None else self._array()

    @contextmanager
    def measure(self, phase: str) -> Generator[None]:
        """Counts the time of the block in `phase`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - start)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Within the block, this process waits for its devices."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - start

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self._since_step[phase] = self._since_step.get(phase, 0.0) + seconds
        self._since_exchange[phase] = self._since_exchange.get(phase, 0.0) + seconds

    def take_step(self) -> dict[str, float]:
        """Seconds by phase since the last call; phases without time are omitted."""
        seconds, self._since_step = self._since_step, {}
        self._steps += 1
        return seconds

    def forget(self) -> None:
        """Starts a new account and drops the current one: the time of a first step includes its compilation."""
        self._since_exchange, self._steps = dict.fromkeys(PHASES, 0.0), 0
        self._waited, self._began, self._stalled_before = 0.0, time.monotonic(), self._stalled_so_far()

    def due(self, step: int) -> bool:
        """Whether seconds are exchanged with this step."""
        return self._every is not None and step % self._every == 0

    def account(self, fresh: bool) -> Array | None:
        """float32 [devices, exchanged phases]: the input of a step, a new account if `fresh`, else the last one."""
        if fresh:
            self._account = self._array()
            self.forget()
        return self._account

    def received(self, exchanged: Any, fresh: bool) -> tuple[dict[str, float], np.ndarray | None]:
        """The exchanged seconds as {"data_wait_min": seconds, ...} and float32 [processes, exchanged phases].

        exchanged: float32 [devices, exchanged phases], or None. ({}, None) unless `fresh`.
        """
        if exchanged is None or not fresh:
            return {}, None
        seconds = np.asarray(exchanged, np.float32)
        least, most = seconds.min(0).tolist(), seconds.max(0).tolist()
        extremes = {
            f"{name}_{end}": value
            for name, *bounds in zip(EXCHANGED, least, most, strict=True)
            if name in PHASES and (bounds[1] or name in PER_STEP)
            for end, value in zip(("min", "max"), bounds, strict=True)
        }
        owners = [device.process_index for device in self._mesh.devices.flat]
        return extremes, np.stack([seconds[owners.index(process)] for process in sorted(set(owners))])

    def totals(self) -> dict[str, float]:
        """Seconds by phase in the current account."""
        return self._since_exchange | {
            HOST: max(time.monotonic() - self._began - self._waited - sum(self._since_exchange.values()), 0.0),
            STALLED: self._stalled_so_far() - self._stalled_before,
        }

    def _array(self) -> Array:
        totals = self.totals()
        values = [totals[name] / (max(self._steps, 1) if name in PER_STEP else 1) for name in EXCHANGED]
        return each_process(self._mesh, np.asarray(values, np.float32))


class TimedSteps:
    """Steps whose phases are timed, and known to the watchdog."""

    def __init__(
        self, steps: Steps, times: PhaseTimes, activity: Activity, waiting: Callable[[int], AbstractContextManager[Any]]
    ):
        """waiting: context around the wait for the rows of a step."""
        self._steps, self._times, self._activity, self._waiting = steps, times, activity, waiting
        self._first = steps.run.steps_done + 1
        activity.step = steps.run.steps_done
        # Batch sizes. Each has its own program, which another process may still compile when this one runs it.
        self._compiled: set[int] = set()
        self._landed: set[int] = set()

    def read(self, step: int) -> StepInput:
        """The next batch, with the seconds by phase since the one before."""
        with self._times.measure(DATA_WAIT), self._activity.phase(DATA_WAIT, step), self._waiting(step):
            step_input, fresh = self._steps.read(step), self._times.due(step)
        phases = self._times.take_step()
        return step_input._replace(phases=phases, account=self._times.account(fresh), fresh=fresh)

    def dispatch(self, step_input: StepInput, control: StepControl = StepControl()) -> Flight:  # noqa: B008
        """Dispatches a step with the seconds to exchange."""
        phase = STEP if step_input.rows in self._compiled else COMPILE
        self._compiled.add(step_input.rows)
        with self._activity.phase(phase, step_input.step, first=step_input.rows not in self._landed):
            return self._steps.dispatch(step_input, control._replace(seconds=step_input.account))

    def fetch(self, flight: Flight) -> StepInfo:
        """Waits for a step, whose report has the exchanged seconds."""
        step, rows, fresh = flight.step_input.step, flight.step_input.rows, flight.step_input.fresh
        with self._activity.phase(STEP, step, first=rows not in self._landed), self._times.waiting():
            info = self._steps.fetch(flight)
        self._activity.step = step
        self._landed.add(rows)
        if step == self._first:
            self._times.forget()
        extremes, by_process = self._times.received(info.metrics.pop(SECONDS, None), fresh)
        return info._replace(phases=info.phases | extremes, by_process=by_process)

    def land(self, flights: deque[Flight]) -> StepInfo:
        """See `Steps.land`."""
        return self.fetch(flights.popleft())
