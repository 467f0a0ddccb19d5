"""Configs of feed-forward layers; imports neither jax nor flax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from megajax.config.errors import Problem
from megajax.config.hints import divisors_of
from megajax.layers.checks import above_zero
from megajax.layers.facts import Elements, LayerFacts, Matmul, Side, Weight
from megajax.layers.recompute import Part


class FeedForward(LayerFacts):
    """Facts of an MLP with the matrices `inner` to the width ffn and `down` back."""

    __slots__ = ()
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

    def tensor_sizes(self) -> list[int]:
        """Legal sizes of `tensor`."""
        return divisors_of(max(self.ffn, 1))

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """`tensor` must divide ffn."""
        tensor = sizes["tensor"]
        if self.ffn % tensor:
            below = self.ffn // tensor * tensor
            widths = " or ".join(str(width) for width in (below, below + tensor) if width)
            yield Problem("ffn", f"ffn={self.ffn} is not divisible by parallel.tensor={tensor}", f"use ffn={widths}")

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        """The shard of ffn on a device."""
        del hidden
        if self.ffn % tensor == 0:
            yield Side("ffn", f"{self.ffn} over parallel.tensor={tensor} is", self.ffn // tensor)

    def summary(self, hidden: int) -> str:
        """Text of the width."""
        del hidden
        return f"ffn {self.ffn}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMLPConfig(FeedForward):
    """Two matrices with an activation function between them.

    Example: `mj.DenseMLPConfig(ffn=3072, activation="gelu", bias=True)`
    """

    inner: ClassVar[tuple[str, ...]] = ("up",)
    ffn: int
    """Width between the matrices."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"] = "gelu"
    """gelu is exact (erf), gelu_tanh the approximation GPT-2 used, quick_gelu x sigmoid(1.702 x)."""
    bias: bool = True
    """Biases on both matrices."""

    def problems(self) -> list[Problem]:
        return above_zero(ffn=self.ffn)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMLPConfig(FeedForward):
    """activation(x gate) * (x up), then down (Shazeer 2020).

    Example: `mj.GatedMLPConfig(ffn=14336)`
    """

    inner: ClassVar[tuple[str, ...]] = ("gate", "up")
    ffn: int
    """Width between the matrices."""
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"] = "silu"
    """silu makes it SwiGLU, gelu GeGLU."""
    bias: bool = False
    """Biases on all three matrices."""
    clamp: float | None = None
    """x gate is clipped to at most this, x up to [-clamp, clamp]; none: no clipping."""
    offset: float = 0.0
    """Added to x up."""
    gate_factor: float = 1.0
    """Factor on x gate, as in Falcon-H1."""

    def problems(self) -> list[Problem]:
        return above_zero(ffn=self.ffn, clamp=self.clamp, gate_factor=self.gate_factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class XieluMLPConfig(FeedForward):
    """Two matrices with xIELU between them (Huang and Schlag 2024), whose two slopes each layer learns, as in Apertus.

    Example: `mj.XieluMLPConfig(ffn=21504)`
    """

    target: ClassVar[str] = "megajax.layers.mlp.module:XieluMLP"
    inner: ClassVar[tuple[str, ...]] = ("up",)
    activation: ClassVar[str] = "xielu"
    ffn: int
    """Width between the matrices."""
    bias: bool = False
    """Biases on both matrices."""

    def problems(self) -> list[Problem]:
        return above_zero(ffn=self.ffn)

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Those of the matrices, and the two slopes."""
        slopes = (Weight(name, (1,), (None,)) for name in ("positive", "negative"))
        return (*FeedForward.weights(self, hidden), *slopes)


type MLPConfig = DenseMLPConfig | GatedMLPConfig
