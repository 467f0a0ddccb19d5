"""The facts of how rows are cut over the devices of `context`; importing this imports neither jax nor numpy."""

from dataclasses import dataclass
from typing import Literal, Self

from megajax.mesh.config import ContextStrategy, ParallelConfig


@dataclass(frozen=True, slots=True)
class ContextSharding:
    """Which part of each row a device holds, and how attention reaches the other parts. Hashable.

    `megajax.mesh.sequence_sharding.SequenceSharding` orders arrays by it.
    """

    devices: int = 1
    """Devices that hold different positions of a row, C."""
    rounds: int = 0
    """Rounds of zigzag: a device holds two chunks of each. 0: one chunk, and the chunks in order."""
    strategy: ContextStrategy = "all_gather"
    """How attention reaches keys of other devices."""
    exchanging: int = 1
    """Neighbouring devices that first exchange heads for positions."""

    @classmethod
    def of(cls, cfg: ParallelConfig, *, causal: bool) -> Self:
        """The cut of a layout. causal: of a model in which no position sees a later one."""
        rounds = cfg.context_rounds if causal and cfg.context > 1 else 0
        return cls(cfg.context, rounds, cfg.context_strategy, cfg.exchanging())

    @property
    def chunks(self) -> int:
        """Chunks of a row that a device holds."""
        return max(1, 2 * self.rounds)

    @property
    def unit(self) -> int:
        """What the positions of a row have to be a multiple of."""
        return self.devices * self.chunks

    def between(self) -> Literal["all_gather", "ring"] | None:
        """How queries reach keys of devices with the same heads; None where a device has all positions of its heads."""
        if self.exchanging == self.devices:
            return None
        return "ring" if "ring" in self.strategy else "all_gather"

    def label(self) -> str:
        """For the banner; "" for whole rows."""
        if self.devices == 1:
            return ""
        groups = f" in groups of {self.exchanging}" if 1 < self.exchanging < self.devices else ""
        return f"over context {self.devices} by {self.strategy}{groups}"


UNSHARDED = ContextSharding()
"""Every device has whole rows."""
