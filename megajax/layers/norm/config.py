"""Configs of normalisation layers; imports neither jax nor flax."""

from dataclasses import dataclass
from typing import ClassVar

from megajax.config.bounds import Positive
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.layers.facts import Weight


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(Builds):
    """Mean and variance normalisation with gain and, usually, bias (Ba et al. 2016).

    Example: `mj.LayerNormConfig(epsilon=1e-6)`
    """

    target: ClassVar[str] = "megajax.layers.norm.module:LayerNorm"
    epsilon: Positive = 1e-5
    """Added to the variance."""
    zero_centred: bool = False
    """The gain is 1 + weight, so that weight decay and initial zeros pull it towards 1."""

    gain: bool = True
    """Multiply by a gain; false, without a bias, in OLMo."""
    bias: bool = True
    """Add a bias; false in Cohere's models."""

    def problems(self) -> list[Problem]:
        without = self.bias and not self.gain
        return [Problem("bias", "needs a gain, and gain=false", "set it to false")] if without else []

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """Weights of a norm over a dimension of this size and logical axis."""
        names = [name for name in ("gain", "bias") if getattr(self, name)]
        return tuple(Weight(name, (size,), (axis,)) for name in names)


@dataclass(frozen=True, kw_only=True)
class RMSNormConfig(Builds):
    """Root-mean-square normalisation with gain (Zhang and Sennrich 2019).

    Example: `mj.RMSNormConfig(epsilon=1e-6)`
    """

    target: ClassVar[str] = "megajax.layers.norm.module:RMSNorm"
    epsilon: Positive = 1e-5
    """Added to the mean square."""
    zero_centred: bool = False
    """The gain is 1 + weight, so that weight decay and initial zeros pull it towards 1."""

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """Weights of a norm over a dimension of this size and logical axis."""
        return (Weight("gain", (size,), (axis,)),)


@dataclass(frozen=True, kw_only=True)
class L2NormConfig(Builds):
    """Root-mean-square normalisation without weights, as Llama 4 has it on queries and keys.

    Example: `mj.AttentionConfig(heads=8, qk_norm=mj.L2NormConfig())`
    """

    target: ClassVar[str] = "megajax.layers.norm.module:L2Norm"
    epsilon: Positive = 1e-6
    """Added to the mean square."""

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """No weights."""
        del size, axis
        return ()


@dataclass(frozen=True, kw_only=True)
class IdentityNormConfig(Builds):
    """No normalisation, as after the sections of Megatron-LM's T5 without Transformer Engine.

    Example: `mj.IdentityNormConfig()`
    """

    target: ClassVar[str] = "megajax.layers.norm.module:IdentityNorm"

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """No weights."""
        del size, axis
        return ()


@dataclass(frozen=True, kw_only=True)
class LayerScaleConfig(Builds):
    """A learned factor for each channel of a sub-layer's output (Touvron et al. 2021, CaiT, section 2).

    Example: `mj.LayerScaleConfig(initial=0.1)`
    """

    target: ClassVar[str] = "megajax.layers.norm.module:LayerScale"
    initial: Positive = 0.1
    """Initial value of the factors: 0.1 in InternViT, 1e-5 to 0.1 in CaiT."""

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """Weights of a scale over a dimension of this size and logical axis."""
        return (Weight("gain", (size,), (axis,)),)


@dataclass(frozen=True, kw_only=True)
class FixedScaleConfig(Builds):
    """A fixed factor on a sub-layer's output, as in Granite.

    Example: `mj.FixedScaleConfig(factor=0.22)`
    """

    target: ClassVar[str] = "megajax.layers.norm.module:FixedScale"
    factor: Positive
    """Factor on all elements."""

    def weights(self, size: int, axis: str | None = "embed") -> tuple[Weight, ...]:
        """No weights."""
        del size, axis
        return ()


@dataclass(frozen=True, kw_only=True)
class SumWeightsConfig:
    """Fixed factors of the terms of a block's sums: the residual stream, and the output of a sub-layer.

    Example: `mj.SumWeightsConfig(mixer_stream=3.6, mlp_stream=3.6)`
    """

    mixer_stream: Positive = 1.0
    """Factor on the stream where the mixer's output is added."""
    mixer_output: Positive = 1.0
    """Factor on the mixer's output."""
    beside_output: Positive = 1.0
    """Factor on the output of the mixer `beside`."""
    mlp_stream: Positive = 1.0
    """Factor on the stream where the feed-forward's output is added."""
    mlp_output: Positive = 1.0
    """Factor on the feed-forward's output."""

    def of(self, name: str) -> tuple[float, float]:
        """Factors of the stream and of the output of a sub-layer; 1 for cross-attention."""
        return getattr(self, f"{name}_stream", 1.0), getattr(self, f"{name}_output", 1.0)


type NormConfig = LayerNormConfig | RMSNormConfig | L2NormConfig | IdentityNormConfig
