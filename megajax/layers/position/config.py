"""Configs of rotary positions and of relative biases; imports neither jax nor flax."""

from dataclasses import dataclass
from math import log, sqrt
from typing import Annotated, ClassVar

from megajax.config.bounds import Bounds, Index, Positive, Size
from megajax.config.class_references import Builds
from megajax.config.errors import Problem
from megajax.layers.facts import Weight


@dataclass(frozen=True, kw_only=True)
class Llama3ScalingConfig:
    """Llama 3.1's scaling of low RoPE frequencies for longer sequences (Llama team 2024).

    Example: `mj.RopeConfig(base=500000.0, scaling=mj.Llama3ScalingConfig())`
    """

    factor: Positive = 8.0
    """Divisor of the lowest frequencies."""
    low: Positive = 1.0
    """Frequencies with wavelengths above original/low are scaled by the whole factor."""
    high: Positive = 4.0
    """Frequencies with wavelengths below original/high are not scaled."""
    original: Size = 8192
    """Sequence length of the training before the extension."""

    def problems(self) -> list[Problem]:
        message = f"must be at most high, got low={self.low} and high={self.high}"
        return [Problem("low", message)] if self.low > self.high else []

    def magnitude(self) -> float:
        """Factor on rotated queries and keys."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class YarnScalingConfig:
    """YaRN: interpolates low frequencies, keeps high ones, and scales rotated heads (Peng et al. 2023).

    Example: `mj.RopeConfig(scaling=mj.YarnScalingConfig(factor=40.0, original=4096))`
    """

    factor: Positive
    """Divisor of the lowest frequencies."""
    original: Size = 4096
    """Sequence length of the training before the extension."""
    fast: Positive = 32.0
    """Dimensions with more rotations than this over the original length are not interpolated."""
    slow: Positive = 1.0
    """Dimensions with fewer rotations than this are interpolated by the whole factor."""
    rounded: bool = True
    """The bounds of the ramp between the two are rounded outwards to whole dimensions."""
    mscale: float | None = None
    """Coefficient of ln(factor) in the scale of rotated heads, none: 1; needs mscale_all."""
    mscale_all: float | None = None
    """The scale of rotated heads is divided by the expression with this coefficient; latent attention multiplies all
    scores by its square instead."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.slow > self.fast:
            problems.append(Problem("slow", f"must be at most fast, got slow={self.slow} and fast={self.fast}"))
        if (self.mscale is None) != (self.mscale_all is None):
            problems.append(
                Problem("mscale", f"must be given together with mscale_all, got {self.mscale} and {self.mscale_all}")
            )
        return problems

    def mscale_factor(self, weight: float) -> float:
        """0.1 weight ln(factor) + 1; the paper has weight 1."""
        return 0.1 * weight * log(self.factor) + 1 if self.factor > 1 else 1.0

    def magnitude(self) -> float:
        """Factor on rotated queries and keys."""
        if self.mscale is None or self.mscale_all is None:
            return self.mscale_factor(1.0)
        return self.mscale_factor(self.mscale) / self.mscale_factor(self.mscale_all)


@dataclass(frozen=True, kw_only=True)
class LongRopeScalingConfig:
    """LongRoPE: a divisor for each frequency, of one set for short and one for long texts (Ding et al. 2024).

    A model uses one set for all texts: `long` if its sequence_length is above `original`.

    Example: `mj.LongRopeScalingConfig(short=(1.0, 1.0), long=(1.0, 8.0), original=4096, factor=32.0)`
    """

    short: tuple[Positive, ...]
    """Divisors of the frequencies, from the highest on."""
    long: tuple[Positive, ...]
    """The same for texts longer than the original length."""
    original: Size = 4096
    """Sequence length of the training before the extension."""
    factor: Positive = 1.0
    """Length after the extension, divided by the original one."""
    attention: Positive | None = None
    """Factor on rotated queries and keys; none: sqrt(1 + ln(factor) / ln(original)), or 1 if factor is at most 1."""

    def problems(self) -> list[Problem]:
        message = f"must be as many numbers above 0 as long, got {len(self.short)} and {len(self.long)} numbers"
        return [] if 0 < len(self.short) == len(self.long) else [Problem("short", message)]

    def divisors(self, length: int | None) -> tuple[float, ...]:
        """The divisors of a model for texts up to this length; None: for short ones."""
        return self.long if length is not None and length > self.original else self.short

    def magnitude(self) -> float:
        """Factor on rotated queries and keys."""
        if self.attention is not None:
            return self.attention
        return sqrt(1 + log(self.factor) / log(self.original)) if self.factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class RopeConfig(Builds):
    """Rotary positions (Su et al. 2021).

    Example: `mj.RopeConfig(base=500000.0)`
    """

    target: ClassVar[str] = "megajax.layers.position.module:Rope"
    base: Positive = 10000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    scaling: Llama3ScalingConfig | YarnScalingConfig | LongRopeScalingConfig | None = None
    """Scaling of frequencies for long sequences; none: no scaling."""
    fraction: Annotated[float, Bounds(above=0, at_most=1)] = 1.0
    """Share of each head that is rotated, from its first dimension on; the rest has no positions."""
    interleaved: bool = False
    """Rotate pairs of adjacent dimensions; otherwise pairs of one dimension from each half."""
    interpolation: Positive = 1.0
    """Positions are divided by this (Chen et al. 2023)."""

    def rotated(self, size: int) -> int:
        """Dimensions of a head of this size that are rotated."""
        return int(size * self.fraction)

    def head_problems(self, size: int) -> list[Problem]:
        """Problems of rotating heads of this size."""
        if self.rotated(size) % 2 or self.rotated(size) < 2:
            share = "" if self.fraction == 1 else f", {self.fraction:g} of {size}"
            message = f"rotary positions need an even head size, got {self.rotated(size)}{share}"
            hint = "choose hidden / heads even, or set rope.fraction so that fraction x head size is even"
            return [Problem("rope", message, hint)]
        if isinstance(self.scaling, LongRopeScalingConfig) and len(self.scaling.short) != self.rotated(size) // 2:
            message = f"has {len(self.scaling.short)} divisors for {self.rotated(size) // 2} frequencies of a head"
            return [Problem("rope.scaling.short", message)]
        return []


@dataclass(frozen=True, kw_only=True)
class InterleavedRopeConfig(RopeConfig):
    """Rotary positions along time, rows and columns of images: the frequencies take turns (Qwen3-VL, Bai et al. 2025).

    Text has the same position along all three axes, and is rotated as by `RopeConfig`.

    Example: `mj.InterleavedRopeConfig(base=5000000.0, sections=(24, 20, 20))`
    """

    target: ClassVar[str] = "megajax.layers.position.module:InterleavedRope"
    sections: tuple[Index, Index, Index] = (24, 20, 20)
    """Number of frequencies of time, rows and columns: every third frequency, from the second on, is of rows, and from
    the third on of columns, up to these numbers; the others are of time."""

    def head_problems(self, size: int) -> list[Problem]:
        """Problems of rotating heads of this size."""
        if sum(self.sections) != self.rotated(size) // 2:
            message = f"{self.sections} are {sum(self.sections)} frequencies, a head has {self.rotated(size) // 2}"
            return [Problem("rope.sections", message)]
        return super().head_problems(size)


@dataclass(frozen=True, kw_only=True)
class AxialRopeConfig(RopeConfig):
    """Rotary positions of patches: half of each head is rotated by the row, the other half by the column.

    Example: `mj.AxialRopeConfig()`
    """

    target: ClassVar[str] = "megajax.layers.position.module:AxialRope"

    def head_problems(self, size: int) -> list[Problem]:
        """Problems of rotating heads of this size."""
        if self.rotated(size) % 4:
            return [Problem("rope", f"rows and columns need a head size divisible by 4, got {self.rotated(size)}")]
        return super().head_problems(size)


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    """A factor on queries that grows with their position p: 1 + scale ln(1 + floor((p + first) / length)) (Llama 4).

    It keeps attention over long texts as sharp as over short ones (Nakanishi 2025).

    Example: `mj.AttentionConfig(heads=8, temperature=mj.TemperatureConfig())`
    """

    scale: Positive = 0.1
    """Factor on the logarithm."""
    length: Size = 8192
    """Positions from one value of the factor to the next."""
    first: int = 1
    """What the first position counts as: 1 in Llama 4, 0 in Ministral 3."""


@dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig(Builds):
    """A learned bias on scores by head and distance (T5, Raffel et al. 2020, section 2.1).

    Example: `mj.AttentionConfig(heads=12, relative=mj.RelativeBiasConfig(buckets=32))`
    """

    target: ClassVar[str] = "megajax.layers.position.module:RelativeBias"
    buckets: int = 32
    """Number of buckets: half of them hold one distance each, the others logarithmically growing ranges."""
    distance: int = 128
    """Distances from this one on share the last bucket."""
    both_ways: bool = False
    """Half of the buckets are for keys after the query."""
    shared: bool = False
    """One table for all layers of a stack, as in T5; false: one table per layer."""

    def problems(self) -> list[Problem]:
        buckets = self.buckets // 2 if self.both_ways else self.buckets
        if buckets < 2 or self.buckets % 2:
            return [Problem("buckets", f"must be an even number of 2 or more for each direction, got {self.buckets}")]
        if self.distance <= buckets // 2:
            return [
                Problem(
                    "distance", f"must be above {buckets // 2}, the distances with a bucket each; got {self.distance}"
                )
            ]
        return []

    def weights(self, heads: int) -> tuple[Weight, ...]:
        """The table."""
        return (Weight("table", (self.buckets, heads), (None, "heads")),)


@dataclass(frozen=True, kw_only=True)
class AlibiConfig(Builds):
    """A fixed bias on scores: minus the distance times a slope of each head (ALiBi, Press et al. 2022).

    With n heads, a power of two, slopes are 2^(-8 i / n) for i from 1 to n. Further heads have those of twice as
    many heads with odd i.

    Example: `mj.AttentionConfig(heads=32, relative=mj.AlibiConfig())`
    """

    target: ClassVar[str] = "megajax.layers.position.module:Alibi"
    shared: ClassVar[bool] = False
    both_ways: ClassVar[bool] = True
    factor: Positive = 1.0
    """Factor on all slopes; 1 / sqrt(head size) in Falcon."""

    def weights(self, heads: int) -> tuple[Weight, ...]:
        """None."""
        del heads
        return ()

    def slopes(self, heads: int) -> list[float]:
        """The slope of each head."""
        even = 1 << (heads.bit_length() - 1)
        exponents = [*(i / even for i in range(1, even + 1)), *(i / (2 * even) for i in range(1, 2 * even, 2))]
        return [self.factor * 2 ** (-8 * exponent) for exponent in exponents[:heads]]
