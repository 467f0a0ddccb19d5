"""The config of low-rank adapters; importing this imports neither jax nor flax."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar

from megajax.config.bounds import BelowOne, NotEmpty, Positive, Size
from megajax.config.class_references import Builds


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Builds):
    """Low-rank adapters (Hu et al. 2021, LoRA): x W + scale * (x A) B, where A and B are trained and W is not.

    `build(model)` adds them to a model.

    Example: `mj.LoRAConfig(rank=16, alpha=32)`
    """

    target: ClassVar[str] = "megajax.layers.lora.add_adapters:adapt"
    rank: Size = 8
    """Rank of an adapter: columns of A, rows of B."""
    alpha: Positive = 16.0
    """The scale is alpha / rank."""
    targets: Annotated[
        tuple[str, ...], NotEmpty("the default *.blocks.* adapts all matrices of blocks", "names no matrix")
    ] = ("*.blocks.*",)
    """Patterns of the paths of the matrices that have an adapter, such as *.mixer.query; * stands for any text, dots
    included. By default all matrices of mixers and MLPs."""
    dropout: BelowOne = 0.0
    """Dropout rate of an adapter's input. Adapters of experts have none."""
    rank_stabilized: bool = False
    """The scale is alpha / sqrt(rank) (Kalajdzievski 2023, rsLoRA)."""
    decomposed: bool = False
    """Each output of x W + scale * (x A) B is divided by the norm of its matrix column and multiplied by a trained
    magnitude (Liu et al. 2024, DoRA). Not for experts."""

    def scale(self) -> float:
        """Factor on the output of an adapter."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def size(self, shape: Sequence[int], axes: Sequence[str | None]) -> int:
        """Elements of the adapter of a matrix with these logical axes, including one per expert; 0 for a vector."""
        a, b = self.products(shape, axes)
        return a + b + b // self.rank * self.decomposed

    def products(self, shape: Sequence[int], axes: Sequence[str | None]) -> tuple[int, int]:
        """Elements of A and of B for such a matrix, including those of each expert; 0 for a vector."""
        experts = prod(size for size, axis in zip(shape, axes, strict=True) if axis == "expert")
        sides = [size for size, axis in zip(shape, axes, strict=True) if axis != "expert"]
        if len(sides) < 2:
            return 0, 0
        # Matrices that write to the residual stream contract all dimensions but the last, others only the first.
        end = len(sides) - 1 if axes[-1] == "embed" else 1
        return experts * self.rank * prod(sides[:end]), experts * self.rank * prod(sides[end:])
