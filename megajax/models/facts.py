"""What the config of a model tells about the model: counts, and what plans by formula are made of.

A model need not have facts. Where it has none, FLOPs are unknown (null in metrics, left out of the banner), and plans
are made by the compiler alone. Importing this imports neither jax nor flax.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from megajax.config.errors import Problem
from megajax.kernels.capability import Choice, Device, Request
from megajax.layers.config import BlockConfig, NormConfig, StackConfig
from megajax.layers.facts import BlockFacts, Layer, Side
from megajax.layers.remat import Recompute, Recomputing


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one training step per token, by how core attention is counted."""

    causal: float
    """Half the square of scores: what a causal model needs."""
    full: float
    """The whole square: the older convention."""


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Weights of a model; of the vocabulary's tables the ids in use count, not the padding."""

    layers: int
    """In the blocks, the final norm, and the heads that predict further ahead."""
    embedding: int
    """Token and position tables."""
    head: int
    """0 when tied."""

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head


@runtime_checkable
class Facts(Protocol):
    """A model of one stack of blocks between the tables of a vocabulary."""

    hidden: int
    sequence_length: int
    stack: StackConfig
    norm: NormConfig
    tied: bool
    learned_positions: bool
    loss_chunk: int
    recompute: Recompute
    residual: str

    def flops(self) -> Flops:
        """Forward and backward pass, for rows of sequence_length tokens."""
        ...

    def parameter_count(self) -> ParameterCount:
        """Number of weights."""
        ...

    def padded_vocabulary(self) -> int:
        """Rows of a table of the vocabulary."""
        ...

    def predicting_blocks(self) -> tuple[BlockConfig, ...]:
        """Blocks behind the stack, each with two matrices of hidden x hidden and three norms."""
        ...

    def repeated_blocks(self) -> tuple[tuple[BlockConfig, int], ...]:
        """Each block, and how often it is applied; those behind the stack too."""
        ...

    def recomputing(self) -> Recomputing:
        """What each layer saves for the backward pass."""
        ...

    def kernel_choices(self, known: Request, device: Device | None) -> tuple[Choice, ...]:
        """The kernel of each block of the pattern. Raises UserError for one that is asked for and not available."""
        ...

    def with_kernels(self, names: Sequence[str]) -> "Facts":
        """The same model with these kernels in the blocks of the pattern."""
        ...

    def mesh_problems(self, sizes: Mapping[str, int], *, sequence: bool) -> Iterator[Problem]:
        """What is wrong with the model on a mesh. sizes: mesh axis -> devices; sequence: sequence parallelism."""
        ...

    def matmul_sides(self, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device."""
        ...


def facts_of(model: Any) -> Facts | None:
    """The config itself, where it and all its layers have facts."""
    if not isinstance(model, Facts):
        return None
    layers = (layer for block, _ in model.repeated_blocks() for layer in block.layers().values())
    return model if all(isinstance(layer, Layer) for layer in layers) else None


def flops_of(model: Any) -> Flops | None:
    """Operations per token; None where the config does not tell. A method `flops()` is all that a model needs."""
    if isinstance(model, Facts) and facts_of(model) is None:
        return None
    count = getattr(model, "flops", None)
    return None if count is None else count()


def block_facts(model: Facts, blocks: tuple[BlockConfig, ...], dtype: str) -> tuple[BlockFacts, ...]:
    """Facts of blocks of a model that computes in this dtype."""
    return tuple(_block_facts(block, model.hidden, model.sequence_length, dtype) for block in blocks)


@lru_cache(maxsize=4096)
def _block_facts(block: BlockConfig, hidden: int, length: int, dtype: str) -> BlockFacts:
    return block.facts(hidden=hidden, length=length, dtype=dtype)
