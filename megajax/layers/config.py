"""What each layer can be told; importing this imports neither jax nor flax.

Sizes that all layers share (hidden size, number of layers, init scale) belong to the model and reach the layers through
their Site, so that no fact is written twice.
"""

from dataclasses import dataclass, field
from math import gcd, inf
from typing import ClassVar, Literal

from megajax.config.builds import Builds
from megajax.config.errors import Problem


def above_zero(**settings: float | None) -> list[Problem]:
    """A problem for each setting that is given and not a number above 0."""
    return [
        Problem(name, f"must be a number above 0, got {value}")
        for name, value in settings.items()
        if value is not None and not 0 < value < inf
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNormConfig(Builds):
    """Mean and variance normalisation with gain and bias (Ba et al. 2016)."""

    target: ClassVar[str] = "megajax.layers.norm:LayerNorm"
    epsilon: float = 1e-5
    """Added to the variance."""

    def problems(self) -> list[Problem]:
        return above_zero(epsilon=self.epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSNormConfig(Builds):
    """Root-mean-square normalisation with gain (Zhang and Sennrich 2019)."""

    target: ClassVar[str] = "megajax.layers.norm:RMSNorm"
    epsilon: float = 1e-5
    """Added to the mean square."""

    def problems(self) -> list[Problem]:
        return above_zero(epsilon=self.epsilon)


type NormConfig = LayerNormConfig | RMSNormConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3ScalingConfig:
    """Llama 3.1's stretch of the low RoPE frequencies (Llama team 2024)."""

    factor: float = 8.0
    """How far the lowest frequencies are stretched."""
    low: float = 1.0
    """Wavelengths above original/low are stretched in full."""
    high: float = 4.0
    """Wavelengths below original/high are left alone."""
    original: int = 8192
    """Sequence length the model was trained on before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig(Builds):
    """Rotary positions (Su et al. 2021), halves rotated against each other."""

    target: ClassVar[str] = "megajax.layers.rope:Rope"
    base: float = 10000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    scaling: Llama3ScalingConfig | None = None
    """Stretched frequencies for long sequences; none: plain."""

    def problems(self) -> list[Problem]:
        return above_zero(base=self.base)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig(Builds):
    """Grouped-query self-attention, causal."""

    target: ClassVar[str] = "megajax.layers.attention:Attention"
    heads: int
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads / kv_heads query heads; none: as many as heads."""
    head_dim: int | None = None
    """Size of one head; none: hidden size / heads."""
    bias: bool = False
    """Biases on query, key, value and output."""
    rope: RopeConfig | None = None
    """Rotary positions; none: the model has positions elsewhere."""
    dropout: float = 0.0
    """Share of attention weights zeroed in training."""
    kernel: Literal["auto", "reference", "cudnn"] = "auto"
    """auto: cudnn on an NVIDIA GPU in bf16 without attention dropout, else reference; the banner names the choice."""

    def problems(self) -> list[Problem]:
        found = above_zero(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        groups = self.groups()
        if not found and self.heads % groups:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            found.append(
                Problem(
                    "kv_heads",
                    f"heads={self.heads} is not a multiple of kv_heads={groups}",
                    f"kv_heads can be {', '.join(map(str, legal))}",
                )
            )
        if not 0 <= self.dropout < 1:
            found.append(Problem("dropout", f"must be at least 0 and below 1, got {self.dropout}"))
        if self.kernel == "cudnn" and self.dropout:
            found.append(
                Problem(
                    "kernel",
                    f"cudnn has no dropout of attention weights, dropout={self.dropout}",
                    "set dropout=0 or kernel=reference",
                )
            )
        return found

    def groups(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def size(self, hidden: int) -> int:
        """Size of one head."""
        return self.head_dim or hidden // self.heads

    def cuts(self) -> int:
        """Largest number of devices the heads can be cut over."""
        return gcd(self.heads, self.groups())


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMLPConfig(Builds):
    """Two matrices with an activation between them."""

    target: ClassVar[str] = "megajax.layers.mlp:DenseMLP"
    ffn: int
    """Width between the matrices."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """gelu is exact (erf); gelu_tanh the approximation GPT-2 used."""
    bias: bool = True
    """Biases on both matrices."""

    def problems(self) -> list[Problem]:
        return above_zero(ffn=self.ffn)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMLPConfig(Builds):
    """activation(x gate) * (x up), then down (Shazeer 2020)."""

    target: ClassVar[str] = "megajax.layers.mlp:GatedMLP"
    ffn: int
    """Width between the matrices."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """silu makes it SwiGLU, gelu GeGLU."""
    bias: bool = False
    """Biases on all three matrices."""

    def problems(self) -> list[Problem]:
        return above_zero(ffn=self.ffn)


type MLPConfig = DenseMLPConfig | GatedMLPConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(Builds):
    """One residual block: x + mixer(norm(x)), then x + mlp(norm(x))."""

    target: ClassVar[str] = "megajax.layers.block:Block"
    mixer: AttentionConfig
    """What mixes along the sequence."""
    mlp: MLPConfig
    """What works on each position."""
    norm: NormConfig = field(default_factory=RMSNormConfig)
    """Normalisation before each of the two."""
    dropout: float = 0.0
    """Share of each sub-layer's output zeroed in training."""

    def problems(self) -> list[Problem]:
        if not 0 <= self.dropout < 1:
            return [Problem("dropout", f"must be at least 0 and below 1, got {self.dropout}")]
        return []


type Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again instead of keeping it: nothing; all but the inputs and outputs of matmuls; all
but each layer's input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(Builds):
    """`pattern` is unrolled in Python, `repeats` is scanned: (dense, moe) x 16 is 32 layers."""

    target: ClassVar[str] = "megajax.layers.stack:Stack"
    pattern: tuple[BlockConfig, ...]
    """Blocks that repeat together."""
    repeats: int
    """How many times the pattern is applied; layers = len(pattern) * repeats."""

    def problems(self) -> list[Problem]:
        found = []
        if not self.pattern:
            found.append(Problem("pattern", "needs at least one block"))
        if self.repeats < 1:
            found.append(Problem("repeats", f"must be at least 1, got {self.repeats}"))
        return found

    def layers(self) -> int:
        """Number of blocks a token passes."""
        return len(self.pattern) * self.repeats
