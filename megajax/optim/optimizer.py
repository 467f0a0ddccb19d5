"""The update rules. Weights and gradients are flat dicts from path to float32 array."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec
from megajax.optim.config import AdamWConfig

type OptimizerState = dict[str, Any]


def decayed(spec: ParamSpec) -> bool:
    """Matrices decay, embeddings and head among them; biases and norm gains do not."""
    return spec.role == "weight"


class AdamW:
    """Adam with bias correction; the decay p * (1 - lr * weight_decay) is apart from the moments."""

    def __init__(self, cfg: AdamWConfig, declared: Mapping[str, ParamSpec]):
        self.cfg = cfg
        self.decayed = {path: decayed(spec) for path, spec in declared.items()}
        self.moments = optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.epsilon)

    def init(self, params: Params) -> OptimizerState:
        """Moments of zero, laid out like params; a plain dict, so that checkpoints name every array."""
        fresh: Any = self.moments.init(dict(params))
        return {"count": fresh.count, "first_moment": fresh.mu, "second_moment": fresh.nu}

    def update(
        self, grads: Params, state: OptimizerState, params: Params, *, lr: Array
    ) -> tuple[Params, OptimizerState]:
        """One update. grads float32, already divided and clipped; lr float32 []. -> new weights and state.

        Raises UserError when weights and optimizer were made for different models.
        """
        if set(params) != set(self.decayed):
            raise UserError(f"the optimizer has rules for other weights: {sorted(set(params) ^ set(self.decayed))[:5]}")
        old = optax.ScaleByAdamState(state["count"], state["first_moment"], state["second_moment"])
        moved: Any = self.moments.update(dict(grads), old)
        directions, new = moved
        updated = {}
        for path, p in params.items():
            kept = p * (1 - lr * self.cfg.weight_decay) if self.decayed[path] else p
            updated[path] = kept - lr * directions[path]
        return updated, {"count": new.count, "first_moment": new.mu, "second_moment": new.nu}


def global_norm(grads: Params) -> Array:
    """Root of the sum of squares over all weights, float32 []."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values()))


def clip_factor(norm: Array, limit: float | None) -> Array:
    """What to multiply gradients of that norm by: limit / (norm + 1e-6) where that is below 1."""
    return jnp.ones(()) if limit is None else jnp.minimum(limit / (norm + 1e-6), 1.0)
