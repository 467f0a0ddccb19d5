"""Configs of a residual block; imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

from megajax.layers.block.residual import MixerConfig, ResidualBlock
from megajax.layers.facts import Layer, LayerBuilder, Mixer, Weight, prefixed
from megajax.layers.moe.config import FeedForwardConfig
from megajax.layers.norm.config import LayerScaleConfig, NormConfig, RMSNormConfig
from megajax.layers.position.config import RelativeBiasConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(ResidualBlock):
    """One residual block: x + mixer(norm(x)), then x + mlp(norm(x)).

    Example: `mj.BlockConfig(mixer=mj.AttentionConfig(heads=8), mlp=mj.GatedMLPConfig(ffn=1408))`
    """

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
    """A block that normalises after each sum, as Vaswani et al. 2017: norm(x + mixer(x)), then norm(x + mlp(x)).

    Example: `mj.PostNormBlockConfig(mixer=mj.AttentionConfig(heads=8), mlp=mj.DenseMLPConfig(ffn=2048))`
    """

    target: ClassVar[str] = "megajax.layers.block.module:PostNormBlock"


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerBlockConfig(ResidualBlock):
    """A block with one sub-layer: x + mixer(norm(x)). Hybrids are made of it and of `FeedForwardBlockConfig`.

    Example: `mj.MixerBlockConfig(mixer=mj.Mamba2Config(heads=8, head_dim=32))`
    """

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
    """A block with one sub-layer: x + mlp(norm(x)).

    Example: `mj.FeedForwardBlockConfig(mlp=mj.DenseMLPConfig(ffn=512))`
    """

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
