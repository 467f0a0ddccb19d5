"""What processes tell each other, sent along with a train step: nobody waits for it but the step's own metrics."""

import jax.numpy as jnp

from megajax.batch import Batch
from megajax.training.guarded import StepControl
from megajax.training.state import TrainState
from megajax.training.step import Metrics, TrainStep

STOP = "stop"
"""Metric of a step that was given flags: whether some process was asked to stop, int32 []."""
SECONDS = "seconds"
"""Metric of a step that was given seconds: their least and largest over the processes, float32 [2, phases]."""

NO_CONTROL = StepControl()


def exchanging(step: TrainStep) -> TrainStep:
    """The step (state, batch, control) with what control's flags and seconds come to among its metrics."""

    def train_step(state: TrainState, batch: Batch, control: StepControl = NO_CONTROL) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch, control)
        told = {}
        if control.flags is not None:
            told[STOP] = jnp.max(control.flags)
        if control.seconds is not None:
            told[SECONDS] = jnp.stack([control.seconds.min(0), control.seconds.max(0)])
        return state, {**metrics, **told}

    return train_step
