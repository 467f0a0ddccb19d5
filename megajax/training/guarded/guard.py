"""The host's part of guarded steps: computes the limits of each step and explains suspicious steps.

A loss spike is a loss above a multiple of earlier ones.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from megajax.faults.config import ResilienceConfig
from megajax.faults.drills import factors, for_this_attempt
from megajax.faults.exit_codes import NUMERIC_FAULT, TRANSIENT_FAULT
from megajax.mesh.named_shardings import replicated
from megajax.training.step_report import GuardLimits

LAG = 2
"""Steps between a loss and the first step that is compared with it, because results are fetched one step late. It is
the same for all steps, so that pauses for saving and resumes do not change results."""


class SpikeRule:
    """The spike threshold, from the losses of earlier steps.

    Args:
        factor: multiple of the reference above which a loss is a spike; None: no spikes.
        reference: "largest": the largest loss so far (Megatron-LM's rule, with factor 10); "median": the median of the
            last `window` losses.
        window: number of losses before spikes are detected.
    """

    def __init__(self, factor: float | None, reference: Literal["largest", "median"], window: int):
        self._factor, self._reference, self._window = factor, reference, window
        self._count, self._largest = 0, 0.0
        self._recent: deque[float] = deque(maxlen=window)
        self._waiting: deque[tuple[int, float]] = deque()

    def note(self, step: int, loss: float) -> None:
        """Records the loss of a step whose update was applied."""
        if self._factor is not None and isfinite(loss):
            self._waiting.append((step, loss))

    def limit(self, step: int) -> float:
        """The largest loss of `step` that is not a spike; infinite until there are `window` losses."""
        while self._waiting and self._waiting[0][0] <= step - LAG:
            _, loss = self._waiting.popleft()
            self._count += 1
            self._largest = max(self._largest, loss)
            self._recent.append(loss)
        if self._factor is None or self._count < self._window:
            return inf
        return self._factor * (self._largest if self._reference == "largest" else statistics.median(self._recent))

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, as plain values; {} without a factor."""
        if self._factor is None:
            return {}
        recent = list(self._recent) if self._reference == "median" else []
        return {"count": self._count, "largest": self._largest, "recent": recent, "waiting": list(self._waiting)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint; an empty one starts from scratch."""
        if self._factor is None or not state:
            return
        self._count, self._largest = int(state["count"]), float(state["largest"])
        self._recent.extend(state["recent"])
        if self._reference == "median" and len(self._recent) < self._window:
            self._count = len(self._recent)  # the saved run had another reference or a shorter window
        self._waiting.extend((int(step), float(loss)) for step, loss in state["waiting"])


class Guard:
    """Computes the limits of each step from the losses of the steps before."""

    def __init__(self, cfg: ResilienceConfig, floor: float | None, mesh: Mesh):
        """floor: see PrecisionConfig.floor."""
        self.cfg, self._floor = cfg, inf if floor is None else floor
        self._drills, self._mesh = for_this_attempt(cfg.drills()), mesh
        self.spikes = SpikeRule(cfg.spike_factor, cfg.spike_reference, cfg.spike_window)
        self.no_rerun = self._everywhere(np.asarray(False))
        self._device_limits: tuple[GuardLimits, Array] | None = None

    def limits(self, step: int) -> GuardLimits:
        """Limits of the first run of a step."""
        skip = step in self.cfg.skip_steps
        return GuardLimits(
            -inf if skip else self.spikes.limit(step),
            inf if self.cfg.largest_norm is None else self.cfg.largest_norm,
            float(skip or not self.cfg.rerun),
            self._floor,
            *factors(self._drills, step, repeated=False),
        )

    def rerun_limits(self, step: int, first: GuardLimits) -> GuardLimits:
        """Limits of the second run. first: those of the first run."""
        loss = inf if self.cfg.spike_action == "accept" else first.loss
        rerun_factors = factors(self._drills, step, repeated=True)
        return first._replace(loss=loss, final=1.0, loss_factor=rerun_factors[0], gradient_factor=rerun_factors[1])

    def on_devices(self, limits: GuardLimits) -> Array:
        """The limits as float32 [6] on the devices; cached, because they rarely change between steps."""
        if self._device_limits is None or self._device_limits[0] != limits:
            self._device_limits = limits, self._everywhere(np.asarray(limits, np.float32))
        return self._device_limits[1]

    def suspicion(self, limits: GuardLimits, loss: float, norm: float) -> str | None:
        """Why a step with these numbers is suspicious; None if it is not."""
        numbers = {"loss": loss, "gradient norm": norm}
        nonfinite = [f"{name} ({value})" for name, value in numbers.items() if not isfinite(value)]
        if nonfinite:
            return " and ".join(nonfinite) + (" are" if len(nonfinite) > 1 else " is") + " not finite"
        if loss > np.float32(limits.loss) > -inf:
            median = f"median of the last {self.cfg.spike_window} losses"
            reference = {"largest": "largest loss so far", "median": median}[self.cfg.spike_reference]
            return f"loss {loss:g} is above {self.cfg.spike_factor:g} x the {reference}"
        return None

    def _everywhere(self, value: np.ndarray) -> Array:
        return jax.make_array_from_callback(value.shape, replicated(self._mesh), lambda index: value[index])


class NumericFault(Exception):
    """A step whose loss or gradients are invalid; its update was not applied."""

    code = NUMERIC_FAULT
    """Exit code of the run."""


class UnrepeatedFault(NumericFault):
    """The step failed twice from the same state and rows with different numbers: neither data nor model is the cause.

    Megatron-LM's codes differ. It exits with 16 for a result that repeats on this machine, so that a run on another
    machine tells a broken machine from a bad batch, and then with 17. Here a result that repeats exits with 17: the
    data may be the cause, and a supervisor may restart on the same machine, which would repeat it. A result that does
    not repeat exits with 16: it may not occur after a restart.
    """

    code = TRANSIENT_FAULT


class Corruption(Exception):
    """Devices that should agree hold or compute different values: nothing may be saved. The message is for users."""
