"""Where the time between steps goes, phase by phase, and how that differs over processes."""

import time
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from jax import Array
from jax.sharding import Mesh

from megajax.mesh.processes import each_process

DATA_WAIT, EVALUATION, SAVE = "data_wait", "evaluation", "save"
PHASES = (DATA_WAIT, EVALUATION, SAVE)
PER_STEP = (DATA_WAIT,)
"""Phases that every step has: of these means per step are told, of others sums."""


class PhaseTimes:
    """Seconds by phase, on this process and, every `tell_every` steps, the least and largest of all.

    They travel with a step like the wish to stop does, so that telling them makes nobody wait. tell_every: None where
    there is one process.
    """

    def __init__(self, mesh: Mesh, tell_every: int | None):
        self._mesh, self._every = mesh, tell_every
        self._since_step: dict[str, float] = {}
        self._since_told, self._steps = dict.fromkeys(PHASES, 0.0), 0
        self._sent: Array | None = None if tell_every is None else self._array()

    @contextmanager
    def measure(self, phase: str) -> Generator[None]:
        """Count what happens inside as `phase`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds."""
        self._since_step[phase] = self._since_step.get(phase, 0.0) + seconds
        self._since_told[phase] = self._since_told.get(phase, 0.0) + seconds

    def of_step(self) -> dict[str, float]:
        """Seconds by phase since it was last asked; phases without any are left out."""
        seconds, self._since_step = self._since_step, {}
        self._steps += 1
        return seconds

    def due(self, step: int) -> bool:
        """Whether seconds are told with this step."""
        return self._every is not None and step % self._every == 0

    def tell(self, fresh: bool) -> Array | None:
        """float32 [devices, 3], what goes along with a step: a new account if `fresh`, or the one before again."""
        if fresh:
            self._sent = self._array()
            self._since_told, self._steps = dict.fromkeys(PHASES, 0.0), 0
        return self._sent

    def told(self, extremes: np.ndarray | None, fresh: bool) -> dict[str, float]:
        """What came back, float32 [2, 3], as {"data_wait_min": seconds, ...}; {} for an account known already."""
        if extremes is None or not fresh:
            return {}
        least, most = extremes.tolist()
        return {
            f"{name}_{end}": seconds
            for name, *ends in zip(PHASES, least, most, strict=True)
            if ends[1] or name in PER_STEP
            for end, seconds in zip(("min", "max"), ends, strict=True)
        }

    def _array(self) -> Array:
        values = [self._since_told[name] / (max(self._steps, 1) if name in PER_STEP else 1) for name in PHASES]
        return each_process(self._mesh, np.asarray(values, np.float32))
