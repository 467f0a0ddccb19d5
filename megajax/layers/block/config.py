"""Configs of a residual block and of a stack of blocks; imports neither jax nor flax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.layers.block.residual import MixerConfig, ResidualBlock
from megajax.layers.checks import LARGEST
from megajax.layers.facts import Layer, LayerBuilder, Mixer, Weight, prefixed
from megajax.layers.moe.config import FeedForwardConfig
from megajax.layers.norm.config import LayerScaleConfig, NormConfig, RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.runs import period


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(ResidualBlock):
    """One residual block: x + mixer(norm(x)), then x + mlp(norm(x))."""

    target: ClassVar[str] = "megajax.layers.block.module:Block"
    sub_layers: ClassVar[Mapping[str, type]] = MappingProxyType({"mixer": Mixer, "mlp": Layer})
    mixer: MixerConfig | LayerBuilder
    """Layer that mixes tokens along the sequence."""
    mlp: FeedForwardConfig | LayerBuilder
    """Layer that transforms each token separately."""
    norm: NormConfig | LayerBuilder = field(default_factory=RMSNormConfig)
    """Normalisation before each sub-layer."""
    dropout: float = 0.0
    """Dropout rate of the output of each sub-layer."""
    layer_scale: LayerScaleConfig | None = None
    """Learned factors on the channels of each sub-layer's output; none: no scaling."""

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        weights = ResidualBlock.weights(self, hidden)
        if self.layer_scale is None:
            return weights
        factors = self.layer_scale.weights(hidden)
        return weights + tuple(factor for name in self.sub_layers for factor in prefixed(f"{name}_scale", factors))


@dataclass(frozen=True, kw_only=True, slots=True)
class PostNormBlockConfig(BlockConfig):
    """A block that normalises after each sum, as Vaswani et al. 2017: norm(x + mixer(x)), then norm(x + mlp(x))."""

    target: ClassVar[str] = "megajax.layers.block.module:PostNormBlock"


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerBlockConfig(ResidualBlock):
    """A block with one sub-layer: x + mixer(norm(x)). Hybrids are made of it and of `FeedForwardBlockConfig`."""

    target: ClassVar[str] = "megajax.layers.block.module:MixerBlock"
    sub_layers: ClassVar[Mapping[str, type]] = MappingProxyType({"mixer": Mixer})
    mixer: MixerConfig | LayerBuilder
    """Layer that mixes tokens along the sequence."""
    norm: NormConfig | LayerBuilder = field(default_factory=RMSNormConfig)
    """Normalisation before it."""
    dropout: float = 0.0
    """Dropout rate of its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardBlockConfig(ResidualBlock):
    """A block with one sub-layer: x + mlp(norm(x))."""

    target: ClassVar[str] = "megajax.layers.block.module:FeedForwardBlock"
    sub_layers: ClassVar[Mapping[str, type]] = MappingProxyType({"mlp": Layer})
    mlp: FeedForwardConfig | LayerBuilder
    """Layer that transforms each token separately."""
    norm: NormConfig | LayerBuilder = field(default_factory=RMSNormConfig)
    """Normalisation before it."""
    dropout: float = 0.0
    """Dropout rate of its output."""


type AnyBlockConfig = BlockConfig | MixerBlockConfig | FeedForwardBlockConfig


@runtime_checkable
class RelativelyBiased(Protocol):
    """A mixer that may have a bias of scores by distance."""

    @property
    def heads(self) -> int: ...

    @property
    def relative(self) -> RelativeBiasConfig | None: ...


def shared_bias(block: AnyBlockConfig) -> tuple[int, RelativeBiasConfig] | None:
    """Heads and settings of the table that a block shares with others of its stack."""
    for mixer in block.own_mixers().values():
        if isinstance(mixer, RelativelyBiased) and mixer.relative is not None and mixer.relative.shared:
            return mixer.heads, mixer.relative
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(Builds):
    """`pattern` is unrolled in Python and scanned over `repeats`: (dense, moe) x 16 is 32 layers."""

    target: ClassVar[str] = "megajax.layers.stack.stack:Stack"
    pattern: tuple[AnyBlockConfig, ...]
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

    def with_pattern(self, blocks: Sequence[AnyBlockConfig]) -> "StackConfig":
        """A copy with these blocks as the pattern."""
        return replace(self, pattern=tuple(blocks))

    @classmethod
    def of(cls, blocks: Sequence[AnyBlockConfig]) -> "StackConfig":
        """A stack of these blocks with the shortest repeating pattern."""
        length = period([blocks.index(block) for block in blocks])
        return cls(pattern=tuple(blocks[:length]), repeats=len(blocks) // length)

    def layers(self) -> int:
        """Number of layers."""
        return len(self.pattern) * self.repeats

    def stored(self) -> tuple[tuple[AnyBlockConfig, tuple[int, ...]], ...]:
        """Each block with stacked weights, and the numbers of its layers."""
        size = len(self.pattern)
        return tuple((block, tuple(range(place, self.layers(), size))) for place, block in enumerate(self.pattern))

    def named_blocks(self) -> dict[str, AnyBlockConfig]:
        """Setting -> block, for each block of the config."""
        return {f"pattern.{place}": block for place, block in enumerate(self.pattern)}

    def cut_unit(self) -> int:
        """Layers that stay on one pipeline stage: a repeat of the pattern."""
        return len(self.pattern)

    def sub_layers(self) -> int:
        """Number of sub-layers: outputs that are added to the residual stream."""
        return self.repeats * sum(len(block.sub_layers) for block in self.pattern)

    def repeated_blocks(self) -> tuple[tuple[AnyBlockConfig, int], ...]:
        """Each block of the config and how often it is applied."""
        return tuple((block, self.repeats) for block in self.pattern)

    def shared_weights(self) -> tuple[Weight, ...]:
        """Weights that all layers of the stack share."""
        return table_weights(self.pattern)


def shared_tables(blocks: Sequence[AnyBlockConfig]) -> set[tuple[int, RelativeBiasConfig]]:
    """Heads and settings of the tables of relative biases that blocks of a stack share."""
    return {shared for block in blocks if (shared := shared_bias(block)) is not None}


def table_problems(setting: str, blocks: Sequence[AnyBlockConfig]) -> list[Problem]:
    """Problems of the tables that blocks of a stack share."""
    message = "blocks that share a table of relative biases differ in its settings or in heads"
    return [Problem(setting, message, "use the same settings")] if len(shared_tables(blocks)) > 1 else []


def table_weights(blocks: Sequence[AnyBlockConfig]) -> tuple[Weight, ...]:
    """The tables that blocks of a stack share."""
    return tuple(
        Weight("relative.table", (bias.buckets, heads), (None, "heads")) for heads, bias in shared_tables(blocks)
    )
