"""The update rules. Weights and gradients are flat dicts from path to float32 array."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec
from megajax.mesh.sharding_rules import Plan
from megajax.optim.config import AdamWConfig, LionConfig, SGDConfig, UpdateConfig
from megajax.optim.groups import ParameterGroup, Rates, groups, scales_with_width
from megajax.optim.moments import OptimizerState, packed, unpacked

type Moments = tuple[Array, ...]


class UpdateRule(Protocol):
    """Computes the direction of one weight's update. All arrays are float32 and have the weight's shape."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments."""
        ...

    @property
    def coupled(self) -> bool:
        """Whether weight decay is added to the gradient."""
        ...

    @property
    def width_powers(self) -> tuple[int, int]:
        """Powers of the width ratio that multiply learning rates: for weights whose input grows with the width, and for
        other weights (Yang et al. 2022, tables 3 and 8)."""
        ...

    def __call__(self, g: Array, moments: Moments, step: Array) -> tuple[Array, Moments]:
        """-> (direction, new moments); the weight changes by -lr * direction. step: float32 [], 1 at first."""
        ...


class Optimizer:
    """Updates weights by their gradients, with rates from the schedule by group."""

    def __init__(self, cfg: UpdateConfig, declared: Mapping[str, ParamSpec], widths: Mapping[str, float] | None = None):
        self.cfg, self.declared = cfg, dict(declared)
        self.groups = groups(cfg, declared, widths)

    def init(self, params: Params) -> OptimizerState:
        """The state before the first update."""
        raise NotImplementedError

    def update(
        self, grads: Params, state: OptimizerState, params: Params, *, rates: Rates
    ) -> tuple[Params, OptimizerState]:
        """One update. grads float32, already divided and clipped. -> new weights and state."""
        raise NotImplementedError

    def adjusted(self, params: Params, observed: Params) -> Params:
        """The weights after an update, changed by what layers observed in its step, by path. By default unchanged."""
        del observed
        return params

    def kinds(self) -> dict[str, str]:
        """Path -> name of the update rule."""
        raise NotImplementedError

    def table(self) -> list[tuple[str, str]]:
        """Rows of a table: rule and rates, and their weights."""
        rows: dict[str, list[str]] = {}
        for path, kind in self.kinds().items():
            rows.setdefault(f"{kind}, {self.groups[path]}", []).append(path)
        return [(rule, ", ".join(paths)) for rule, paths in rows.items()]

    def measures(self, grads: Params, params: Params) -> dict[str, Array]:
        """num_zeros and parameter_norm if the config enables them, float32 []."""
        measures = {}
        if self.cfg.log_zeros:
            measures["num_zeros"] = zeros(grads, self.declared)
        if self.cfg.log_parameter_norm:
            measures["parameter_norm"] = global_norm(params)
        return measures


class RuleOptimizer(Optimizer):
    """A rule for each weight; weight decay is decoupled from moments unless the rule couples it.

    p <- p - lr * (direction(gradient) + decay * p), which rounds each weight once.
    width: width of the model over that of the model whose learning rates are used; rates set for some weights
    (embedding_lr, lr of a group) are not scaled.
    """

    def __init__(
        self, cfg: UpdateConfig, declared: Mapping[str, ParamSpec], rules: Mapping[str, UpdateRule], width: float = 1.0
    ):
        powers = {
            path: rule.width_powers[0 if scales_with_width(declared[path]) else 1] for path, rule in rules.items()
        }
        super().__init__(cfg, declared, {path: width**power for path, power in powers.items()})
        self.rules = dict(rules)

    def init(self, params: Params) -> OptimizerState:
        """Zero moments in the layout of params; plain dicts, so that checkpoints name every array."""
        zero: dict[str, dict[str, Array]] = {}
        for path, p in params.items():
            for name in self.rules[path].moments:
                zero.setdefault(name, {})[path] = jnp.zeros(p.shape, jnp.float32)
        return {"count": jnp.zeros((), jnp.int32)} | packed(zero, self.cfg.moments)

    def update(
        self, grads: Params, state: OptimizerState, params: Params, *, rates: Rates
    ) -> tuple[Params, OptimizerState]:
        """One update. grads float32, already divided and clipped. -> new weights and state.

        Raises UserError for weights of another model than the optimizer's.
        """
        if set(params) != set(self.rules):
            raise UserError(f"the optimizer has rules for other weights: {sorted(set(params) ^ set(self.rules))[:5]}")
        count = state["count"] + 1
        now = {group: rates(group) for group in dict.fromkeys(self.groups.values())}
        updated: dict[str, Array] = {}
        before = unpacked(state)
        after: dict[str, dict[str, Array]] = {name: {} for name in before}
        for path, p in params.items():
            group, rule, g = self.groups[path], self.rules[path], grads[path]
            lr, decay = now[group]
            if group.decay and rule.coupled:
                g = g + decay * p
            moments = tuple(before[name][path] for name in rule.moments)
            direction, moments = rule(g, moments, count.astype(jnp.float32))
            if group.decay and not rule.coupled:
                direction = direction + decay * p
            # One subtraction: p * (1 - lr * decay) would round the factor, and each weight a second time.
            updated[path] = p - lr * direction
            for name, moment in zip(rule.moments, moments, strict=True):
                after[name][path] = moment
        return updated, {"count": count} | packed(after, self.cfg.moments)

    def kinds(self) -> dict[str, str]:
        return {path: type(rule).__name__ for path, rule in self.rules.items()}


@dataclass(frozen=True)
class Adam:
    """m / (sqrt(v) + epsilon) of the averages of g and g^2, each divided by 1 - beta^step (Kingma and Ba 2015)."""

    beta1: float
    beta2: float
    epsilon: float
    coupled: bool = False
    moments: tuple[str, ...] = ("first_moment", "second_moment")
    width_powers: tuple[int, int] = (-1, 0)

    def __call__(self, g: Array, moments: Moments, step: Array) -> tuple[Array, Moments]:
        m = self.beta1 * moments[0] + (1 - self.beta1) * g
        v = self.beta2 * moments[1] + (1 - self.beta2) * jnp.square(g)
        first, second = m / weight_so_far(self.beta1, step), v / weight_so_far(self.beta2, step)
        return first / (jnp.sqrt(second) + self.epsilon), (m, v)


def weight_so_far(beta: float, step: Array) -> Array:
    """1 - beta^step, accurate to one or two units in the last place even if beta^step is near 1. step float32 []."""
    return -jnp.expm1(step * math.log(beta)) if beta else jnp.ones(())


@dataclass(frozen=True)
class Momentum:
    """direction = momentum * direction + g."""

    momentum: float
    coupled: bool = True
    moments: tuple[str, ...] = ("momentum",)
    width_powers: tuple[int, int] = (0, 1)

    def __call__(self, g: Array, moments: Moments, step: Array) -> tuple[Array, Moments]:
        direction = self.momentum * moments[0] + g
        return direction, (direction,)


@dataclass(frozen=True)
class SignOfAverage:
    """sign(beta1 m + (1 - beta1) g), then m <- beta2 m + (1 - beta2) g (Chen et al. 2023)."""

    beta1: float
    beta2: float
    coupled: bool = False
    moments: tuple[str, ...] = ("momentum",)
    width_powers: tuple[int, int] = (-1, 0)

    def __call__(self, g: Array, moments: Moments, step: Array) -> tuple[Array, Moments]:
        (m,) = moments
        return jnp.sign(self.beta1 * m + (1 - self.beta1) * g), (self.beta2 * m + (1 - self.beta2) * g,)


def adamw(
    cfg: AdamWConfig, declared: Mapping[str, ParamSpec], plan: Plan | None = None, width: float = 1.0
) -> RuleOptimizer:
    """Adam for every weight. If a weight's input grows with the width, epsilon is divided by it, as gradients are."""
    rule = Adam(cfg.beta1, cfg.beta2, cfg.epsilon, coupled=not cfg.decoupled)
    wide = replace(rule, epsilon=cfg.epsilon / width)
    rules = {path: wide if scales_with_width(spec) else rule for path, spec in declared.items()}
    return RuleOptimizer(cfg, declared, rules, width)


def sgd(
    cfg: SGDConfig, declared: Mapping[str, ParamSpec], plan: Plan | None = None, width: float = 1.0
) -> RuleOptimizer:
    """Momentum for every weight."""
    return RuleOptimizer(cfg, declared, dict.fromkeys(declared, Momentum(cfg.momentum)), width)


def lion(
    cfg: LionConfig, declared: Mapping[str, ParamSpec], plan: Plan | None = None, width: float = 1.0
) -> RuleOptimizer:
    """The sign of an average for every weight."""
    return RuleOptimizer(cfg, declared, dict.fromkeys(declared, SignOfAverage(cfg.beta1, cfg.beta2)), width)


def global_norm(arrays: Params) -> Array:
    """Root of the sum of squares over all weights, float32 []; the same in every layout."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in arrays.values()))


def zeros(grads: Params, declared: Mapping[str, ParamSpec]) -> Array:
    """Number of elements that are exactly 0, float32 []; padding rows, which have no gradient, are not counted."""
    padding = sum(math.prod(spec.shape[1:]) * spec.layers.count(-1) for spec in declared.values())
    return sum(jnp.sum(g == 0, dtype=jnp.float32) for g in grads.values()) - jnp.float32(padding)


def clip_factor(norm: Array, limit: float | None) -> Array:
    """Factor on gradients of that norm: limit / (norm + 1e-6), at most 1."""
    return jnp.ones(()) if limit is None else jnp.minimum(limit / (norm + 1e-6), 1.0)


def constant_rates(lr: Array | float, weight_decay: float = 0.0) -> Rates:
    """Rates without a schedule: lr for all groups, times their multipliers."""

    def rates(group: ParameterGroup) -> tuple[Array, Array]:
        return jnp.asarray(lr, jnp.float32) * group.lr_multiplier, jnp.float32(weight_decay * group.decay)

    return rates
