"""Suspicious steps: whether a step's update is made, whether the step is run again, and what comes of that.

The verdict falls within the compiled step, on every device alike, before anything is changed; a step that is to be run
again changes nothing at all, and those dispatched after it, not knowing yet, change nothing either.
"""

from math import inf, isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.resilience.config import ResilienceConfig
from megajax.resilience.drills import factors
from megajax.resilience.spikes import SpikeRule


class Orders(NamedTuple):
    """What the host says of one step; within a step each is a float32 []."""

    limit: Any = inf
    """Updates of a larger loss are not made."""
    norm: Any = inf
    """Updates of a larger gradient norm are not made."""
    final: Any = 1.0
    """Above 0: the step is not to be run again, whatever comes."""
    floor: Any = inf
    """Loss scale above which an overflow is nothing unusual."""
    loss_factor: Any = 1.0
    """What the loss is multiplied by: 1, but in a drill."""
    gradient_factor: Any = 1.0
    """What the gradients are multiplied by: 1, but in a drill."""


class Told(NamedTuple):
    """What a step is told beside its batch; None: nothing of that kind."""

    flags: Array | None = None
    """int32 [devices], from every process whether it was asked to stop."""
    seconds: Array | None = None
    """float32 [devices, phases], from every process how long it took over what."""
    orders: Array | None = None
    """float32 [6]: Orders."""
    held: Array | None = None
    """bool []: a step before this one is to be run again, so this one does nothing."""


NOTHING = Told()


class Verdict(NamedTuple):
    """bool []."""

    made: Array
    """Whether the update is made."""
    held: Array
    """Whether nothing is changed, not even what is counted, because this step or one before it is to be run again."""


def judge(told: Told, *, finite: Array, loss: Array, norm: Array, scale: Array) -> Verdict:
    """What becomes of a step. finite: of loss and gradient norm; scale: the loss scale it used; loss: nats per token,
    nan where no token counts."""
    if told.orders is None or told.held is None:
        return Verdict(finite, jnp.zeros((), bool))
    orders = Orders(*told.orders)
    high = jnp.where(jnp.isnan(loss), 0.0, loss) > orders.limit
    suspicious = jnp.where(finite, high, ~(scale > orders.floor))
    held = told.held | (suspicious & ~(orders.final > 0))
    return Verdict(finite & ~high & ~(norm > orders.norm) & ~held, held)


class Guard:
    """The host's part: what each step is told, and what its numbers mean."""

    def __init__(self, cfg: ResilienceConfig, floor: float | None, mesh: Mesh):
        """floor: see PrecisionConfig.floor."""
        self.cfg, self._floor = cfg, inf if floor is None else floor
        self._drills, self._mesh = cfg.drills(), mesh
        self.spikes = SpikeRule(cfg.spike_factor, cfg.spike_reference, cfg.spike_window)
        self.held = self._everywhere(np.asarray(False))
        self._sent: tuple[Orders, Array] | None = None

    def orders(self, step: int) -> Orders:
        """For the first time a step is run."""
        skip = step in self.cfg.skip_steps
        return Orders(
            -inf if skip else self.spikes.limit(step),
            inf if self.cfg.largest_norm is None else self.cfg.largest_norm,
            float(skip or not self.cfg.rerun),
            self._floor,
            *factors(self._drills, step, again=False),
        )

    def again(self, step: int, first: Orders) -> Orders:
        """For the second time."""
        limit = inf if self.cfg.spike_action == "accept" else first.limit
        again = factors(self._drills, step, again=True)
        return first._replace(limit=limit, final=1.0, loss_factor=again[0], gradient_factor=again[1])

    def sent(self, orders: Orders) -> Array:
        """On the devices; nearly every step has the orders of the one before."""
        if self._sent is None or self._sent[0] != orders:
            self._sent = orders, self._everywhere(np.asarray(orders, np.float32))
        return self._sent[1]

    def why(self, orders: Orders, loss: float, norm: float) -> str | None:
        """What was suspicious about a step's numbers, in words; None: nothing."""
        bad = [f"{name} ({value})" for name, value in (("loss", loss), ("gradient norm", norm)) if not isfinite(value)]
        if bad:
            return " and ".join(bad) + (" are" if len(bad) > 1 else " is") + " not finite"
        if loss > np.float32(orders.limit) > -inf:
            what = {"largest": "largest loss so far", "median": f"median of the last {self.cfg.spike_window} losses"}
            return f"loss {loss:g} is above {self.cfg.spike_factor:g} x the {what[self.cfg.spike_reference]}"
        return None

    def _everywhere(self, value: np.ndarray) -> Array:
        sharding = NamedSharding(self._mesh, PartitionSpec())
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
