"""Exchanges stop flags and times of all processes within the train step, so that no process waits for them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from megajax.batch import Batch
from megajax.config.errors import UserError
from megajax.mesh.processes.agreement import StopFlags
from megajax.mesh.processes.peers import Peers
from megajax.training.guarded.step import StepControl
from megajax.training.loop import Flight, StepInput, Steps, computing
from megajax.training.state import TrainState
from megajax.training.step import Metrics, TrainStep
from megajax.training.step_report import StepInfo

STOP = "stop"
"""Metric of a step with flags: whether any process was asked to stop, int32 []."""
SECONDS = "seconds"
"""Metric of a step with seconds: float32 [devices, phases], the seconds of each device's process."""

NO_CONTROL = StepControl()


def exchanging(step: TrainStep, replicated: Sharding) -> TrainStep:
    """The step (state, batch, control) that adds the maximum of control's flags, and its seconds, to the metrics.

    replicated: the sharding of a replicated array.
    """

    def train_step(state: TrainState, batch: Batch, control: StepControl = NO_CONTROL) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch, control)
        exchanged = {}
        if control.flags is not None:
            exchanged[STOP] = jnp.max(control.flags)
        if control.seconds is not None:
            exchanged[SECONDS] = lax.with_sharding_constraint(control.seconds, replicated)
        return state, {**metrics, **exchanged}

    return train_step


class ExchangingSteps(Steps):
    """The steps of several processes, which tell each other in each step whether one of them was asked to stop."""

    def __init__(self, run: Any, stopping: Callable[[], bool]):
        super().__init__(run)
        self._stopping, self._flags = stopping, StopFlags(run.mesh)
        self._peers = Peers()  # with a token of its own: a notebook makes several loops
        self._compiled: set[int] = set()
        self.stop = False
        """Whether any process was asked to stop when a step that has been fetched was dispatched."""

    def dispatch(self, step_input: StepInput, *control: Any) -> Flight:
        """Dispatches a step with the flags. Programs of a new size are compiled by all processes first.

        A program connects devices when it first runs, and this has a short limit of its own (30 s with gloo), while
        processes on busy hosts take different times to compile.
        """
        with_flags = control[0]._replace(flags=self._flags(self._stopping()))
        if step_input.rows not in self._compiled:
            self._compiled.add(step_input.rows)
            with computing(self.run):
                self.run.train_step.lower(self.run.state, step_input.batch, with_flags).compile()
            digests = self._peers.gather([scheduled.digest for scheduled in self.run.program.schedules()])
            if any(digest != digests[0] for digest in digests):
                raise UserError(
                    "the processes have different schedules of the train step and would wait for each other.\n"
                    "Set xla.schedule=default, or start all with the same jax, compiler flags and compile cache."
                )
        return super().dispatch(step_input, with_flags)

    def fetch(self, flight: Flight) -> StepInfo:
        """Waits for a step, and notes its flags."""
        info = super().fetch(flight)
        self.stop = self.stop or bool(info.metrics.pop(STOP))
        return info
