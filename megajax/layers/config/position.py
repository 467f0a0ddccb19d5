"""Configs of rotary positions and of relative biases; imports neither jax nor flax."""

from dataclasses import dataclass
from math import log
from typing import ClassVar

from megajax.config.builds import Builds
from megajax.config.errors import Problem
from megajax.layers.config.norm import above_zero


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
