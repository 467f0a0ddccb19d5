"""Learning rate as a pure function of the samples consumed by successful steps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from megajax.optim.config import ScheduleConfig


class Schedule:
    """lr(samples) for a run of `steps` steps of `global_size` samples."""

    def __init__(self, cfg: ScheduleConfig, *, steps: int, global_size: int):
        self.cfg = cfg
        self.decay = float(cfg.decay(steps=steps, global_size=global_size))
        self.warmup = float(cfg.warmup(steps=steps, global_size=global_size))

    def __call__(self, samples: Array) -> Array:
        """samples int32 [] -> float32 [], traceable."""
        return self._value(samples.astype(jnp.float32), jnp).astype(jnp.float32)

    def at(self, samples: int) -> float:
        """The same on the host in float64."""
        return float(self._value(np.float64(samples), np))

    def _value(self, n: Any, xp: Any) -> Any:
        cfg = self.cfg
        # A span of 0 only divides where another branch is taken.
        rising = cfg.warmup_start + (cfg.lr - cfg.warmup_start) * n / max(self.warmup, 1)
        done = (n - self.warmup) / max(self.decay - self.warmup, 1)
        match cfg.style:
            case "constant":
                falling = xp.full_like(n, cfg.lr)
            case "linear":
                falling = cfg.min_lr + (1 - done) * (cfg.lr - cfg.min_lr)
            case "cosine":
                falling = cfg.min_lr + 0.5 * (xp.cos(np.pi * done) + 1) * (cfg.lr - cfg.min_lr)
        if cfg.style != "constant":
            falling = xp.where(n > self.decay, cfg.min_lr, falling)
        return xp.where((self.warmup > 0) & (n <= self.warmup), rising, falling)
