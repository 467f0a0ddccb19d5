"""Learning rate and weight decay as pure functions of the samples consumed by successful steps."""

from collections.abc import Callable, Mapping
from math import floor, log, pi, sqrt
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import Array

from megajax.config.errors import UserError
from megajax.optim.config import Samples, ScheduleConfig
from megajax.optim.groups import ParameterGroup

SHAPES: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "linear": lambda decayed, remaining: remaining,
        "cosine": lambda decayed, remaining: jnp.square(jnp.sin(0.5 * pi * remaining)),
        "exponential": lambda decayed, remaining: jnp.expm1(remaining * log(2)),
        "minus_sqrt": lambda decayed, remaining: remaining / (1 + jnp.sqrt(decayed)),
    }
)
"""Position between min_lr (0) and lr (1) as a function of (r, 1 - r), with r the elapsed share of the decay.

1 - r, (1 + cos(pi r)) / 2, 2 * 0.5^r - 1 and 1 - sqrt(r), written without cancellation in float32."""

DECAY = "schedule: samples of decay (steps x batch.global_size unless set)"
"""Name of the fact with the length of the decay."""


class RateSchedule:
    """lr(samples) for a run of `steps` steps of `global_size` samples; samples: steps -> rows where sizes change."""

    def __init__(self, cfg: ScheduleConfig, *, steps: int, global_size: int, samples: Samples | None = None):
        self.cfg = cfg
        length: dict[str, Any] = {"steps": steps, "global_size": global_size, "samples": samples}
        self.decay = float(cfg.decay(**length))
        self.warmup = float(cfg.warmup(**length))
        self.falls_from = self.decay - cfg.anneal(**length) if cfg.style == "wsd" else self.warmup
        """Samples after which the rate decays."""
        self.shape = cfg.anneal_style if cfg.style == "wsd" else cfg.style
        self.weight_decay_span = float(cfg.weight_decay(**length))

    def __call__(self, samples: Array, *, lr: float | None = None, min_lr: float | None = None) -> Array:
        """samples int32 [] -> float32 [], traceable. lr, min_lr: rates of a group; None: the config's."""
        cfg, n = self.cfg, jnp.asarray(samples, jnp.int32)
        top, low = cfg.lr if lr is None else lr, cfg.min_lr if min_lr is None else min_lr
        # A span of 0 would divide only in a branch that is not taken.
        rising = cfg.warmup_start + (top - cfg.warmup_start) * (n.astype(jnp.float32) / max(self.warmup, 1.0))
        if cfg.style == "constant":
            falling = jnp.full((), top, jnp.float32)
        elif cfg.style == "inverse_square_root":
            root = sqrt(max(self.warmup, 1.0)) / jnp.sqrt(jnp.maximum(n, 1).astype(jnp.float32))
            falling = jnp.maximum(low, top * root)
        else:
            span = max(self.decay - self.falls_from, 1.0)
            decayed = jnp.clip(_minus(n, self.falls_from) / span, 0, 1)
            remaining = jnp.clip(-_minus(n, self.decay) / span, 0, 1)
            falling = low + SHAPES[self.shape](decayed, remaining) * (top - low)
        if cfg.style != "constant":
            falling = jnp.where(_minus(n, self.decay) > 0, low, falling)
        warming = _minus(n, floor(self.warmup)) <= 0 if self.warmup > 0 else jnp.zeros((), bool)
        return jnp.where(warming, rising, falling).astype(jnp.float32)

    def weight_decay(self, samples: Array, end: float) -> Array:
        """Weight decay of an update, rising to `end`; float32 [], traceable."""
        start = self.cfg.weight_decay_start
        if start is None:
            return jnp.float32(end)
        share = jnp.clip(samples.astype(jnp.float32) / max(self.weight_decay_span, 1.0), 0, 1)
        if self.cfg.weight_decay_style == "cosine":
            share = jnp.square(jnp.sin(0.5 * pi * share))
        return (start + share * (end - start)).astype(jnp.float32)

    def rates(self, samples: Array, weight_decay: float, group: ParameterGroup) -> tuple[Array, Array]:
        """Learning rate and weight decay of a group; weight_decay: optimizer.weight_decay.

        Raises UserError for a group whose own highest rate is below the lowest.
        """
        factor = group.width if group.lr is None else 1.0
        top = self.cfg.lr * factor if group.lr is None else group.lr
        low = self.cfg.min_lr * factor if group.min_lr is None else group.min_lr
        if low > top:
            raise UserError(
                f"weights with lr={top:g} of their own would rise to schedule.min_lr={self.cfg.min_lr:g}: also set "
                "their min_lr (optimizer.embedding_min_lr, or min_lr of the group)"
                if group.min_lr is None
                else f"weights with min_lr={low:g} of their own have lr={top:g}: also set a higher lr for them"
            )
        lr = self(samples, lr=top, min_lr=low)
        return lr * group.lr_multiplier, self.weight_decay(samples, weight_decay) * group.decay

    def facts(self) -> dict[str, str | float | int]:
        """The settings that affect the rates, to compare two runs; lengths are in samples."""
        cfg = self.cfg
        names = ("lr", "min_lr", "style", "warmup_start")
        facts: dict[str, str | float | int] = {f"schedule.{name}": getattr(cfg, name) for name in names}
        facts["schedule: samples of warm-up"] = round(self.warmup)
        if cfg.style != "constant":
            facts[DECAY] = round(self.decay)
        if cfg.style == "wsd":
            facts["schedule.anneal_style"] = cfg.anneal_style
            facts["schedule: samples of the anneal"] = round(self.decay - self.falls_from)
        if cfg.weight_decay_start is not None:
            facts["schedule.weight_decay_start"] = cfg.weight_decay_start
            facts["schedule.weight_decay_style"] = cfg.weight_decay_style
            facts["schedule: samples until optimizer.weight_decay"] = round(self.weight_decay_span)
        return facts


def _minus(n: Array, value: float) -> Array:
    """n - value in float32; exact to its last bit for whole values, however large n (int32 []) is."""
    integer = min(floor(value), 2**31 - 1)
    return (n - jnp.int32(integer)).astype(jnp.float32) - (value - integer)
