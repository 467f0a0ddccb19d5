"""Rotary position embedding (Su et al. 2021), and learned relative biases on scores (T5, Raffel et al. 2020)."""

from dataclasses import dataclass
from math import ceil, floor, log, pi

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from megajax.layers.param import LayerSettings, Normal, param
from megajax.layers.position.config import (
    AlibiConfig,
    InterleavedRopeConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RelativeBiasConfig,
    RopeConfig,
    TemperatureConfig,
    YarnScalingConfig,
)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates pairs of the first R dimensions of each head by position * frequency; pair i is (x[i], x[i + R/2]).

    If interleaved, pair i is (x[2i], x[2i + 1]), in the output too.
    """

    cfg: RopeConfig
    head_dim: int
    length: int | None = None
    """Tokens of the longest text, from which LongRoPE chooses its divisors; None: unknown."""

    def frequencies(self) -> np.ndarray:
        """Radians per position, float64 [R/2]; computed on the host, as JAX has no float64 by default."""
        size, scaling = self.cfg.rotated(self.head_dim), self.cfg.scaling
        plain = self.cfg.base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        match scaling:
            case None:
                scaled = plain
            case Llama3ScalingConfig():
                scaled = llama3_scaling(plain, scaling)
            case YarnScalingConfig():
                scaled = yarn_scaling(plain, scaling, self.cfg.base)
            case LongRopeScalingConfig():
                scaled = plain / np.asarray(scaling.divisors(self.length))
        return scaled / self.cfg.interpolation

    def axes(self) -> np.ndarray:
        """Number of the axis whose position each frequency multiplies, [R/2], for positions along several axes."""
        return np.zeros(self.cfg.rotated(self.head_dim) // 2, np.int32)

    def angles(self, positions: Array) -> Array:
        """positions int32 [B, S], or [B, S, A] along several axes -> position * frequency modulo 2 pi, in [-pi, pi],
        float32 [B, S, R/2].

        A float32 product of position and frequency loses the fraction of a turn at large positions. Here a frequency is
        a fixed-point number of turns per position with 32 fractional bits; the int32 product wraps around once a turn,
        so it is exact modulo one turn. The rounding error of each frequency, at most half a unit, is multiplied by the
        position in float32 and added. The total error is at most 3e-7 radians for every int32 position.
        """
        units = self.frequencies()[None, None] / (2 * pi) * 2.0**32
        rounded = np.rint(units)
        rest = (units - rounded).astype(np.float32)
        wrapped = (rounded.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        position = jnp.asarray(positions, jnp.int32)
        position = position[:, :, None] if position.ndim == 2 else position[:, :, self.axes()]
        phase = position * wrapped + (position.astype(jnp.float32) * rest).astype(jnp.int32)
        return phase.astype(jnp.float32) * (2 * pi / 2**32)

    def __call__(self, x: Array, positions: Array) -> Array:
        """x [B, S, N, H], positions int32 [B, S] or [B, S, A] -> [B, S, N, H]; rotated in float32."""
        size, scaling = self.cfg.rotated(self.head_dim), self.cfg.scaling
        angles = self.angles(positions)[:, :, None]
        magnitude = 1.0 if scaling is None else scaling.magnitude()
        cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
        turned = self.turned(x[..., :size].astype(jnp.float32), cos, sin).astype(x.dtype)
        return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)

    def turned(self, x: Array, cos: Array, sin: Array) -> Array:
        """x [B, S, N, R]; cos and sin [B, S, 1, R/2]."""
        if self.cfg.interleaved:
            first, second = x[..., ::2], x[..., 1::2]
            return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclass(frozen=True, slots=True)
class InterleavedRope(Rope):
    """Rotates by time, row and column in turns."""

    cfg: InterleavedRopeConfig

    def axes(self) -> np.ndarray:
        axes = Rope.axes(self)
        for axis in (1, 2):
            axes[axis : 3 * self.cfg.sections[axis] : 3] = axis
        return axes


@dataclass(frozen=True, slots=True)
class AxialRope(Rope):
    """Rotates by the row, then with the same frequencies by the column."""

    def frequencies(self) -> np.ndarray:
        return np.tile(Rope(self.cfg, self.head_dim // 2).frequencies(), 2)

    def axes(self) -> np.ndarray:
        half = self.cfg.rotated(self.head_dim) // 4
        return np.repeat(np.arange(2), half)


def tempered(q: Array, positions: Array, cfg: TemperatureConfig) -> Array:
    """Queries [B, S, N, H] at positions int32 [B, S], times the factor of their position."""
    steps = ((positions + cfg.first) // cfg.length).astype(jnp.float32)
    return (q * (1 + cfg.scale * jnp.log1p(steps))[..., None, None]).astype(q.dtype)


def llama3_scaling(frequencies: np.ndarray, cfg: Llama3ScalingConfig) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths times `factor`, short ones unchanged, a smooth transition between them."""
    turns, width = cfg.original * frequencies / (2 * pi), cfg.high - cfg.low
    # Llama 4 has no transition.
    smooth = np.clip((turns - cfg.low) / width, 0, 1) if width else (turns >= cfg.low).astype(np.float64)
    return smooth * frequencies + (1 - smooth) * frequencies / cfg.factor


def yarn_scaling(frequencies: np.ndarray, cfg: YarnScalingConfig, base: float) -> np.ndarray:
    """YaRN's rule (Peng et al. 2023, section 3.2), with a transition that is linear in the index of the pair.

    As in the released code, the end of the transition is limited by the number of dimensions, not of pairs.
    """
    size = 2 * len(frequencies)

    def pair(turns: float) -> float:
        """Index (a real number) of the pair that makes this many turns over the original length."""
        return size * log(cfg.original / (turns * 2 * pi)) / (2 * log(base))

    first, last = pair(cfg.fast), pair(cfg.slow)
    if cfg.rounded:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = (last - first) or 0.001
    passage = np.clip((np.arange(size // 2) - first) / width, 0, 1)
    return frequencies / cfg.factor * passage + frequencies * (1 - passage)


class RelativeBias(nnx.Module):
    """A table [buckets, N], sharded over heads."""

    def __init__(self, cfg: RelativeBiasConfig, settings: LayerSettings, *, heads: int):
        self.table = param((cfg.buckets, heads), (None, "heads"), init=Normal(settings.std))


class Alibi:
    """The slope of each head, float32 [N]."""

    def __init__(self, cfg: AlibiConfig, settings: LayerSettings, *, heads: int):
        del settings
        self.slopes = tuple(cfg.slopes(heads))

    @property
    def table(self) -> Array:
        return jnp.asarray(self.slopes, jnp.float32)


def biases(cfg: RelativeBiasConfig | AlibiConfig, table: Array, query_index: Array, key_index: Array) -> Array:
    """table: of local heads, see `bias_of`; positions in the row int32 [S] and [T] -> [local heads, S, T]."""
    return jnp.moveaxis(bias_of(cfg, table, key_index[None, :] - query_index[:, None]), -1, 0)


def bias_of(cfg: RelativeBiasConfig | AlibiConfig, table: Array, after: Array) -> Array:
    """Biases [..., N] of keys that are `after` the query, int32 [...]. table: [buckets, N] or the slopes [N]."""
    if isinstance(cfg, AlibiConfig):
        distance = jnp.abs(after)[..., None].astype(jnp.float32)
        return -distance * jnp.expand_dims(table, tuple(range(after.ndim)))
    return table[bucket(cfg, after)]


def bucket(cfg: RelativeBiasConfig, after: Array) -> Array:
    """Bucket of each distance; `after` is the key's position minus the query's, int32.

    Half the buckets of a direction hold one distance each; the others grow by a constant factor up to cfg.distance.
    """
    buckets = cfg.buckets // 2 if cfg.both_ways else cfg.buckets
    away = jnp.abs(after) if cfg.both_ways else jnp.maximum(-after, 0)
    single = buckets // 2
    steps = jnp.log(jnp.maximum(away, 1).astype(jnp.float32) / single) / np.log(cfg.distance / single)
    grown = jnp.minimum(single + (steps * (buckets - single)).astype(jnp.int32), buckets - 1)
    one_way = jnp.where(away < single, away, grown)
    return jnp.where(after > 0, one_way + buckets, one_way) if cfg.both_ways else one_way
