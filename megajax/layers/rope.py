"""Rotary position embedding (Su et al. 2021)."""

from dataclasses import dataclass
from math import ceil, floor, log, pi

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.layers.config import Llama3ScalingConfig, RopeConfig, YarnScalingConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates pairs of the first R dimensions of each head by position * frequency; pair i is (x[i], x[i + R/2]).

    Interleaved, pair i is (x[2i], x[2i + 1]) and stays there.
    """

    cfg: RopeConfig
    head_dim: int

    def frequencies(self) -> np.ndarray:
        """Radians per position, float32 [R/2]."""
        size = self.cfg.rotated(self.head_dim)
        plain = self.cfg.base ** (-np.arange(0, size, 2, dtype=np.float32) / size)
        match self.cfg.scaling:
            case None:
                return plain
            case Llama3ScalingConfig() as scaling:
                return stretched(plain, scaling)
            case YarnScalingConfig() as scaling:
                return interpolated(plain, scaling, self.cfg.base)

    def __call__(self, x: Array, positions: Array) -> Array:
        """x [B, S, N, H], positions int32 [B, S] -> [B, S, N, H]; angles in float32."""
        size, scaling = self.cfg.rotated(self.head_dim), self.cfg.scaling
        angles = positions[:, :, None].astype(jnp.float32) / self.cfg.interpolation * self.frequencies()[None, None]
        magnitude = 1.0 if scaling is None else scaling.magnitude()
        cos, sin = jnp.cos(angles)[:, :, None] * magnitude, jnp.sin(angles)[:, :, None] * magnitude
        turned = self.turned(x[..., :size].astype(jnp.float32), cos, sin).astype(x.dtype)
        return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)

    def turned(self, x: Array, cos: Array, sin: Array) -> Array:
        """x [B, S, N, R]; cos and sin [B, S, 1, R/2]."""
        if self.cfg.interleaved:
            first, second = x[..., ::2], x[..., 1::2]
            return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def stretched(frequencies: np.ndarray, cfg: Llama3ScalingConfig) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths times `factor`, short ones as they are, a smooth passage between."""
    wavelengths = 2 * pi / frequencies
    smooth = np.clip((cfg.original / wavelengths - cfg.low) / (cfg.high - cfg.low), 0, 1)
    return (smooth * frequencies + (1 - smooth) * frequencies / cfg.factor).astype(np.float32)


def interpolated(frequencies: np.ndarray, cfg: YarnScalingConfig, base: float) -> np.ndarray:
    """YaRN's rule (Peng et al. 2023, section 3.2), its passage linear in the number of the pair.

    As in the released code, the upper border is held below the number of dimensions, not of pairs.
    """
    size = 2 * len(frequencies)

    def pair(turns: float) -> float:
        """Which pair, as a real number, turns so often over the original length."""
        return size * log(cfg.original / (turns * 2 * pi)) / (2 * log(base))

    first, last = pair(cfg.fast), pair(cfg.slow)
    if cfg.rounded:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = (last - first) or 0.001
    passage = np.clip((np.arange(size // 2, dtype=np.float32) - first) / width, 0, 1)
    return (frequencies / cfg.factor * passage + frequencies * (1 - passage)).astype(np.float32)
