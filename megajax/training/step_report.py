"""The report of a step on the host, with what the guard did in it."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from megajax.mesh.layer_metrics import Measured
from megajax.training.repr_text import info_text


class GuardLimits(NamedTuple):
    """The limits of one step; within the compiled step each is a float32 []."""

    loss: float | Array = inf
    """An update with a larger loss is not applied."""
    norm: float | Array = inf
    """An update with a larger gradient norm is not applied."""
    final: Any = 1.0
    """Above 0: the step is not run again, even if it is suspicious."""
    loss_scale: float | Array = inf
    """Loss scale above which an overflow is not suspicious."""
    loss_factor: float | Array = 1.0
    """Factor on the loss; other than 1 in drills only."""
    gradient_factor: float | Array = 1.0
    """Factor on the gradients; other than 1 in drills only."""


class GuardReport(NamedTuple):
    """What the guard did in a step."""

    limits: GuardLimits = GuardLimits()
    first_try: "StepInfo | None" = None
    """The report of the first run, if the step was run again."""
    nonfinite: str | None = None
    """The weights whose gradients were not finite in the second run; None if all were finite."""


class StepInfo(NamedTuple):
    """The report of a step, on the host."""

    step: int
    """Number of the step, from 1."""
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    """Whether its update was not applied."""
    consumed_samples: int
    """Rows read since the start of the run, this step's among them."""
    rows: int
    """Rows of this step."""
    seconds: float
    """Seconds from the end of the step before (or the dispatch of this one, if later) to the end of this one."""
    metrics: dict[str, float]
    """Other metrics of the loss."""
    phases: dict[str, float]
    """Seconds of this process in the wait for the step's rows and in hooks before the step; in some steps also the
    least and the largest of all processes (see PhaseTimes). {} without `TimedSteps`."""
    measured: Mapping[str, Measured] = MappingProxyType({})
    """Measures of layers by name."""
    guarded: GuardReport = GuardReport()
    """Of guarded steps."""
    by_process: np.ndarray | None = None
    """float32 [processes, timing.EXCHANGED]: seconds of each phase in each process; None in most steps."""

    def __repr__(self) -> str:
        return info_text(self)
