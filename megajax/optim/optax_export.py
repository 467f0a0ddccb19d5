"""Exports MegaJAX's update rules as `optax.GradientTransformation`s."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from megajax.optim.groups import Rates
from megajax.optim.optimizer import Optimizer, UpdateRule


class RuleState(NamedTuple):
    """State of `scale_by_rule`."""

    count: Array
    """int32 []: number of updates."""
    moments: dict[str, Any]
    """Kind of moment -> a tree like the weights'."""


def scale_by_rule(rule: UpdateRule) -> optax.GradientTransformation:
    """Gradients -> the directions of a rule (Adam, Momentum, SignOfAverage), for any tree of float32 arrays.

    Chain it like `optax.scale_by_adam`, with `optax.add_decayed_weights` and `optax.scale_by_learning_rate`.
    """

    def init(params: optax.Params) -> RuleState:
        zeros = {name: jax.tree.map(jnp.zeros_like, params) for name in rule.moments}
        return RuleState(jnp.zeros((), jnp.int32), zeros)

    def update(updates: optax.Updates, state: Any, params: object = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        leaves, tree = jax.tree.flatten(updates)
        moments = [tree.flatten_up_to(state.moments[name]) for name in rule.moments]
        results = [rule(g, tuple(m), count.astype(jnp.float32)) for g, *m in zip(leaves, *moments, strict=True)]
        new = {name: tree.unflatten([result[1][i] for result in results]) for i, name in enumerate(rule.moments)}
        return tree.unflatten([direction for direction, _ in results]), RuleState(count, new)

    return optax.GradientTransformation(init, update)


def transformation(optimizer: Optimizer, rates: Rates) -> optax.GradientTransformation:
    """A whole optimizer, including Muon, for its weights by path.

    Its updates include learning rate and weight decay. rates: group -> (learning rate, weight decay), see
    `megajax.optim.optimizer.constant_rates`.
    """

    def init(params: Any) -> Any:
        return optimizer.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("the update needs the weights: update(gradients, state, weights)")
        new, state = optimizer.update(updates, state, params, rates=rates)
        return {path: new[path] - p for path, p in params.items()}, state

    return optax.GradientTransformation(init, update)
