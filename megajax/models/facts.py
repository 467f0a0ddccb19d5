"""What the config of a model tells about the model: counts, and what plans by formula are made of.

A model need not have facts. Where it has none, FLOPs are unknown (null in metrics, left out of the banner), and plans
are made by the compiler alone, without the time of a step. Importing this imports neither jax nor flax.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from megajax.config.errors import Problem, UserError
from megajax.kernels.capability import Choice, Device, Kernel, Request
from megajax.layers.config import BlockConfig, StackConfig
from megajax.layers.facts import BlockFacts, LayerBuilder, Norm, Side, missing_members
from megajax.layers.remat import Recomputing
from megajax.layers.segments import SegmentsConfig
from megajax.models.protocol import ModelConfig


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
class ChoosesKernels(Protocol):
    """A model whose kernels can be told before it is built. Of its blocks, those whose mixer is a `Mixer` count."""

    def kernel_choices(self, known: Request, device: Device | None) -> tuple[Choice, ...]:
        """The kernel of each such block of the pattern.

        Raises UserError for one that is asked for and not available.
        """
        ...

    def with_kernels(self, names: Sequence[Kernel]) -> "ModelConfig":
        """The same model with these kernels in these blocks."""
        ...


@runtime_checkable
class Facts(ModelConfig, ChoosesKernels, Protocol):
    """A model of one stack of blocks between the tables of a vocabulary; fields or properties, and methods."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        ...

    @property
    def norm(self) -> Norm | LayerBuilder:
        """Normalisation before the head."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the head uses the token embedding's table."""
        ...

    @property
    def learned_positions(self) -> bool:
        """Whether there is a table of positions."""
        ...

    @property
    def loss_chunk(self) -> int:
        """Tokens whose float32 logits exist at once."""
        ...

    @property
    def residual(self) -> str:
        """Dtype of the residual stream: compute or float32."""
        ...

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

    def norm_size(self) -> int:
        """Weights of the norm before the head."""
        ...

    def recomputing(self) -> Recomputing:
        """What each layer saves for the backward pass."""
        ...

    def with_recomputing(self, chosen: Recomputing) -> "Facts":
        """The same model, whose layers save this."""
        ...

    def mesh_problems(self, sizes: Mapping[str, int], *, sequence: bool) -> Iterator[Problem]:
        """What is wrong with the model on a mesh. sizes: mesh axis -> devices; sequence: sequence parallelism."""
        ...

    def matmul_sides(self, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device."""
        ...


def missing_facts(model: Any) -> dict[str, str]:
    """Setting -> what its config lacks, for each part of the config of a model that has no facts."""
    lacking: dict[str, tuple[Any, list[str]]] = {"model": (model, missing_members(model, Facts))}
    if hasattr(model, "norm"):
        lacking["model.norm"] = (model.norm, missing_members(model.norm, Norm))
    stack = getattr(model, "stack", None)
    if isinstance(stack, StackConfig | SegmentsConfig):
        for place, block in enumerate(stack.pattern):
            for name, members in block.missing_facts().items():
                lacking[f"model.stack.pattern.{place}.{name}"] = (getattr(block, name), members)
    said: dict[str, str] = {}
    for where, (part, names) in lacking.items():
        if names:  # of equal layers, the first
            said.setdefault(f"{type(part).__name__} has no {', '.join(names)}", where)
    sections = list(model.stacks()) if isinstance(model, Facts) else []
    if len(sections) > 1:
        said[f"facts are of one stack, and {type(model).__name__} has sections {sections}"] = "model"
    return {where: what for what, where in said.items()}


def facts_of(model: Any) -> Facts | None:
    """The config itself, where it has one section, and it and all its layers have facts."""
    if not isinstance(model, Facts) or not isinstance(model.norm, Norm) or len(model.stacks()) > 1:
        return None
    known = all(block.known_layers() is not None for block, _ in model.repeated_blocks())
    return model if known else None


def demand_facts(model: Any) -> Facts:
    """The config itself. Raises UserError where it has no facts, which names what is missing."""
    facts = facts_of(model)
    if facts is None:
        lines = "\n".join(f"  {where}: {what}" for where, what in missing_facts(model).items())
        raise UserError(
            f"{type(model).__name__} has no facts, which formulas, searches, comparisons and sweeps are made of.\n"
            f"Missing are methods and fields of megajax.models.facts.Facts and megajax.layers.facts.Layer:\n{lines}\n"
            "The compiler needs none of them: plan without --formula, --search, --compare and --sweep."
        )
    return facts


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
