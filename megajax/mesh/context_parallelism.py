"""How rows are sharded over the devices of `context`. Does not import jax or numpy."""

from dataclasses import dataclass
from typing import Literal, Self

from megajax.mesh.config import ContextStrategy, ParallelConfig


@dataclass(frozen=True, slots=True)
class ContextSharding:
    """The part of each row on a device, and how attention reaches the other parts. Hashable.

    `megajax.mesh.zigzag_order.SequenceSharding` arranges arrays accordingly.
    """

    devices: int = 1
    """Devices that hold different positions of a row, C."""
    rounds: int = 0
    """Zigzag rounds: a device holds two chunks per round. 0: one chunk per device, in order."""
    strategy: ContextStrategy = "all_gather"
    """How attention reaches the keys of other devices."""
    exchanging: int = 1
    """Neighbouring devices that first exchange heads for positions."""

    @classmethod
    def of(cls, cfg: ParallelConfig, *, causal: bool) -> Self:
        """The sharding of a layout. causal: whether no position of the model sees a later one."""
        rounds = cfg.context_rounds if causal and cfg.context > 1 else 0
        return cls(cfg.context, rounds, cfg.context_strategy, cfg.exchanging())

    @property
    def chunks(self) -> int:
        """Number of chunks of each row on a device."""
        return max(1, 2 * self.rounds)

    @property
    def unit(self) -> int:
        """The length of a row must be a multiple of this."""
        return self.devices * self.chunks

    def between(self) -> Literal["all_gather", "ring"] | None:
        """How queries reach keys of devices with the same heads; None if a device has all positions of its heads."""
        if self.exchanging == self.devices:
            return None
        return "ring" if "ring" in self.strategy else "all_gather"

    def label(self) -> str:
        """Description for the banner; "" for unsharded rows."""
        if self.devices == 1:
            return ""
        groups = f" in groups of {self.exchanging}" if 1 < self.exchanging < self.devices else ""
        return f"over context {self.devices} by {self.strategy}{groups}"


UNSHARDED = ContextSharding()
"""Each device has whole rows."""
