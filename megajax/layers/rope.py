"""Rotary position embedding (Su et al. 2021)."""

from dataclasses import dataclass
from math import pi

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.layers.config import Llama3ScalingConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates pairs (x[i], x[i + H/2]) of each head by position * frequency[i]."""

    cfg: RopeConfig
    head_dim: int

    def frequencies(self) -> np.ndarray:
        """Radians per position, float32 [H/2]."""
        plain = self.cfg.base ** (-np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim)
        return plain if self.cfg.scaling is None else stretched(plain, self.cfg.scaling)

    def __call__(self, x: Array, positions: Array) -> Array:
        """x [B, S, N, H], positions int32 [B, S] -> [B, S, N, H]; angles in float32."""
        angles = positions[:, :, None].astype(jnp.float32) * self.frequencies()[None, None]
        cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
        low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def stretched(frequencies: np.ndarray, cfg: Llama3ScalingConfig) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths times `factor`, short ones as they are, a smooth passage between."""
    wavelengths = 2 * pi / frequencies
    smooth = np.clip((cfg.original / wavelengths - cfg.low) / (cfg.high - cfg.low), 0, 1)
    return (smooth * frequencies + (1 - smooth) * frequencies / cfg.factor).astype(np.float32)
