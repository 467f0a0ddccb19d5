"""Configs of a residual block and of a stack of blocks; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.kernels.capability import Request
from megajax.layers.config.attention import MixerConfig
from megajax.layers.config.mlp import MLPConfig
from megajax.layers.config.norm import LARGEST, NormConfig, RMSNormConfig
from megajax.layers.config.position import RelativeBiasConfig
from megajax.layers.facts import (
    BlockFacts,
    Elements,
    Layer,
    LayerBuilder,
    Matmul,
    MultiplyAdds,
    Side,
    Weight,
    prefixed,
    total_size,
)
from megajax.layers.remat import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(Builds):
    """One residual block: x + mixer(norm(x)), then x + mlp(norm(x))."""

    target: ClassVar[str] = "megajax.layers.block:Block"
    mixer: MixerConfig | LayerBuilder
    """What mixes along the sequence."""
    mlp: MLPConfig | LayerBuilder
    """What works on each position."""
    norm: NormConfig | LayerBuilder = field(default_factory=RMSNormConfig)
    """Normalisation before each of the two."""
    dropout: float = 0.0
    """Share of each sub-layer's output zeroed in training."""

    def problems(self) -> list[Problem]:
        if not 0 <= self.dropout < 1:
            return [Problem("dropout", f"must be at least 0 and below 1, got {self.dropout}")]
        return []

    def layers(self) -> Mapping[str, Layer]:
        """The two by their names in messages."""
        return {"mixer": self.mixer, "mlp": self.mlp}

    def summary(self, hidden: int) -> str:
        """Sizes of mixer and MLP, in words."""
        return ", ".join(layer.summary(hidden) for layer in self.layers().values())

    def has_dropout(self) -> bool:
        """Whether training draws random numbers."""
        return self.dropout > 0 or getattr(self.mixer, "dropout", 1.0) > 0  # a mixer that does not say may do so

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        norm = self.norm.weights(hidden)
        parts = {"mixer_norm": norm, "mlp_norm": norm, **{name: x.weights(hidden) for name, x in self.layers().items()}}
        return tuple(weight for name, weights in parts.items() for weight in prefixed(name, weights))

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """Those of mixer and MLP."""
        return (*self.mixer.matmuls(hidden), *self.mlp.matmuls(hidden))

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        """Operations of the forward pass."""
        return self.mixer.multiply_adds(hidden).plus(self.mlp.multiply_adds(hidden))

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Tensors within mixer and MLP that may be saved."""
        return {**self.mixer.tensors(hidden), **self.mlp.tensors(hidden)}

    def facts(self, *, hidden: int, length: int, dtype: str) -> BlockFacts:
        """What the block costs on rows of `length` tokens in this compute dtype."""
        choice = self.mixer.kernel_choice(hidden, Request(dtype=dtype, length=length), None)
        return BlockFacts(
            hidden=hidden,
            weights=total_size(self.weights(hidden)),
            matmuls=self.matmuls(hidden),
            tensors=self.tensors(hidden),
            multiply_adds=self.multiply_adds(hidden),
            heads=self.mixer.heads,
            fused=choice.kernel != "reference",
        )

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """What is wrong with mixer and MLP on a mesh. sizes: mesh axis -> devices."""
        layers = self.layers()
        problems = [(name, problem) for name, layer in layers.items() for problem in layer.mesh_problems(sizes)]
        if problems:
            legal = set.intersection(*(set(layer.tensor_sizes()) for layer in layers.values()))
            advice = f"parallel.tensor can be {', '.join(map(str, sorted(legal)))}"
            for name, problem in problems:
                hint = f"{problem.hint}; {advice}" if problem.hint else advice
                yield Problem(f"{name}.{problem.where}", problem.what, hint)

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """Sides of the matrices on one device, beside the hidden size."""
        for name, layer in self.layers().items():
            for side in layer.matmul_sides(hidden, tensor):
                yield side._replace(where=f"{name}.{side.where}")


def shared_bias(block: BlockConfig) -> RelativeBiasConfig | None:
    """The table a block shares with others of its stack."""
    relative = getattr(block.mixer, "relative", None)
    return relative if relative is not None and relative.shared else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(Builds):
    """`pattern` is unrolled in Python and scanned over `repeats`: (dense, moe) x 16 is 32 layers."""

    target: ClassVar[str] = "megajax.layers.stack:Stack"
    pattern: tuple[BlockConfig, ...]
    """Blocks that are repeated together."""
    repeats: int
    """How many times the pattern is applied; layers = len(pattern) * repeats."""

    def problems(self) -> list[Problem]:
        problems = []
        if not self.pattern:
            problems.append(Problem("pattern", "needs at least one block"))
        if not 1 <= self.repeats <= LARGEST:
            problems.append(Problem("repeats", f"must be between 1 and {LARGEST}, got {self.repeats}"))
        return problems + table_problems("pattern", self.pattern)

    def parts(self) -> tuple["StackConfig", ...]:
        """The segments of the stack: itself."""
        return (self,)

    @classmethod
    def of(cls, blocks: Sequence[BlockConfig]) -> "StackConfig":
        """A stack of these blocks, with the shortest pattern whose repeats give them."""
        length = period([blocks.index(block) for block in blocks])
        return cls(pattern=tuple(blocks[:length]), repeats=len(blocks) // length)

    def layers(self) -> int:
        """Number of blocks a token passes."""
        return len(self.pattern) * self.repeats

    def repeated_blocks(self) -> tuple[tuple[BlockConfig, int], ...]:
        """Each block that is written in the config, and how often it is applied."""
        return tuple((block, self.repeats) for block in self.pattern)

    def shared_weights(self) -> tuple[Weight, ...]:
        """Weights of the stack itself."""
        return table_weights(self.pattern)


def period(numbers: Sequence[int]) -> int:
    """Length of the shortest sequence whose repeats give this one."""
    count = len(numbers)
    return next(n for n in range(1, count + 1) if count % n == 0 and all(map(eq, numbers, numbers[n:])))


def shared_tables(blocks: Sequence[BlockConfig]) -> set[tuple[int, RelativeBiasConfig]]:
    """Heads and settings of the tables of relative biases that blocks of a stack share."""
    return {(block.mixer.heads, bias) for block in blocks if (bias := shared_bias(block)) is not None}


def table_problems(where: str, blocks: Sequence[BlockConfig]) -> list[Problem]:
    """What is wrong with the tables that blocks of a stack share."""
    what = "blocks that share a table of relative biases differ in it, or in heads"
    return [Problem(where, what, "make them alike")] if len(shared_tables(blocks)) > 1 else []


def table_weights(blocks: Sequence[BlockConfig]) -> tuple[Weight, ...]:
    """The tables that blocks of a stack share."""
    return tuple(
        Weight("relative.table", (bias.buckets, heads), (None, "heads")) for heads, bias in shared_tables(blocks)
    )
