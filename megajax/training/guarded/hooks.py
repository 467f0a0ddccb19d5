"""Hooks between the steps of a run, and requests to stop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from megajax.faults.activity import Activity
from megajax.faults.signals import StopWaiting, agree
from megajax.training.guarded.phase_timers import PhaseTimes
from megajax.training.step_report import StepInfo


class Hook(Protocol):
    """Work between steps, called after each step for which `due(step)` is true."""

    phase: str
    """The phase of its time."""

    def due(self, step: int) -> bool:
        """The same on all processes, which run a collective after the hooks that are due: a function of the settings
        and the step, or of a decision that they have taken together."""
        ...

    def __call__(self, run: Any, step: int) -> None: ...


class HooksBetween:
    """Runs the hooks that are due; before a hook runs, all steps up to its own have been reported."""

    def __init__(
        self,
        run: Any,
        hooks: Sequence[Hook],
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
