"""The loop of a run: the plain loop with a guard, stop flags, timed phases, the watchdog and hooks around it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any, Protocol

import jax
import numpy as np

from megajax.batch import Batch
from megajax.faults.activity import Activity
from megajax.faults.signals import StopWaiting, agree
from megajax.training.guarded.guard import Guard
from megajax.training.guarded.phase_timers import PhaseTimes, TimedSteps
from megajax.training.guarded.stop_flags import ExchangingSteps
from megajax.training.limits.nonfinite_gradients import nonfinite_message
from megajax.training.limits.step import RERUN, StepControl
from megajax.training.loop import Flight, Running, StepInput, Steps, computing, run_steps
from megajax.training.observations import measurements
from megajax.training.step_report import GuardLimits, GuardReport, StepInfo


class Hook[R: Running](Protocol):
    """Work between steps, called after each step for which `due(step)` is true."""

    phase: str
    """The phase of its time."""

    def due(self, step: int) -> bool:
        """The same on all processes, which run a collective after the hooks that are due: a function of the settings
        and the step, or of a decision that they have taken together."""
        ...

    def __call__(self, run: R, step: int) -> None: ...


class HooksBetween[R: Running]:
    """Runs the hooks that are due; before a hook runs, all steps up to its own have been reported."""

    def __init__(
        self,
        run: R,
        hooks: Sequence[Hook[R]],
        stopping: Callable[[], bool],
        stop: Callable[[], bool],
        times: PhaseTimes,
        activity: Activity,
    ):
        """stopping: whether this process was asked to stop; stop: whether any process was, as far as all know."""
        self._run, self._hooks, self._stopping, self._stop = run, hooks, stopping, stop
        self._times, self._activity = times, activity

    def __call__(self, step: int, reports: Callable[[], Iterator[StepInfo]]) -> Iterator[StepInfo]:
        """Raises StopWaiting after the hooks of the step in which the run stops."""
        due = [hook for hook in self._hooks if hook.due(step)]
        if due or self._stop():
            yield from reports()
        for hook in due:
            with self._times.measure(hook.phase), self._activity.phase(hook.phase, step):
                hook(self._run, step)
        # A request may arrive during a long hook, which may end early because of it.
        if self._stop() or (due and agree(self._stopping())):
            raise StopWaiting


class GuardedSteps:
    """Steps with limits: a suspicious step is run again, and then the steps that followed it."""

    def __init__(self, run: Running, steps: TimedSteps, guard: Guard):
        self._run, self._steps, self._guard, self.read = run, steps, guard, steps.read
        self._rerun = guard.no_rerun
        self._limits: dict[int, GuardLimits] = {}

    def dispatch(self, step_input: StepInput, limits: GuardLimits | None = None) -> Flight:
        """Dispatches a step, with `limits` or else the guard's."""
        limits = limits or self._guard.limits(step_input.step)
        self._limits[step_input.step] = limits
        control = StepControl(limits=self._guard.on_devices(limits), rerun=self._rerun)
        flight = self._steps.dispatch(step_input, control)
        self._rerun = flight.metrics[RERUN]
        return flight

    def land(self, flights: deque[Flight]) -> StepInfo:
        """Removes the oldest step from `flights` and returns its report, after a second run if it needs one."""
        flight = flights.popleft()
        info, rerun = self._fetch(flight)
        if rerun:
            later_inputs = [later.step_input for later in flights]
            flights.clear()
            self._rerun = self._guard.no_rerun
            limits = self._guard.rerun_limits(info.step, info.guarded.limits)
            second, _ = self._fetch(self.dispatch(flight.step_input, limits))
            cause = None
            if not isfinite(second.grad_norm):
                cause = self._nonfinite_weights(flight.step_input.batch, limits, second)
            report = second.guarded._replace(first_try=info, nonfinite=cause)
            info = second._replace(seconds=info.seconds + second.seconds, guarded=report)
            flights.extend(self.dispatch(step_input) for step_input in later_inputs)
        if not info.skipped:
            self._guard.spikes.note(info.step, info.loss)
        return info

    def _fetch(self, flight: Flight) -> tuple[StepInfo, bool]:
        """(report of a step with its limits, whether it changed nothing and has to be run again)."""
        info = self._steps.fetch(flight)
        rerun = bool(info.metrics.pop(RERUN))
        return info._replace(guarded=GuardReport(self._limits.pop(info.step))), rerun

    def _nonfinite_weights(self, batch: Batch, limits: GuardLimits, info: StepInfo) -> str:
        """A message about the weights whose gradients are not finite, for a step that changed no weight."""
        program, factor = self._run.program, np.float32(limits.gradient_factor)
        with computing(self._run):
            nonfinite, observations = jax.device_get(
                program.nonfinite_gradients(self._run.state.inputs, batch, np.float32(info.loss_scale), factor)
            )
        return nonfinite_message(nonfinite, program.declared, measurements(program.observed, observations).values())


def run_guarded_steps[R: Running](
    run: R,
    last: int,
    hooks: Sequence[Hook[R]] = (),
    stopping: Callable[[], bool] = lambda: False,
    *,
    guard: Guard | None = None,
    exchange_every: int = 10,
    activity: Activity | None = None,
    stalled: Callable[[], float] = lambda: 0.0,
    waiting: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[StepInfo]:
    """`run_steps` as a job runs it.

    Args:
        hooks: called between steps, in this order. Before a hook runs, all steps up to its own have been yielded.
        stopping: whether this process was asked to stop; called after each step. Several processes exchange the
            results within the step, and all end after the same step, at most three steps after the request.
        guard: runs suspicious steps again, and then the steps that followed them, so that a transient fault changes no
            result. Without a guard, updates that are not finite are skipped.
        exchange_every: steps between exchanges of the seconds by phase of several processes.
        activity: records the phases of the loop.
        stalled: see PhaseTimes.
        waiting: context around the wait for the rows of a step; StopWaiting raised in it ends the loop.
    """
    several, activity = jax.process_count() > 1, activity or Activity()
    times = PhaseTimes(run.program.mesh, exchange_every if several else None, stalled)
    exchanging = ExchangingSteps(run, stopping) if several else None
    timed = TimedSteps(exchanging or Steps(run), times, activity, waiting)
    steps = timed if guard is None else GuardedSteps(run, timed, guard)
    stop = stopping if exchanging is None else lambda: exchanging.stop
    return run_steps(run, last, steps, HooksBetween(run, hooks, stopping, stop, times, activity))
