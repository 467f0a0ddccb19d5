"""Exchanges stop flags and times of all processes within the train step, so that no process waits for them."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from megajax.batch import Batch
from megajax.training.guarded.step import StepControl
from megajax.training.state import TrainState
from megajax.training.step import Metrics, TrainStep

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
