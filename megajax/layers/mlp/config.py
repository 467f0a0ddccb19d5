"""Configs of feed-forward layers; imports neither jax nor flax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from megajax.config.bounds import Positive, Size
from megajax.layers.checks import ChannelSharded
from megajax.layers.facts import Elements, Matmul, Weight
from megajax.layers.recompute import Part


class FeedForward(ChannelSharded):
    """Facts of an MLP with the matrices `inner` to the width ffn and `down` back."""

    target: ClassVar[str] = "megajax.layers.mlp.module:MLP"
    inner: ClassVar[tuple[str, ...]]
    """Names of the matrices that multiply the input."""
    ffn: int
    bias: bool

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Every weight of the module."""
        inner = [Weight(name, (hidden, self.ffn), ("embed", "mlp")) for name in self.inner]
        matrices = (*inner, Weight("down", (self.ffn, hidden), ("mlp", "embed")))
        if not self.bias:
            return matrices
        biases = [Weight(f"{name}_bias", (self.ffn,), ("mlp",)) for name in self.inner]
        return (*matrices, *biases, Weight("down_bias", (hidden,), ("embed",)))

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        """The matmuls to ffn and back."""
        hidden_side, count = Elements(replicated=hidden), len(self.inner)
        up = Matmul(inputs=hidden_side, outputs=Elements(sharded=count * self.ffn), result="mlp", weights=count)
        return up, Matmul(inputs=Elements(sharded=self.ffn), outputs=hidden_side, result="residual")

    def tensors(self, hidden: int) -> Mapping[Part, Elements]:
        """Inputs of the activation function, and input of `down`."""
        del hidden
        return {"mlp": Elements(sharded=len(self.inner) * self.ffn), "activation": Elements(sharded=self.ffn)}

    def sharded_channels(self) -> tuple[str, int]:
        """The width between the matrices."""
        return "ffn", self.ffn

    def summary(self, hidden: int) -> str:
        """Text of the width."""
        del hidden
        return f"ffn {self.ffn}"


@dataclass(frozen=True, kw_only=True)
class DenseMLPConfig(FeedForward):
    """Two matrices with an activation function between them.

    Example: `mj.DenseMLPConfig(ffn=3072, activation="gelu", bias=True)`
    """

    inner: ClassVar[tuple[str, ...]] = ("up",)
    ffn: Size
    """Width between the matrices."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"] = "gelu"
    """gelu is exact (erf), gelu_tanh the approximation GPT-2 used, quick_gelu x sigmoid(1.702 x)."""
    bias: bool = True
    """Biases on both matrices."""


@dataclass(frozen=True, kw_only=True)
class GatedMLPConfig(FeedForward):
    """activation(x gate) * (x up), then down (Shazeer 2020).

    Example: `mj.GatedMLPConfig(ffn=14336)`
    """

    inner: ClassVar[tuple[str, ...]] = ("gate", "up")
    ffn: Size
    """Width between the matrices."""
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"] = "silu"
    """silu makes it SwiGLU, gelu GeGLU."""
    bias: bool = False
    """Biases on all three matrices."""
    clamp: Positive | None = None
    """x gate is clipped to at most this, x up to [-clamp, clamp]; none: no clipping."""
    offset: float = 0.0
    """Added to x up."""
    gate_factor: Positive = 1.0
    """Factor on x gate, as in Falcon-H1."""


@dataclass(frozen=True, kw_only=True)
class XieluMLPConfig(FeedForward):
    """Two matrices with xIELU between them (Huang and Schlag 2024), whose two slopes each layer learns, as in Apertus.

    Example: `mj.XieluMLPConfig(ffn=21504)`
    """

    target: ClassVar[str] = "megajax.layers.mlp.module:XieluMLP"
    inner: ClassVar[tuple[str, ...]] = ("up",)
    activation: ClassVar[str] = "xielu"
    ffn: Size
    """Width between the matrices."""
    bias: bool = False
    """Biases on both matrices."""

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Those of the matrices, and the two slopes."""
        slopes = (Weight(name, (1,), (None,)) for name in ("positive", "negative"))
        return (*super().weights(hidden), *slopes)


type MLPConfig = DenseMLPConfig | GatedMLPConfig
