"""What processes tell each other, sent along with a train step: nobody waits for it but the step's own metrics."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from megajax.batch import Batch
from megajax.training.guarded import StepControl
from megajax.training.state import TrainState
from megajax.training.step import Metrics, TrainStep

STOP = "stop"
"""Metric of a step that was given flags: whether some process was asked to stop, int32 []."""
SECONDS = "seconds"
"""Metric of a step that was given seconds: those of every device's process, float32 [devices, phases]."""

NO_CONTROL = StepControl()


def exchanging(step: TrainStep, everywhere: Sharding) -> TrainStep:
    """The step (state, batch, control) with what control's flags and seconds come to among its metrics.

    everywhere: the sharding of an array that all devices have.
    """

    def train_step(state: TrainState, batch: Batch, control: StepControl = NO_CONTROL) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, batch, control)
        told = {}
        if control.flags is not None:
            told[STOP] = jnp.max(control.flags)
        if control.seconds is not None:
            told[SECONDS] = lax.with_sharding_constraint(control.seconds, everywhere)
        return state, {**metrics, **told}

    return train_step
