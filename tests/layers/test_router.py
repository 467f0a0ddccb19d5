"""Routers against formulas in numpy, on several devices against one, and what they report."""

from functools import partial
from math import ceil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from megajax.layers.moe.config import CapacityConfig, RouterConfig
from megajax.layers.moe.observations import REPORTED, ExpertLoad, ReplayReport, RouterReport
from megajax.layers.moe.router import (
    Routing,
    TokenAxes,
    add_gradient,
    balance,
    choose,
    counts,
    only,
    replay,
    scores,
    sinkhorn,
    sparse_mixer,
    within_capacity,
)
from megajax.mesh.layer_metrics import layer_values
from megajax.training.observations import measurements

ROWS, LENGTH, EXPERTS, K = 3, 8, 6, 2
TOKENS = ROWS * LENGTH
LOGITS = np.random.default_rng(0).normal(size=(TOKENS, EXPERTS)).astype(np.float32)
ONE = TokenAxes()
NO_BIAS = np.zeros(EXPERTS, np.float32)

SOFTMAX = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
SIGMOID = 1 / (1 + np.exp(-LOGITS))
SQRT_SOFTPLUS = np.sqrt(np.log1p(np.exp(LOGITS)))


def chosen_experts(
    cfg: RouterConfig, k: int = K, bias: np.ndarray = NO_BIAS, training: bool = True, logits: np.ndarray = LOGITS
) -> np.ndarray:
    """Weights [T, E] of all experts, zeros for those that a token does not choose."""
    routed = jax.jit(lambda logits, bias: choose(cfg, logits, k, bias, ONE, training=training))
    return dense(routed(logits, bias))


def dense(routing: Routing) -> np.ndarray:
    experts, weights = np.asarray(routing.experts), np.asarray(routing.weights)
    actual = np.zeros((len(experts), EXPERTS + 1), np.float32)
    np.put_along_axis(actual, experts, weights, -1)
    return actual[:, :EXPERTS]


def best(scores: np.ndarray, k: int = K) -> np.ndarray:
    """Whether each is among the k largest of its row."""
    return scores >= np.sort(scores, -1)[:, -k][:, None]


FORMULAS = {
    "softmax of the chosen": (RouterConfig(), best(SOFTMAX) * SOFTMAX / (best(SOFTMAX) * SOFTMAX).sum(-1)[:, None]),
    "softmax of all": (RouterConfig(normalise="all", scale=1.5), 1.5 * best(SOFTMAX) * SOFTMAX),
    "sigmoid": (
        RouterConfig(score="sigmoid", scale=2.5),
        2.5 * best(SIGMOID) * SIGMOID / (best(SIGMOID) * SIGMOID).sum(-1)[:, None],
    ),
    "sigmoid of all": (RouterConfig(score="sigmoid", normalise="all"), best(SIGMOID) * SIGMOID),
    "square root of softplus": (
        RouterConfig(score="sqrt_softplus"),
        best(SQRT_SOFTPLUS) * SQRT_SOFTPLUS / (best(SQRT_SOFTPLUS) * SQRT_SOFTPLUS).sum(-1)[:, None],
    ),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_weights_of_the_chosen_experts(case):
    cfg, expected = FORMULAS[case]
    np.testing.assert_allclose(chosen_experts(cfg), expected, rtol=1e-5, atol=1e-6)


def test_one_expert_keeps_its_score_where_scores_need_not_sum_to_one():
    sigmoid = RouterConfig(score="sigmoid")
    np.testing.assert_allclose(chosen_experts(sigmoid, k=1), best(SIGMOID, 1) * SIGMOID, rtol=1e-5)
    np.testing.assert_array_equal(chosen_experts(RouterConfig(), k=1), best(SOFTMAX, 1).astype(np.float32))


def test_given_experts_have_the_weights_of_the_present_router():
    """Tokens without any have the router's; gradients are those of the softmax over the given ones."""
    draw = np.random.default_rng(1)
    given = np.argsort(draw.normal(size=LOGITS.shape), -1)[:, :K]
    given[3] = np.argsort(-LOGITS[3])[:K][::-1]
    replayed, own = 1 + given, np.argsort(-LOGITS, -1)[:, :K]
    replayed[:3] = 0
    chosen = np.where(replayed > 0, given, own)
    logits = np.take_along_axis(LOGITS, chosen, -1)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def loss(logits):
        routing, numbers = replay(RouterConfig(), logits, jnp.asarray(replayed, jnp.int16), jnp.asarray(own))
        return jnp.sum(routing.weights[:, 0]), (routing, numbers)

    gradient, (routing, numbers) = jax.jit(jax.grad(loss, has_aux=True))(LOGITS)
    np.testing.assert_array_equal(routing.experts, chosen)
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-5)
    slope, wanted = expected[:, 0] * expected[:, 1], np.zeros_like(LOGITS)
    np.put_along_axis(wanted, chosen, np.stack([slope, -slope], -1), -1)
    np.testing.assert_allclose(gradient, wanted, atol=1e-6)
    others = sum(e not in set(mine) for those, mine in zip(given[3:], own[3:], strict=True) for e in those)
    assert numbers.tolist() == [K * (TOKENS - 3), others] and others > 9
    (measure,) = ReplayReport().measures()
    np.testing.assert_allclose(measure.of(np.array([numbers, [0, 0]])), [others / numbers[0], np.nan])


def test_groups_are_chosen_first_by_the_sums_of_their_best_scores():
    cfg = RouterConfig(score="sigmoid", groups=3, chosen_groups=1)
    allowed = np.repeat(best(SIGMOID.reshape(TOKENS, 3, 2).sum(-1), 1), 2, axis=1)
    expected = allowed * SIGMOID
    np.testing.assert_allclose(chosen_experts(cfg), expected / expected.sum(-1, keepdims=True), rtol=1e-5)


def test_groups_may_be_compared_by_their_best_score_alone():
    cfg = RouterConfig(normalise="all", groups=2, chosen_groups=1, group_scores=1)
    allowed = np.repeat(best(SOFTMAX.reshape(TOKENS, 2, 3).max(-1), 1), 3, axis=1)
    masked = np.where(allowed, SOFTMAX, 0)
    np.testing.assert_allclose(chosen_experts(cfg), best(masked) * SOFTMAX, rtol=1e-5)
    by_sums = np.repeat(best(np.sort(SOFTMAX.reshape(TOKENS, 2, 3))[..., 1:].sum(-1), 1), 3, axis=1)
    assert not np.array_equal(allowed, by_sums)


def test_a_bias_decides_the_choice_and_not_the_weights():
    bias = np.array([9, 0, 0, 9, 0, 0], np.float32)
    cfg = RouterConfig(score="sigmoid", balance_rate=0.1, normalise="all")
    expected = SIGMOID * (bias > 0)
    np.testing.assert_allclose(chosen_experts(cfg, bias=bias), expected, rtol=1e-5)
    # Without the setting there is no bias, whatever the state contains.
    assert not np.array_equal(chosen_experts(RouterConfig(score="sigmoid", normalise="all"), bias=bias), expected)


def test_a_bias_of_softmax_is_added_to_probabilities_and_weights_sum_to_one():
    """As ERNIE 4.5: a bias of 0.3 changes the choice by probabilities, and a bias of logits would change others."""
    bias = np.array([0.3, 0, 0, 0.3, 0, 0], np.float32)
    chosen = best(SOFTMAX + bias)
    expected = chosen * SOFTMAX / (chosen * SOFTMAX).sum(-1, keepdims=True)
    np.testing.assert_allclose(chosen_experts(RouterConfig(balance_rate=0.1), bias=bias), expected, rtol=1e-5)
    assert not np.array_equal(chosen, best(SOFTMAX)) and not np.array_equal(chosen, best(LOGITS + bias))


def test_sparse_mixer_chooses_one_expert_after_another_among_those_near_the_best():
    """SparseMixer with a distance of 0.1: its thresholds are relative to the larger of a logit's size and the best."""
    logits = np.array([[2.0, 1.7, 1.5, 1.4], [1.0, -0.9, 0.95, 0.1]])
    routing = jax.jit(lambda logits: sparse_mixer(logits, 2, 0.1, None))(jnp.asarray(logits, jnp.float32))
    np.testing.assert_array_equal(routing.experts, [[0, 1], [0, 2]])
    # Near 2.0 is 1.7; near 1.7 are 1.5 and 1.4; near 1.0 is 0.95, which is alone then.
    pairs = [[(2.0, 1.7), (1.7, 1.5, 1.4)], [(1.0, 0.95), (0.95,)]]
    shares = [[np.exp(near[0]) / np.exp(near).sum() for near in row] for row in pairs]
    np.testing.assert_allclose(routing.weights, shares, rtol=1e-5)


@pytest.mark.slow
def test_sparse_mixer_draws_in_training_and_its_gradient_is_that_of_the_share():
    """An expert that is not the best counts a third, or wholly in one of four cases."""
    logits = jnp.asarray([[1.0, 0.9, 0.2]] * 4000, jnp.float32)
    draws = jax.random.uniform(jax.random.key(0), (4000, 1, 4))
    (weights, gradients) = jax.value_and_grad(lambda x: sparse_mixer(x, 1, 0.1, draws).weights.sum())(logits)
    routing = sparse_mixer(logits, 1, 0.1, draws)
    share, second = 1 / (1 + np.exp(-0.1)), np.asarray(routing.experts[:, 0] == 1)
    np.testing.assert_allclose(second.mean(), 1 - share, atol=0.03)
    whole = np.asarray(draws[:, 0, 3] > 0.75)
    expected = np.where(second, (1 - share) * np.where(whole, 1, 1 / 3), share)
    np.testing.assert_allclose(routing.weights[:, 0], expected, rtol=1e-5)
    slope = share * (1 - share) * np.where(second, -1, 1)
    np.testing.assert_allclose(gradients, np.stack([slope, -slope, 0 * slope], 1), atol=1e-6)
    np.testing.assert_allclose(weights, expected.sum(), rtol=1e-5)


def test_forced_balance_gives_each_expert_the_same_number_of_tokens():
    actual = chosen_experts(RouterConfig(force_balance=True, normalise="all"))
    np.testing.assert_array_equal((actual > 0).sum(0), TOKENS * K // EXPERTS)
    np.testing.assert_allclose(actual, SOFTMAX * (actual > 0), rtol=1e-5)


def test_the_bias_rises_for_experts_below_the_mean_and_falls_for_those_above():
    state = np.stack([np.full(4, 0.5), np.zeros(4)]).astype(np.float32)
    observed = np.stack([np.zeros(4), [2, 4, 4, 6]]).astype(np.float32)
    updated = ExpertLoad(0.01).updated(jnp.asarray(state), jnp.asarray(observed), jnp.ones(()))
    np.testing.assert_allclose(updated, [[0.51, 0.5, 0.5, 0.49], [2, 4, 4, 6]], rtol=1e-6)
    state_after = ExpertLoad(None).updated(jnp.asarray(state), jnp.asarray(observed), jnp.ones(()))
    np.testing.assert_array_equal(state_after[0], 0)


def written_out(cfg: RouterConfig, logits: jax.Array, tokens_before: np.ndarray) -> dict[str, jax.Array]:
    """The losses of all tokens as means, differentiable through the scores only."""
    values = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[cfg.score](logits)
    p = values / values.sum(-1, keepdims=True)
    hot = jnp.asarray(best(LOGITS).astype(np.float32))  # The order of scores is that of logits.
    rows, hot_rows = p.reshape(ROWS, LENGTH, EXPERTS), hot.reshape(ROWS, LENGTH, EXPERTS)
    total = hot.sum(0) + tokens_before
    losses = {
        "aux": EXPERTS / K * jnp.sum(hot.mean(0) * p.mean(0)),
        "row": EXPERTS / K * jnp.mean(jnp.sum(hot_rows.mean(1) * rows.mean(1), -1)),
        "global": EXPERTS * jnp.sum(total / total.sum() * p.mean(0)),
        "z": jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
    }
    return losses


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_and_their_gradients(score):
    cfg = RouterConfig(score=score, aux_loss=0.1, row_loss=0.2, global_loss=0.3, z_loss=0.4)
    tokens_before = np.arange(EXPERTS, dtype=np.float32)
    coefficients = {"aux": 0.1, "row": 0.2, "global": 0.3, "z": 0.4}
    logits = jnp.asarray(LOGITS)
    balanced = jax.jit(lambda logits: balance(cfg, logits, ROWS, K, jnp.asarray(tokens_before), ONE))(logits)
    expected = written_out(cfg, logits, tokens_before)
    for name, value in balanced.values.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)
    assert balanced.values.keys() == expected.keys()

    def total(logits):
        return sum(coefficients[name] * value for name, value in written_out(cfg, logits, tokens_before).items())

    gradient = jax.jit(jax.grad(total))(logits)
    # The gradient is of the sum over tokens, as for the loss of a language model.
    np.testing.assert_allclose(balanced.gradient / TOKENS, gradient, rtol=1e-4, atol=1e-7)


SCORES = {
    "softmax": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
}


@pytest.mark.parametrize("offset", [-46, -300])
@pytest.mark.parametrize("score", SCORES)
def test_scores_that_underflow_leave_losses_weights_and_gradients_exact(score, offset):
    logits = (LOGITS + np.float32(offset)).astype(np.float64)
    exact = SCORES[score](logits)
    p = exact / exact.sum(-1, keepdims=True)
    cfg = RouterConfig(score=score, aux_loss=1.0)
    balanced = jax.jit(lambda x: balance(cfg, x, ROWS, K, jnp.asarray(NO_BIAS), ONE))(logits.astype(np.float32))
    share = best(p).mean(0)
    np.testing.assert_allclose(balanced.values["aux"], EXPERTS / K * (share * p.mean(0)).sum(), rtol=1e-5)
    # d p / d logits of scores over their sum: p_e (d_e - sum p d) with d = dp dlog score / dlogit.
    slope = {"softmax": 1, "sigmoid": 1 - exact, "sqrt_softplus": exact**-2 / (1 + np.exp(-logits)) / 2}[score]
    dp = EXPERTS / K * share
    gradient = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope
    np.testing.assert_allclose(balanced.gradient, gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max())

    weights = chosen_experts(cfg, logits=logits.astype(np.float32))
    chosen = best(exact) * exact
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)

    def total(logits):
        return jnp.sum(choose(cfg, logits, K, jnp.asarray(NO_BIAS), ONE, training=True).weights ** 2)

    assert np.isfinite(jax.jit(jax.grad(total))(jnp.asarray(logits, jnp.float32))).all()


def test_groups_are_compared_by_sums_of_scores_that_underflow():
    cfg = RouterConfig(score="sigmoid", groups=3, chosen_groups=1, group_scores=2)
    far = chosen_experts(cfg, logits=LOGITS - 120)
    np.testing.assert_array_equal(far > 0, chosen_experts(cfg, logits=LOGITS - 30) > 0)


def test_the_largest_logits_of_a_group_are_chosen_where_scores_are_equal():
    cfg = RouterConfig(score="sigmoid", groups=2, chosen_groups=2)
    np.testing.assert_array_equal(chosen_experts(cfg, logits=LOGITS + 40) > 0, best(LOGITS))


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_equal_biases_choose_the_best_scores_that_underflow(score):
    cfg = RouterConfig(score=score, balance_rate=0.01)
    for offset in (-59, -61, -120, -300):
        np.testing.assert_array_equal(chosen_experts(cfg, logits=LOGITS * 3 + offset) > 0, best(LOGITS))
    biased = chosen_experts(cfg, logits=LOGITS - 120, bias=np.arange(EXPERTS, dtype=np.float32) / 100)
    assert (biased[:, -K:] > 0).all()


def test_the_slope_of_the_square_root_of_softplus_is_smooth_where_its_tail_begins():
    cfg = RouterConfig(score="sqrt_softplus")
    slope = jax.vmap(jax.grad(lambda x: scores(cfg, x)))(jnp.array([-15.0001, -15.0, -14.9999]))
    np.testing.assert_allclose(slope, np.exp(-7.5) / 2, rtol=2e-4)


def with_padding(values: np.ndarray, fill: float) -> np.ndarray:
    """[ROWS * LENGTH, ...] -> the same rows, half as long again, with padding of this value."""
    rows = values.reshape(ROWS, LENGTH, *values.shape[1:])
    return np.concatenate([rows, np.full_like(rows[:, : LENGTH // 2], fill)], 1).reshape(-1, *values.shape[1:])


def without_padding(values: object) -> np.ndarray:
    values = np.asarray(values)
    return values.reshape(ROWS, -1, *values.shape[1:])[:, :LENGTH].reshape(TOKENS, *values.shape[1:])


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_padding_is_not_balanced_and_takes_no_room(drop):
    cfg = RouterConfig(aux_loss=0.1, row_loss=0.2, global_loss=0.3, z_loss=0.4)
    limit, before = CapacityConfig(factor=0.5, drop=drop), jnp.arange(EXPERTS, dtype=jnp.float32)

    def routed(logits: jax.Array, real: jax.Array | None) -> tuple:
        balanced = balance(cfg, logits, ROWS, K, before, ONE, real)
        routing = choose(cfg, logits, K, jnp.asarray(NO_BIAS), ONE, training=True)
        routing = routing._replace(experts=only(real, routing.experts, EXPERTS))
        limited = within_capacity(limit, routing, ROWS, EXPERTS, ONE, real)
        tokens = counts(routing.experts, EXPERTS)
        return (
            balanced.values,
            tokens,
            (balanced.gradient, limited.weights, limited.experts, sinkhorn(logits, ONE, real)),
        )

    values, tokens, arrays = jax.jit(routed)(LOGITS, None)
    real = with_padding(np.ones(TOKENS, bool), False)
    padded_values, padded_tokens, padded = jax.jit(routed)(with_padding(LOGITS, 5.0), real)
    for name, value in values.items():
        np.testing.assert_allclose(padded_values[name], value, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(padded_tokens, tokens)
    for expected, actual in zip(arrays, padded, strict=True):
        np.testing.assert_allclose(without_padding(actual), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(np.asarray(padded[0])[~real], 0)
    np.testing.assert_array_equal(np.asarray(padded[2])[~real], EXPERTS)


def test_a_loss_that_is_off_is_not_reported():
    def values(cfg: RouterConfig) -> object:
        return jax.eval_shape(lambda logits, tokens: balance(cfg, logits, ROWS, K, tokens, ONE), LOGITS, NO_BIAS)

    assert values(RouterConfig()) is None
    assert values(RouterConfig(z_loss=0.1)).values.keys() == {"z"}


def test_a_gradient_is_added_without_changing_the_value():
    x, more = jnp.arange(3.0), jnp.array([1.0, 0.0, -1.0])
    y, back = jax.vjp(lambda x: add_gradient(x, more), x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(back(jnp.ones(3))[0], [2.0, 1.0, 0.0])


def test_sinkhorn_gives_rows_and_columns_equal_sums():
    scaled = np.asarray(sinkhorn(jnp.asarray(LOGITS), ONE), np.float64)
    np.testing.assert_allclose(scaled.sum(0), 1 / EXPERTS, rtol=1e-3)
    np.testing.assert_allclose(scaled.sum(1), 1 / TOKENS, rtol=1e-2)
    trained, evaluated = (chosen_experts(RouterConfig(sinkhorn=True), training=training) for training in (True, False))
    np.testing.assert_allclose(trained, SOFTMAX * best(scaled), rtol=1e-5)
    np.testing.assert_allclose(evaluated, SOFTMAX * best(SOFTMAX), rtol=1e-5)
    np.testing.assert_allclose(
        chosen_experts(RouterConfig(sinkhorn=True), k=1, training=False), SIGMOID * best(SIGMOID, 1), rtol=1e-5
    )


def kept_by(cfg: CapacityConfig, weights: np.ndarray) -> np.ndarray:
    """Weights [T, E] of which each expert keeps so many; positions come first, then rows."""
    most = ceil(TOKENS * K / EXPERTS * cfg.factor)
    order = np.arange(TOKENS).reshape(ROWS, LENGTH).T.reshape(-1)
    actual = np.zeros_like(weights)
    for expert in range(EXPERTS):
        tokens = [token for token in order if weights[token, expert] > 0]
        if cfg.drop == "probability":
            tokens.sort(key=lambda token: -weights[token, expert])
        actual[tokens[:most], expert] = weights[tokens[:most], expert]
    return actual


@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.5, EXPERTS / K])
def test_experts_keep_as_many_tokens_as_their_capacity(drop, factor):
    cfg = CapacityConfig(factor=factor, drop=drop)
    routing = choose(RouterConfig(), jnp.asarray(LOGITS), K, jnp.asarray(NO_BIAS), ONE, training=True)
    for real in (None, np.ones(TOKENS, bool)):
        limited = jax.jit(lambda routing, real: within_capacity(cfg, routing, ROWS, EXPERTS, ONE, real))(routing, real)
        np.testing.assert_array_equal(dense(limited), kept_by(cfg, dense(routing)))
    dropped = np.asarray(limited.experts) == EXPERTS
    assert dropped.any() == (factor < 1)
    np.testing.assert_array_equal(np.asarray(limited.weights)[dropped], 0)


AXES = TokenAxes(batch=("data",), seq=("context",))


def test_tokens_on_several_devices_are_routed_and_balanced_as_on_one():
    """Rows over 2 devices, positions over 2: losses, their gradients, capacity and sinkhorn count all tokens."""
    rows, length = 2, 8
    logits = np.random.default_rng(1).normal(size=(rows, length, EXPERTS)).astype(np.float32)
    cfg = RouterConfig(aux_loss=0.1, row_loss=0.2, z_loss=0.3, global_loss=0.4)
    limit, tokens_before = CapacityConfig(factor=0.6), jnp.arange(EXPERTS, dtype=jnp.float32)

    padding = np.arange(length) >= np.array([[5], [7]])

    def local(logits: jax.Array, padding: jax.Array | None, axes: TokenAxes) -> tuple:
        shape, flat, real = logits.shape, logits.reshape(-1, EXPERTS), None if padding is None else ~padding.reshape(-1)
        balanced = balance(cfg, flat, shape[0], K, tokens_before, axes, real)
        routing = choose(cfg, flat, K, jnp.zeros(EXPERTS), axes, training=True)
        limited = within_capacity(limit, routing, shape[0], EXPERTS, axes, real)
        results = [balanced.gradient, sinkhorn(flat, axes, real), limited.weights, limited.experts]
        return [x.reshape(*shape[:2], -1) for x in results], axes.summed(balanced.values)

    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=kinds, devices=jax.devices()[:4])
    spec = PartitionSpec("data", "context")
    for marked in (None, padding):
        mapped = jax.shard_map(
            partial(local, axes=AXES), mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec()), check_vma=False
        )
        results, values = jax.jit(mapped)(logits, marked)
        expected, expected_values = jax.jit(partial(local, axes=ONE))(logits, marked)
        for actual, theirs in zip(results, expected, strict=True):
            np.testing.assert_allclose(actual, theirs, rtol=1e-5, atol=1e-6)
        for name, value in values.items():
            np.testing.assert_allclose(value, expected_values[name], rtol=1e-5, err_msg=name)


def declared(layers: tuple[int, ...], measures: tuple) -> SimpleNamespace:
    updater = SimpleNamespace(measures=lambda: measures)
    return SimpleNamespace(layers=layers, observed=lambda: updater)


def report(**entries: float) -> list[float]:
    return [entries.get(name, 0.0) for name in REPORTED]


LOADS = np.array(
    [[[0, 0, 0, 0], tokens] for tokens in ([4, 4, 4, 4], [9, 9, 9, 9], [16, 0, 0, 0], [2, 2, 4, 0])], float
)


def test_load_of_experts_is_in_the_order_of_layers_without_padding_rows() -> None:
    path = "stack.blocks.0.mlp.load.sum"
    metrics = measurements({path: declared((5, -1, 3, 4), ExpertLoad(None).measures())}, {path: LOADS})
    largest, entropy, tokens = (
        metrics[name] for name in ("expert_load_max_over_mean", "expert_load_entropy", "expert_tokens")
    )
    assert largest.layers == (3, 4, 5)
    np.testing.assert_allclose(largest.values, [4, 2, 1])
    assert (largest.overall, largest.text) == (4.0, "4.00x")
    # Shares 1/4, 1/4, 1/2: 1.5 bits of the 2 that four experts can have.
    np.testing.assert_allclose(entropy.values, [0, 0.75, 1], atol=1e-15)
    assert entropy.overall == 0
    assert tokens.of(4) == [2, 2, 4, 0] and tokens.of(2) is None and tokens.text == ""


def test_losses_are_means_over_positions_and_dropped_tokens_are_fractions() -> None:
    measures = RouterReport(("aux", "z"), "dispatch.room").measures()
    observed = np.array([report(aux=8, z=2, chosen=64, routed=4), report(aux=4, z=6, chosen=64, dropped=16, routed=4)])
    metrics = measurements(
        {"stack.blocks.0.mlp.report.sum": declared((0, 1), measures)}, {"stack.blocks.0.mlp.report.sum": observed}
    )
    assert [*metrics] == ["dropped_share", "router_aux_loss", "router_z_loss", "router_not_finite"]
    np.testing.assert_allclose(metrics["router_aux_loss"].values, [2, 1])
    np.testing.assert_allclose(metrics["router_z_loss"].values, [0.5, 1.5])
    np.testing.assert_allclose(metrics["dropped_share"].values, [0, 0.25])
    assert (metrics["dropped_share"].overall, metrics["dropped_share"].text) == (0.125, "12.5%")
    assert "raise dispatch.room" in metrics["dropped_share"].measure.warning


def test_layers_of_other_stacks_and_outside_of_stacks_have_names() -> None:
    spec = declared((0, 1), ExpertLoad(None).measures())
    paths = {"encoder.stack.blocks.0.mlp.load.sum": spec, "stack.blocks.1.mlp.load.sum": spec}
    paths["predictions.1.block.mlp.load.sum"] = declared((), ExpertLoad(None).measures())
    metrics = measurements(paths, {**dict.fromkeys([*paths][:2], LOADS[:2]), [*paths][2]: LOADS[2]})
    values = layer_values([metrics["expert_load_max_over_mean"]])
    assert values["layers"] == [0, 1, "encoder.0", "encoder.1", "predictions.1"]
    assert values["expert_load_max_over_mean"] == [1, 1, 1, 1, 4]
