"""What each layer can be told; importing this imports neither jax nor flax.

Sizes that all layers share (hidden size, number of layers, init scale) belong to the model and reach the layers through
their Site, so that no fact is written twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, log
from operator import eq
from typing import ClassVar, Literal

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.config.nearest import divisors_of
from megajax.kernels.capability import BACKENDS, Kernel, Request, choose

LARGEST = 2**31 - 1
"""Whole numbers above this do not fit the indices that arrays of the device are addressed with."""


def above_zero(**settings: float | None) -> list[Problem]:
    """A problem for each setting that is given and not a number above 0, or a whole one above LARGEST."""
    found = []
    for name, value in settings.items():
        if value is not None and not 0 < value < inf:
            found.append(Problem(name, f"must be a number above 0, got {value}"))
        elif isinstance(value, int) and value > LARGEST:
            found.append(Problem(name, f"must be at most {LARGEST}, got {value}"))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNormConfig(Builds):
    """Mean and variance normalisation with gain and bias (Ba et al. 2016)."""

    target: ClassVar[str] = "megajax.layers.norm:LayerNorm"
    epsilon: float = 1e-5
    """Added to the variance."""
    zero_centred: bool = False
    """The gain is 1 + weight, so that weight decay and initial zeros pull it towards 1."""

    def problems(self) -> list[Problem]:
        return above_zero(epsilon=self.epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSNormConfig(Builds):
    """Root-mean-square normalisation with gain (Zhang and Sennrich 2019)."""

    target: ClassVar[str] = "megajax.layers.norm:RMSNorm"
    epsilon: float = 1e-5
    """Added to the mean square."""
    zero_centred: bool = False
    """The gain is 1 + weight, so that weight decay and initial zeros pull it towards 1."""

    def problems(self) -> list[Problem]:
        return above_zero(epsilon=self.epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class L2NormConfig(Builds):
    """Root-mean-square normalisation without weights, as Llama 4 has it on queries and keys."""

    target: ClassVar[str] = "megajax.layers.norm:L2Norm"
    epsilon: float = 1e-6
    """Added to the mean square."""

    def problems(self) -> list[Problem]:
        return above_zero(epsilon=self.epsilon)


type NormConfig = LayerNormConfig | RMSNormConfig | L2NormConfig


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

    def problems(self) -> list[Problem]:
        found = above_zero(factor=self.factor, low=self.low, high=self.high, original=self.original)
        if not found and self.low >= self.high:
            found.append(Problem("low", f"must be below high, got low={self.low} and high={self.high}"))
        return found

    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScalingConfig:
    """YaRN: low frequencies interpolated, high ones kept, rotated heads made longer (Peng et al. 2023)."""

    factor: float
    """How far the lowest frequencies are stretched."""
    original: int = 4096
    """Sequence length the model was trained on before."""
    fast: float = 32.0
    """Pairs that turn more often than this over the original length are left alone."""
    slow: float = 1.0
    """Pairs that turn less often than this are stretched in full."""
    rounded: bool = True
    """The two borders between pairs are rounded outwards to whole pairs."""
    mscale: float | None = None
    """Weight of the factor's logarithm in the length of rotated heads, none: 1; needs mscale_all."""
    mscale_all: float | None = None
    """The same, but divided out again: latent attention has its square in the scale of all scores instead."""

    def problems(self) -> list[Problem]:
        found = above_zero(factor=self.factor, original=self.original, fast=self.fast, slow=self.slow)
        if not found and self.slow >= self.fast:
            found.append(Problem("slow", f"must be below fast, got slow={self.slow} and fast={self.fast}"))
        if (self.mscale is None) != (self.mscale_all is None):
            found.append(Problem("mscale", f"goes with mscale_all: got {self.mscale} and {self.mscale_all}"))
        return found

    def lengthened(self, weight: float) -> float:
        """0.1 weight ln(factor) + 1, the paper's fit with weight 1."""
        return 0.1 * weight * log(self.factor) + 1 if self.factor > 1 else 1.0

    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        if self.mscale is None or self.mscale_all is None:
            return self.lengthened(1.0)
        return self.lengthened(self.mscale) / self.lengthened(self.mscale_all)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig(Builds):
    """Rotary positions (Su et al. 2021)."""

    target: ClassVar[str] = "megajax.layers.rope:Rope"
    base: float = 10000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    scaling: Llama3ScalingConfig | YarnScalingConfig | None = None
    """Stretched frequencies for long sequences; none: plain."""
    fraction: float = 1.0
    """Share of each head that is rotated, from its first dimension on; the rest knows no positions."""
    interleaved: bool = False
    """Neighbours are rotated against each other; otherwise the two halves of what is rotated."""
    interpolation: float = 1.0
    """Positions are divided by this (Chen et al. 2023)."""

    def problems(self) -> list[Problem]:
        found = above_zero(base=self.base, interpolation=self.interpolation)
        if not 0 < self.fraction <= 1:
            found.append(Problem("fraction", f"must be above 0 and at most 1, got {self.fraction}"))
        return found

    def rotated(self, size: int) -> int:
        """Dimensions of a head of this size that are rotated."""
        return int(size * self.fraction)

    def head_problems(self, size: int) -> list[Problem]:
        """What is wrong with rotating heads of this size."""
        if 0 < self.fraction <= 1 and (self.rotated(size) % 2 or self.rotated(size) < 2):
            share = "" if self.fraction == 1 else f", {self.fraction:g} of {size}"
            what = f"rotary positions need an even head size, got {self.rotated(size)}{share}"
            return [Problem("rope", what, "set rope.fraction so that fraction x head size is even")]
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeBiasConfig(Builds):
    """A learned number for each head and distance, added to scores (T5, Raffel et al. 2020, section 2.1)."""

    target: ClassVar[str] = "megajax.layers.relative:RelativeBias"
    buckets: int = 32
    """Distances told apart: half of them one by one, the others in steps that grow."""
    distance: int = 128
    """From here on all distances are one."""
    both_ways: bool = False
    """Keys after the query have buckets of their own, half of them."""
    shared: bool = False
    """One table for all layers of a stack, as T5 has it, rather than one for each."""

    def problems(self) -> list[Problem]:
        each = self.buckets // 2 if self.both_ways else self.buckets
        if each < 2 or self.buckets % 2:
            return [Problem("buckets", f"must be an even number of 2 or more for each direction, got {self.buckets}")]
        if self.distance <= each // 2:
            return [
                Problem("distance", f"must be above {each // 2}, the distances told one by one; got {self.distance}")
            ]
        return []


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
    qkv_bias: bool | None = None
    """Biases on query, key and value; none: as bias says."""
    qk_norm: NormConfig | None = None
    """Normalisation of each query and key head, before rotation (Henry et al. 2020); none: none."""
    rope: RopeConfig | None = None
    """Rotary positions; none: the model has positions elsewhere, or this layer none."""
    relative: RelativeBiasConfig | None = None
    """Learned bias of scores by distance; none: none."""
    window: int | None = None
    """Keys a query sees before its own: with 8 it sees 9 tokens, itself and 8 before; none: all before it."""
    sink: Literal["none", "zero", "learned"] = "none"
    """A score that takes part in the softmax and brings no value: 0 (off by one), or learned for each head."""
    gate: bool = False
    """What heads mixed is multiplied by the sigmoid of a projection of the input, before the output matrix."""
    scale: float | None = None
    """Factor on scores; none: 1 / sqrt(head size). The softmax is in float32 always."""
    dropout: float = 0.0
    """Share of attention weights zeroed in training."""
    kernel: Kernel = "auto"
    """auto: the fastest that can (docs/attention.md); cudnn, pallas, cudnn_mask or reference: that one or an error."""

    def problems(self) -> list[Problem]:
        found = above_zero(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, scale=self.scale)
        groups = self.groups()
        if not found and self.heads % groups:
            legal = divisors_of(self.heads)
            found.append(
                Problem(
                    "kv_heads",
                    f"heads={self.heads} is not a multiple of kv_heads={groups}",
                    f"kv_heads can be {', '.join(map(str, legal))}",
                )
            )
        return found + _core_problems(self)

    def shape_problems(self, *, hidden: int, length: int) -> list[Problem]:
        """What is wrong with this on rows of `length` tokens, `hidden` wide."""
        found = _window_problems(self.window, length)
        if self.head_dim is None and self.heads > 0 and hidden > 0 and hidden % self.heads:
            near = sorted(divisors_of(hidden), key=lambda n: abs(n - self.heads))
            found.append(
                Problem(
                    "heads",
                    f"hidden={hidden} is not divisible by heads={self.heads}",
                    f"divisors near {self.heads}: {', '.join(map(str, sorted(near[:3])))}",
                )
            )
        elif self.rope is not None and self.heads > 0:
            found += self.rope.head_problems(self.size(hidden))
        return found

    def groups(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def size(self, hidden: int) -> int:
        """Size of one head."""
        return self.head_dim or hidden // self.heads

    def tensor_sizes(self) -> list[int]:
        """Numbers of devices of `tensor` that this runs on.

        Query heads are cut over them. Key-value heads are cut too, or each is copied to as many devices as share it.
        """
        return [n for n in divisors_of(max(self.heads, 1)) if self.groups() % n == 0 or n % max(self.groups(), 1) == 0]

    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def request(self, known: Request) -> Request:
        """What an attention backend is asked for: `known`, with what is said here."""
        size = self.head_dim if known.key_dim is None else known.key_dim
        return replace(
            known,
            key_dim=size,
            value_dim=size,
            window=self.window,
            sink=self.sink != "none",
            bias=self.relative is not None,
            dropout=self.dropout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionConfig(Builds):
    """Multi-head latent attention: queries, keys and values from narrow latents (DeepSeek-AI 2024, section 2.1)."""

    target: ClassVar[str] = "megajax.layers.latent:LatentAttention"
    heads: int
    """Heads of queries, keys and values."""
    query_rank: int | None = None
    """Width of the queries' latent; none: queries come from the input directly."""
    key_value_rank: int = 512
    """Width of the latent of keys and values."""
    content_dim: int = 128
    """Part of a query or key head that knows no positions."""
    position_dim: int = 64
    """Part that is rotated; the key's is one for all heads."""
    value_dim: int = 128
    """Size of a value head."""
    bias: bool = False
    """Bias on the output; the other matrices have none."""
    norm: NormConfig | None = field(default_factory=RMSNormConfig)
    """Normalisation of the latents; none: none."""
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(interleaved=True))
    """Rotation of the position parts."""
    window: int | None = None
    """Keys a query sees before its own; none: all before it."""
    sink: Literal["none", "zero", "learned"] = "none"
    """A score that takes part in the softmax and brings no value: 0 (off by one), or learned for each head."""
    scale: float | None = None
    """Factor on scores; none: 1 / sqrt(head size), times YaRN's mscale_all squared."""
    dropout: float = 0.0
    """Share of attention weights zeroed in training."""
    kernel: Kernel = "auto"
    """auto: the fastest that can (docs/attention.md); cudnn, pallas, cudnn_mask or reference: that one or an error."""

    def problems(self) -> list[Problem]:
        sizes = {
            name: getattr(self, name)
            for name in ("heads", "query_rank", "key_value_rank", "content_dim", "position_dim", "value_dim", "scale")
        }
        return above_zero(**sizes) + _core_problems(self)

    def shape_problems(self, *, hidden: int, length: int) -> list[Problem]:
        """What is wrong with this on rows of `length` tokens, `hidden` wide."""
        del hidden
        return _window_problems(self.window, length) + self.rope.head_problems(self.position_dim)

    def groups(self) -> int:
        """Number of key-value heads: all have keys and values of their own."""
        return self.heads

    def size(self, hidden: int) -> int:
        """Size of a query or key head."""
        del hidden
        return self.content_dim + self.position_dim

    def tensor_sizes(self) -> list[int]:
        """Numbers of devices of `tensor` that this runs on."""
        return divisors_of(max(self.heads, 1))

    def request(self, known: Request) -> Request:
        """What an attention backend is asked for: `known`, with what is said here."""
        return replace(
            known,
            key_dim=self.content_dim + self.position_dim,
            value_dim=self.value_dim,
            window=self.window,
            sink=self.sink != "none",
            dropout=self.dropout,
        )


type MixerConfig = AttentionConfig | LatentAttentionConfig


def _core_problems(cfg: MixerConfig) -> list[Problem]:
    """Of what attention of both kinds can be told."""
    found = []
    if not 0 <= cfg.dropout < 1:
        found.append(Problem("dropout", f"must be at least 0 and below 1, got {cfg.dropout}"))
    if cfg.window is not None and cfg.window < 0:
        found.append(Problem("window", f"must be at least 0, got {cfg.window}", "none lets a query see all before it"))
    request = cfg.request(Request())
    refusal = None if cfg.kernel == "auto" else BACKENDS[cfg.kernel].refusal(request)
    if cfg.kernel != "auto" and refusal is not None:
        able = choose("auto", request, None).kernel
        found.append(Problem("kernel", f"{BACKENDS[cfg.kernel].says} {refusal}", f"set kernel={able} or auto"))
    return found


def _window_problems(window: int | None, length: int) -> list[Problem]:
    if window is None or window < length:
        return []
    return [
        Problem("window", f"{window} reaches beyond sequence_length={length}", f"use at most {length - 1}, or none")
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMLPConfig(Builds):
    """Two matrices with an activation between them."""

    target: ClassVar[str] = "megajax.layers.mlp:DenseMLP"
    ffn: int
    """Width between the matrices."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"] = "gelu"
    """gelu is exact (erf), gelu_tanh the approximation GPT-2 used, quick_gelu x sigmoid(1.702 x)."""
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
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"] = "silu"
    """silu makes it SwiGLU, gelu GeGLU."""
    bias: bool = False
    """Biases on all three matrices."""
    clamp: float | None = None
    """x gate is cut off above this, x up above this and below its negative; none: neither."""
    offset: float = 0.0
    """Added to x up."""

    def problems(self) -> list[Problem]:
        return above_zero(ffn=self.ffn, clamp=self.clamp)


type MLPConfig = DenseMLPConfig | GatedMLPConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(Builds):
    """One residual block: x + mixer(norm(x)), then x + mlp(norm(x))."""

    target: ClassVar[str] = "megajax.layers.block:Block"
    mixer: MixerConfig
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


def shared_bias(block: BlockConfig) -> RelativeBiasConfig | None:
    """The table a block shares with others of its stack."""
    relative = block.mixer.relative if isinstance(block.mixer, AttentionConfig) else None
    return relative if relative is not None and relative.shared else None


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
        if not 1 <= self.repeats <= LARGEST:
            found.append(Problem("repeats", f"must be between 1 and {LARGEST}, got {self.repeats}"))
        tables = {(block.mixer.heads, bias) for block in self.pattern if (bias := shared_bias(block)) is not None}
        if len(tables) > 1:
            found.append(
                Problem(
                    "pattern",
                    "blocks that share a table of relative biases differ in it, or in heads",
                    "make them alike",
                )
            )
        return found

    @classmethod
    def of(cls, blocks: Sequence[BlockConfig]) -> "StackConfig":
        """These blocks, as the shortest pattern that gives them: every fourth full, the others windowed, and so on."""
        count = len(blocks)
        period = next(n for n in range(1, count + 1) if count % n == 0 and all(map(eq, blocks, blocks[n:])))
        return cls(pattern=tuple(blocks[:period]), repeats=count // period)

    def layers(self) -> int:
        """Number of blocks a token passes."""
        return len(self.pattern) * self.repeats
