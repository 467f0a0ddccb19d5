"""Exchanges stop flags and times of all processes within the train step, so that no process waits for them."""

from collections.abc import Callable

import numpy as np

from megajax.config.errors import UserError
from megajax.mesh.named_shardings import each_process
from megajax.processes.must_be_equal import MUST_BE_EQUAL
from megajax.processes.peers import Peers
from megajax.training.limits.step import STOP, StepControl
from megajax.training.loop import Flight, Running, StepInput, Steps, computing
from megajax.training.step_report import StepInfo


class ExchangingSteps(Steps):
    """The steps of several processes, which tell each other in each step whether one of them was asked to stop."""

    def __init__(self, run: Running, stopping: Callable[[], bool]):
        super().__init__(run)
        self._stopping, mesh = stopping, run.program.mesh
        # int32 [devices of the mesh] each, made once; the run stops if the maximum over all devices is 1.
        self._flags = [each_process(mesh, np.asarray(flag, np.int32)) for flag in (0, 1)]
        self._peers = Peers()  # with a token of its own: a notebook makes several loops
        self._compiled: set[int] = set()
        self.stop = False
        """Whether any process was asked to stop when a step that has been fetched was dispatched."""

    def dispatch(self, step_input: StepInput, *control: StepControl) -> Flight:
        """Dispatches a step with the flags. Programs of a new size are compiled by all processes first.

        A program connects devices when it first runs, and this has a short limit of its own (30 s with gloo), while
        processes on busy hosts take different times to compile.
        """
        with_flags = control[0]._replace(flags=self._flags[self._stopping()])
        if step_input.rows not in self._compiled:
            self._compiled.add(step_input.rows)
            with computing(self.run):
                self.run.program.train_step.lower(self.run.state, step_input.batch, with_flags).compile()
            if not self._peers.equal(repr([scheduled.digest for scheduled in self.run.program.schedules()])):
                raise UserError(MUST_BE_EQUAL["schedules"].message)
        return super().dispatch(step_input, with_flags)

    def fetch(self, flight: Flight) -> StepInfo:
        """Waits for a step, and notes its flags."""
        info = super().fetch(flight)
        self.stop = self.stop or bool(info.metrics.pop(STOP))
        return info
