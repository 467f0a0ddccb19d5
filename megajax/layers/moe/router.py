"""Routers of mixtures of experts: the choice of experts for each token, their weights, and load-balancing losses.

Functions here run within an island: arrays are local to a device, and `axes` are the mesh axes that shard tokens.
B rows, S positions, T = B S tokens of a device; E experts, k chosen by each token. Computation is in float32.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.layers.decoding import Cache, StepRows, write
from megajax.layers.moe.config import CapacityConfig, MoEConfig, RouterConfig
from megajax.layers.moe.dispatch import RoutedTokens
from megajax.layers.moe.observations import REPORTED
from megajax.mesh.layer_observations import observe
from megajax.mesh.zigzag_order import UNSHARDED_ROWS, SequenceSharding

SINKHORN_TOLERANCE, SINKHORN_EPSILON = 1e-4, 1e-8
SINKHORN_ROUNDS = 1000
"""Maximum number of iterations; Megatron-LM has no limit."""

TOKENS = ("batch", "seq_residual", None)
"""Logical axes of tokens [B, S, ...]: each device routes its own."""

NEARLY_ZERO = -15.0
"""Below this, log softplus x is x - exp(x) / 2 to 1e-7 of its distance from x."""


class TokenAxes(NamedTuple):
    """Mesh axes with several devices that shard tokens."""

    batch: tuple[str, ...] = ()
    """Axes that shard rows."""
    seq: tuple[str, ...] = ()
    """Axes that shard positions."""
    rows: SequenceSharding = UNSHARDED_ROWS
    """The positions of a row that each device holds."""

    @property
    def every(self) -> tuple[str, ...]:
        return self.batch + self.seq

    def summed[T](self, x: T) -> T:
        """The sum of x over all devices."""
        return lax.psum(x, self.every) if self.every else x

    def devices(self) -> int:
        return lax.axis_size(self.every) if self.every else 1


class Routing(NamedTuple):
    """The experts of each token."""

    weights: Array
    """[T, k], in any order; 0 where the expert has no capacity left."""
    experts: Array
    """int32 [T, k]; E where the expert has no capacity left."""


class RouterArrays(NamedTuple):
    """The weights and observations of a router, and the keys of its random numbers; None for what it does not have."""

    keys: Array | None
    """uint32 [B, 2]: keys of the rows, for `sparse_mixer`."""
    load: Array
    """[2, E]: state of `ExpertLoad`."""
    replayed: Array | None
    """[2]: state of `ReplayReport`."""
    report: Array
    """[len(REPORTED)]: state of `RouterReport`."""
    matrix: Array
    """[D, E]."""
    bias: Array | None
    """[E]."""

    def axes(self) -> Any:
        """This pytree with the logical axes of each array in its place."""
        axes: dict[str, Any] = {name: None if x is None else (None,) * x.ndim for name, x in self._asdict().items()}
        axes["keys"] = None if self.keys is None else ("batch", None)
        return RouterArrays(**axes)


class TokensOfStep(NamedTuple):
    """What is known of the tokens of a step beside their values; None for what is not."""

    cache: Cache
    """Leaves that keep the experts of each token, in a decoding step."""
    experts: Array | None
    """[B, S, k]: those of this layer in `Context.experts`."""
    padding: Array | None
    """bool [B, S]."""
    rows: StepRows | None
    """Of a decoding step."""

    def axes(self) -> Any:
        """This pytree with the logical axes of each array in its place."""
        axes: dict[str, Any] = {"cache": dict.fromkeys(self.cache, (None, "batch", None, None))}
        axes["experts"] = None if self.experts is None else TOKENS
        axes["padding"] = None if self.padding is None else TOKENS[:2]
        return TokensOfStep(**axes, rows=None if self.rows is None else self.rows.axes())

    def real(self) -> Array | None:
        """bool [T]: the tokens that are not padding; None: all."""
        if self.rows is not None:
            return self.rows.real()
        return None if self.padding is None else ~self.padding.reshape(-1)

    def written(self, experts: Array) -> Cache:
        """The cache with the experts int32 [T, k] of the tokens."""
        rows = self.rows
        return (
            self.cache if rows is None else {name: write(leaf, experts + 1, rows) for name, leaf in self.cache.items()}
        )


class Routed(NamedTuple):
    """The choices of a router."""

    tokens: RoutedTokens
    report: dict[str, Array]
    """Entries of REPORTED: parts of sums over all devices."""

    def reported(self, dropped: Array) -> Array:
        """float32 [len(REPORTED)]: the report, with the part of this device of the rows that were dropped later."""
        report = self.report | {"dropped": self.report["dropped"] + dropped}
        return jnp.stack([jnp.asarray(report.get(name, 0), jnp.float32) for name in REPORTED])


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of the tokens of a device."""

    cfg: MoEConfig
    axes: TokenAxes
    copies: int
    """Number of devices that route the same tokens."""
    training: bool

    def __call__(self, x: Array, router_input: Array, index: Array, arrays: RouterArrays, step: TokensOfStep) -> Routed:
        """The routing of tokens [B, S, D]. Padding goes to no expert: all of it would go to the same few, on the same
        devices. router_input: what the router reads of the tokens; index: int32 [S], positions in the row."""
        cfg, axes, copies = self.cfg, self.axes, self.copies
        values, real = x.reshape(-1, x.shape[-1]), step.real()
        rows, flat = router_input.shape[0], router_input.reshape(-1, router_input.shape[-1]).astype(jnp.float32)
        logits = jnp.matmul(flat, arrays.matrix.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        if arrays.bias is not None:
            logits = logits + arrays.bias.astype(jnp.float32)[None]
        load, scale = lax.stop_gradient(arrays.load), lax.stop_gradient(arrays.report[0])
        balanced = balance(cfg.router, logits, rows, cfg.top_k, load[1], axes, real)
        routed = len(flat) if real is None else jnp.sum(real, dtype=jnp.float32)
        report = {"routed": jnp.float32(routed / copies), "dropped": jnp.zeros(())}
        report["chosen"] = report["routed"] * cfg.top_k
        report["not_finite"] = jnp.sum(~jnp.isfinite(logits)) / copies
        if balanced is not None:
            logits = add_gradient(logits, balanced.gradient * (scale / copies))
            report |= {name: value * (balanced.tokens / copies) for name, value in balanced.values.items()}
        routing = self._chosen(logits, load[0], index, arrays, real)
        if step.experts is not None and arrays.replayed is not None:
            flat_experts = step.experts.reshape(-1, cfg.top_k)
            routing, numbers = replay(cfg.router, logits, flat_experts, routing.experts)
            routing = routing._replace(weights=observe(routing.weights, arrays.replayed, numbers / copies))
        routing = routing._replace(experts=only(real, routing.experts, cfg.experts))
        tokens = counts(routing.experts, cfg.experts)
        if cfg.router.capacity is not None:
            routing = within_capacity(cfg.router.capacity, routing, rows, cfg.experts, axes, real)
            report["dropped"] = report["chosen"] - jnp.sum(routing.experts < cfg.experts) / copies
        weights = observe(routing.weights, arrays.load, jnp.stack([jnp.zeros_like(tokens), tokens / copies]))
        return Routed(RoutedTokens(values, weights, routing.experts), report)

    def _chosen(self, logits: Array, bias: Array, index: Array, arrays: RouterArrays, real: Array | None) -> Routing:
        cfg, draws = self.cfg, None
        if arrays.keys is not None:
            draws = drawn(arrays.keys, index, (cfg.top_k, cfg.experts + 1), 0, 1)
            draws = draws.reshape(-1, *draws.shape[2:])
        inputs = {"training": self.training, "index": index, "draws": draws, "real": real}
        return choose(cfg.router, logits, cfg.top_k, bias, self.axes, **inputs)


def drawn(row_keys: Array, index: Array, shape: tuple[int, ...], low: float, high: float) -> Array:
    """Uniform numbers of each token, [B, S, *shape], from keys of rows uint32 [B, 2] and positions int32 [S]."""

    def of_token(row: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(row), index)
        return jax.random.uniform(key, shape, minval=low, maxval=high)

    return jax.vmap(jax.vmap(of_token, (None, 0)), (0, None))(row_keys, index)


@jax.custom_vjp
def add_gradient(x: Array, gradient: Array) -> Array:
    """x; the backward pass adds `gradient`, that of a loss that is not an output, to the cotangent."""
    del gradient
    return x


add_gradient.defvjp(lambda x, gradient: (x, gradient), lambda gradient, dx: (dx + gradient.astype(dx.dtype), None))


def scores(cfg: RouterConfig, logits: Array) -> Array:
    """Scores [..., E] over all experts."""
    if cfg.score == "softmax":
        return jax.nn.softmax(logits)
    return jax.nn.sigmoid(logits) if cfg.score == "sigmoid" else jnp.exp(log_scores(cfg, logits))


def log_scores(cfg: RouterConfig, logits: Array) -> Array:
    """Logarithms of scores [..., E], up to a term per token for softmax: finite where scores underflow."""
    if cfg.score == "softmax":
        return logits
    if cfg.score == "sigmoid":
        return jax.nn.log_sigmoid(logits)
    small = logits < NEARLY_ZERO
    tail = jnp.where(small, logits, NEARLY_ZERO)
    log_softplus = jnp.log(jax.nn.softplus(jnp.where(small, NEARLY_ZERO, logits)))
    return jnp.where(small, tail - jnp.exp(tail) / 2, log_softplus) / 2


def shares(cfg: RouterConfig, logits: Array) -> Array:
    """Scores [..., E] normalised to sum to 1, for balancing losses."""
    return jax.nn.softmax(log_scores(cfg, logits))


def choose(
    cfg: RouterConfig,
    logits: Array,
    k: int,
    bias: Array,
    axes: TokenAxes,
    *,
    training: bool,
    index: Array | None = None,
    draws: Array | None = None,
    real: Array | None = None,
) -> Routing:
    """The experts of tokens with these logits [T, E]. bias: [E], added to scores; draws: of `sparse_mixer`.

    index: int32 [S], the device's positions within the row, used by force_balance; None if it holds whole rows.
    real: bool [T], the tokens that are not padding, used by `sinkhorn`; None: all.
    """
    if cfg.force_balance:
        index = jnp.arange(logits.shape[0]) if index is None else index
        length = index.size * (lax.axis_size(axes.seq) if axes.seq else 1)
        numbers = jnp.arange(logits.shape[0] // index.size)[:, None] * length + index[None]
        turns = (numbers.reshape(-1)[:, None] * k + jnp.arange(k)[None]) % logits.shape[1]
        return _weighed(cfg, logits, turns.astype(jnp.int32))
    if cfg.sinkhorn:
        probabilities = jax.nn.softmax(logits) if k > 1 else jax.nn.sigmoid(logits)
        experts = _best(sinkhorn(lax.stop_gradient(logits), axes, real) if training else probabilities, k)
        return Routing(jnp.take_along_axis(probabilities, experts, -1) * cfg.scale, experts)
    if cfg.sparse_mixer is not None:
        routing = sparse_mixer(logits, k, cfg.sparse_mixer, draws)
        return routing._replace(weights=routing.weights * cfg.scale)
    fixed = lax.stop_gradient(logits)
    if cfg.balance_rate is not None:
        compared = _above_zero(cfg, fixed) + bias[None]
        return _weighed(cfg, logits, _best(_in_chosen_groups(cfg, compared, compared, k), k))
    logs = log_scores(cfg, fixed)
    sums_of_logits = cfg.score == "softmax" and cfg.normalise == "chosen"
    # The scores of a token over the largest: in the same order, without underflow.
    by_group = fixed if sums_of_logits else jnp.exp(logs - logs.max(-1, keepdims=True))
    return _weighed(cfg, logits, _best(_in_chosen_groups(cfg, by_group, fixed, k), k))


def _above_zero(cfg: RouterConfig, logits: Array) -> Array:
    """Scores [..., E] in their order, also where they underflow: below exp(-60) they fall more slowly."""
    beyond = jnp.minimum(log_scores(cfg, logits) + 60, 0) if cfg.score != "softmax" else 0.0
    return jnp.where(beyond < 0, np.float32(np.exp(-60)) / (1 - beyond), scores(cfg, logits))


def replay(cfg: RouterConfig, logits: Array, replayed: Array, chosen: Array) -> tuple[Routing, Array]:
    """The routing of tokens with these logits [T, E] to replayed experts, and the numbers of replayed choices, and of
    those that the router would not make, float32 [2].

    replayed: int [T, k], 1 + the experts; 0: those of `chosen` int32 [T, k], the router's choice.
    """
    is_replayed, experts = replayed[:, :1] > 0, replayed.astype(jnp.int32) - 1
    differs = is_replayed & jnp.all(experts[:, :, None] != chosen[:, None], axis=-1)
    numbers = [jnp.sum(x, dtype=jnp.float32) for x in (jnp.broadcast_to(is_replayed, chosen.shape), differs)]
    return _weighed(cfg, logits, jnp.where(is_replayed, experts, chosen)), jnp.stack(numbers)


def _best(compared: Array, k: int) -> Array:
    return lax.top_k(lax.stop_gradient(compared), k)[1]


def sparse_mixer(logits: Array, k: int, distance: float, draws: Array | None) -> Routing:
    """Experts chosen one after another (Liu et al. 2024, "GRIN", section 2): see `RouterConfig.sparse_mixer`.

    logits [T, E]; draws: uniform numbers [T, k, E + 1] for training, E to draw an expert and one for the rule of third
    order; None: the best expert, without estimates. An expert other than the best counts a third in 3 of 4 cases; the
    gradient is that of its share.
    """
    number, left, weights, experts = logits.shape[1], logits, [], []
    for turn in range(k):
        best = lax.stop_gradient(left.max(-1, keepdims=True))
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * distance
        near = jnp.where(lax.stop_gradient(far), -jnp.inf, left)
        expert = first = jnp.argmax(left, axis=-1)
        if draws is not None:
            expert = jnp.argmax(near - jnp.log(-jnp.log(draws[:, turn, :number])), axis=-1)
        weight = jnp.take_along_axis(jax.nn.softmax(near), expert[:, None], -1)[:, 0]
        if draws is not None:
            whole = (expert == first) | (draws[:, turn, number] > 0.75)
            weight = weight + lax.stop_gradient(jnp.where(whole, 0, -2 / 3) * weight)
        left = jnp.where(jax.nn.one_hot(expert, number, dtype=bool), -jnp.inf, left)
        weights.append(weight)
        experts.append(expert.astype(jnp.int32))
    return Routing(jnp.stack(weights, -1), jnp.stack(experts, -1))


def _weighed(cfg: RouterConfig, logits: Array, experts: Array) -> Routing:
    if cfg.normalise == "chosen" and (cfg.score == "softmax" or experts.shape[1] > 1):
        weights = jax.nn.softmax(jnp.take_along_axis(log_scores(cfg, logits), experts, -1))
    else:
        weights = jnp.take_along_axis(scores(cfg, logits), experts, -1)
    return Routing(weights * cfg.scale, experts)


def _in_chosen_groups(cfg: RouterConfig, by_group: Array, compared: Array, k: int) -> Array:
    """`compared` [T, E], minus infinity outside the groups with the largest sums of `by_group` [T, E]."""
    if cfg.groups is None or cfg.chosen_groups is None:
        return compared
    groups = by_group.reshape(-1, cfg.groups, compared.shape[1] // cfg.groups)
    sums = lax.top_k(groups, cfg.group_scores or k // cfg.chosen_groups)[0].sum(-1)
    best_groups = lax.top_k(sums, cfg.chosen_groups)[1]
    allowed = jnp.any(jax.nn.one_hot(best_groups, cfg.groups, dtype=bool), axis=1)
    allowed = jnp.broadcast_to(allowed[:, :, None], groups.shape).reshape(compared.shape)
    return jnp.where(allowed, compared, -jnp.inf)


def sinkhorn(logits: Array, axes: TokenAxes, real: Array | None = None) -> Array:
    """exp(logits) [T, E] with rows and columns scaled to equal sums, over the tokens of all devices.

    real: bool [T], the tokens that are not padding, whose rows become 0; None: all.
    """
    cost, tokens = jnp.exp(logits), logits.shape[0] * axes.devices()
    if real is not None:
        cost, tokens = jnp.where(real[:, None], cost, 0), jnp.maximum(axes.summed(jnp.sum(real)), 1)

    def scaled(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        turn, _, columns, _ = carry
        rows = 1 / tokens / (jnp.sum(columns[None] * cost, 1) + SINKHORN_EPSILON)
        new = 1 / cost.shape[1] / (axes.summed(jnp.sum(rows[:, None] * cost, 0)) + SINKHORN_EPSILON)
        return turn + 1, rows, new, jnp.mean(jnp.abs(new - columns))

    def going_on(carry: tuple[Array, Array, Array, Array]) -> Array:
        return (carry[3] > SINKHORN_TOLERANCE) & (carry[0] < SINKHORN_ROUNDS)

    start = jnp.int32(0), jnp.ones(cost.shape[0]), jnp.ones(cost.shape[1]), jnp.float32(jnp.inf)
    _, rows, columns, _ = lax.while_loop(going_on, scaled, start)
    return columns[None] * cost * rows[:, None]


def counts(experts: Array, number: int) -> Array:
    """int32 [..., T, k] -> float32 [..., E]: number of tokens of each expert; dropped choices (E) are not counted."""
    return jnp.sum(jax.nn.one_hot(experts, number, dtype=bool), axis=(-3, -2), dtype=jnp.float32)


class Balanced(NamedTuple):
    """Load-balancing losses of a router."""

    gradient: Array
    """[T, E]: gradient of the weighted sum of the losses with respect to the logits."""
    values: dict[str, Array]
    """Values by name in LOSSES, without coefficients: the local part of a sum over all devices."""
    tokens: Array
    """Tokens of all devices, float32 []: the divisor of the means in `values`."""


def balance(
    cfg: RouterConfig,
    logits: Array,
    rows: int,
    k: int,
    before: Array,
    axes: TokenAxes,
    real: Array | None = None,
) -> Balanced | None:
    """The balancing losses for logits [T, E] of `rows` rows; None without any such loss.

    Each loss is E / k sum_e f_e P_e: f_e is the share of tokens with e among their k best scores, P_e the mean score of
    e. f is a count, so gradients flow through P only. before: tokens [E] of the last step; real: bool [T], the tokens
    that are not padding, which alone count; None: all.
    Gradients are those of a sum over tokens: of the mean times the number of tokens.
    """
    coefficients = cfg.coefficients()
    if not any(coefficients.values()):
        return None
    logits, number = lax.stop_gradient(logits), logits.shape[1]
    p, back = jax.vjp(lambda logits: shares(cfg, logits), logits)
    counted = jnp.ones(len(logits), jnp.float32) if real is None else real.astype(jnp.float32)
    p_rows, in_rows = p.reshape(rows, -1, number), counted.reshape(rows, -1)
    of_rows = counts(only(real, _best(p, k), number).reshape(rows, -1, k), number)  # [B, E]
    step_tokens, total = axes.summed((of_rows.sum(0), counted.sum()))
    total = jnp.maximum(total, 1)
    lengths = in_rows.sum(1)
    of_rows, lengths = lax.psum((of_rows, lengths), axes.seq) if axes.seq else (of_rows, lengths)
    all_tokens = step_tokens + before
    shares_by_loss = {
        "aux": jnp.broadcast_to(step_tokens / total, of_rows.shape),
        "row": of_rows / jnp.maximum(lengths, 1)[:, None],
        "global": jnp.broadcast_to(all_tokens / jnp.maximum(all_tokens.sum() / k, 1), of_rows.shape),
    }
    factor, dp, values = number / k, jnp.zeros_like(p_rows), {}
    for name, share in shares_by_loss.items():
        dp = dp + (coefficients[name] * factor * share)[:, None] * in_rows[..., None]
        values[name] = jnp.sum(jnp.sum(p_rows * in_rows[..., None], 1) * share) * factor / total
    partition = jax.nn.logsumexp(logits, axis=-1, keepdims=True) * counted[:, None]
    values["z"] = jnp.sum(jnp.square(partition)) / total
    gradient = back(dp.reshape(p.shape))[0] + coefficients["z"] * 2 * partition * jax.nn.softmax(logits)
    return Balanced(gradient, {name: value for name, value in values.items() if coefficients[name]}, total)


def only(real: Array | None, experts: Array, number: int) -> Array:
    """int32 [T, k]: `experts`, and the number of experts, which is none of them, for padding. real: bool [T]."""
    return experts if real is None else jnp.where(real[:, None], experts, number)


def within_capacity(
    cfg: CapacityConfig, routing: Routing, rows: int, number: int, axes: TokenAxes, real: Array | None = None
) -> Routing:
    """The routing without tokens beyond the capacity of each expert, counted over all devices.

    Tokens are ordered by position, then by row, as in Megatron-LM. Padding, whose experts are `number`, takes no room.
    real: bool [T], the tokens that are not padding, which determine the capacity; None: all.
    """
    k = routing.experts.shape[1]

    def everywhere(x: Array) -> Array:
        x = x.reshape(rows, -1, k)
        for dimension, names in enumerate((axes.batch, axes.seq)):
            x = lax.all_gather(x, names, axis=dimension, tiled=True) if names else x
        return axes.rows.in_order(x)

    weights, experts = everywhere(lax.stop_gradient(routing.weights)), everywhere(routing.experts)
    capacity = ceil(experts.size / number * cfg.factor)
    if real is not None:
        # In float64, as above: by the number of tokens.
        capacities = np.ceil(np.arange(0, experts.size + 1, k) / number * cfg.factor).astype(np.int32)
        capacity = jnp.asarray(capacities)[axes.summed(jnp.sum(real, dtype=jnp.int32))]
    flat = experts.swapaxes(0, 1).reshape(-1)
    order = jnp.arange(flat.size)
    if cfg.drop == "probability":
        order = jnp.argsort(-weights.swapaxes(0, 1).reshape(-1), stable=True)
    order = order[jnp.argsort(flat[order], stable=True)]
    sizes = jnp.sum(jax.nn.one_hot(flat, number, dtype=bool), axis=0)
    starts = jnp.cumsum(sizes) - sizes
    sorted_experts = flat[order]
    keep = jnp.zeros(flat.size, bool).at[order].set(jnp.arange(flat.size) - starts[sorted_experts] < capacity)
    keep = axes.rows.by_device(keep.reshape(experts.shape[1], experts.shape[0], k).swapaxes(0, 1))
    for dimension, names in enumerate((axes.batch, axes.seq)):
        if names:
            size = keep.shape[dimension] // lax.axis_size(names)
            keep = lax.dynamic_slice_in_dim(keep, lax.axis_index(names) * size, size, dimension)
    keep = keep.reshape(routing.experts.shape)
    return Routing(jnp.where(keep, routing.weights, 0), jnp.where(keep, routing.experts, number))
