"""The chunked, sharded loss, with label smoothing, z-loss and a soft cap, against a plain log-softmax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.kernels.cross_entropy import (
    CROSS_ENTROPY,
    Objective,
    VocabularyShard,
    loss_and_gradients,
    token_losses,
    token_scores,
)

TOKENS, HIDDEN, ROWS, SIZE = 23, 5, 24, 17
"""24 rows of the table, 17 in use: of four shards the last is all padding and the third partly."""
WHOLE = VocabularyShard(0, SIZE, ())
OBJECTIVES = {
    "plain": CROSS_ENTROPY,
    "smoothed": Objective(label_smoothing=0.1),
    "both": Objective(label_smoothing=0.3, z_loss=0.01),
    "all": Objective(label_smoothing=0.1, z_loss=0.01, logit_cap=1.5),
}


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    """Some tokens are masked, one with a label that does not exist and one with a label in the padding."""
    rng = np.random.default_rng(0)
    labels, weights = rng.integers(0, SIZE, TOKENS).astype(np.int32), rng.random(TOKENS).astype(np.float32)
    labels[:2], weights[:5] = (-100, SIZE + 1), 0
    return {
        # Logits are not centred, because log(Z) is not invariant to a shift.
        "x": rng.normal(0.3, 1, size=(TOKENS, HIDDEN)).astype(np.float32),
        "table": rng.normal(0.3, 1, size=(ROWS, HIDDEN)).astype(np.float32),
        "targets": labels,
        "weights": weights,
    }


def plain(objective: Objective, x: Any, table: Any, labels: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    """(what is minimised, losses by name): the target as a distribution over the ids in use."""
    logits = x @ table[:SIZE].T
    if objective.logit_cap is not None:
        logits = objective.logit_cap * jnp.tanh(logits / objective.logit_cap)
    log_p = jax.nn.log_softmax(logits)
    rest = objective.label_smoothing / (SIZE - 1)
    hit = labels[:, None] == np.arange(SIZE)
    target = jnp.where(hit, 1 - objective.label_smoothing, rest)
    losses = {"loss": -jnp.sum(weights[:, None] * hit * log_p)}
    minimised = smoothed = -jnp.sum(weights[:, None] * target * log_p)
    if objective.label_smoothing:
        losses["smoothed_loss"] = smoothed
    if objective.z_loss:
        losses["z_loss"] = objective.z_loss * jnp.sum(weights * jax.nn.logsumexp(logits, -1) ** 2)
        minimised = smoothed + losses["z_loss"]
    return minimised, losses


def check(
    actual: tuple,
    objective: Objective,
    inputs: dict[str, np.ndarray],
    token_values: dict[str, Any],
    within: float = 1e-5,
) -> None:
    """Sums, dx and dtable by automatic differentiation; losses of tokens add up to the sums."""
    sums, *gradients = actual
    with jax.default_matmul_precision("highest"):
        differentiated = jax.value_and_grad(lambda *a: plain(objective, *a), (0, 1), has_aux=True)
        (minimised, losses), expected = differentiated(*inputs.values())
    np.testing.assert_allclose(objective.minimised(sums), minimised, rtol=1e-5)
    assert dict(sums).keys() == losses.keys() == set(objective.names)
    for name, loss in losses.items():
        np.testing.assert_allclose(sums[name], loss, rtol=1e-5, err_msg=name)
        total = np.asarray(token_values[name])[5:] @ inputs["weights"][5:]
        np.testing.assert_allclose(total, loss, rtol=1e-5, err_msg=name)
    for value, reference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(np.asarray(value, np.float32), reference, atol=within)
    assert not np.any(gradients[1][SIZE:])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "chunk"),
    [("plain", 1), ("plain", 100), ("smoothed", 5), ("both", TOKENS), ("all", 5)],
)
def test_any_chunk_gives_the_plain_loss_and_gradients(inputs, name, chunk):
    objective = OBJECTIVES[name]
    sums, dx, dtable, *_ = loss_and_gradients(**inputs, shard=WHOLE, objective=objective, chunk=chunk)
    arrays = inputs["x"], inputs["table"], inputs["targets"]
    losses = token_losses(*arrays, WHOLE, objective, chunk=chunk)
    check((sums, dx, dtable), objective, inputs, losses)
    scores, _ = token_scores(*arrays, WHOLE, chunk=chunk, cap=objective.logit_cap)
    np.testing.assert_allclose(-scores[5:], losses["loss"][5:], atol=1e-5)


def test_a_bias_is_a_column_of_the_table_times_ones(inputs):
    bias = np.linspace(-1, 1, ROWS, dtype=np.float32)
    wide = {"x": np.pad(inputs["x"], ((0, 0), (0, 1)), constant_values=1), "table": np.c_[inputs["table"], bias]}
    arguments = {"shard": WHOLE, "chunk": 8}
    sums, dx, dtable, dbias, _ = loss_and_gradients(**inputs, **arguments, bias=bias)
    expected, wide_dx, wide_dtable, *_ = loss_and_gradients(**inputs | wide, **arguments)
    np.testing.assert_allclose(sums["loss"], expected["loss"], rtol=1e-5)
    for gradient, reference in zip(
        (dx, dtable, dbias), (wide_dx[:, :-1], wide_dtable[:, :-1], wide_dtable[:, -1]), strict=True
    ):
        np.testing.assert_allclose(gradient, reference, atol=1e-5)


@pytest.mark.parametrize(("name", "size"), [("plain", 2), ("both", 4)])
def test_sharded_vocabulary_equals_unsharded(inputs, name, size):
    """The mean of logits is over all ids, not over a device's, as Megatron-LM's is."""
    objective = OBJECTIVES[name]
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

    def local(x, table, labels, weights):
        shard = VocabularyShard(lax.axis_index("tensor") * table.shape[0], SIZE, ("tensor",))
        sums, dx, dtable, *_ = loss_and_gradients(x, table, labels, weights, shard, objective, chunk=8)
        return (sums, shard.sum(dx), dtable), token_losses(x, table, labels, shard, objective, chunk=8)

    ins, out = (P(), P("tensor"), P(), P()), ((P(), P(), P("tensor")), P())
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))
    actual, losses = sharded(*inputs.values())
    check(actual, objective, inputs, losses)


def test_bfloat16_keeps_loss_and_table_gradient_in_float32(inputs):
    low = inputs | {name: jnp.asarray(inputs[name], jnp.bfloat16) for name in ("x", "table")}
    rounded = inputs | {name: np.asarray(low[name], np.float32) for name in ("x", "table")}
    sums, dx, dtable, *_ = loss_and_gradients(**low, shard=WHOLE, chunk=8)
    assert (sums["loss"].dtype, dx.dtype, dtable.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    losses = token_losses(low["x"], low["table"], low["targets"], WHOLE, chunk=8)
    # Logits, softmax and loss lose no precision; gradients pass through matmuls of bfloat16 operands.
    check((sums, dx, dtable), CROSS_ENTROPY, rounded, losses, within=2**-6)


def test_float32_logits_exist_for_one_chunk_only():
    tokens, rows, chunk = 512, 1024, 32
    shapes = [((tokens, 8), jnp.bfloat16), ((rows, 8), jnp.bfloat16), ((tokens,), jnp.int32), ((tokens,), jnp.float32)]
    arguments = [jax.ShapeDtypeStruct(*shape_and_dtype) for shape_and_dtype in shapes]
    shard = VocabularyShard(0, rows, ())
    for function, count in ((loss_and_gradients, 4), (token_losses, 3)):
        call = jax.jit(lambda *a, function=function: function(*a, shard, chunk=chunk))
        memory = call.lower(*arguments[:count]).compile().memory_analysis()
        if not memory.temp_size_in_bytes:
            pytest.skip("this backend does not report temporary memory")
        assert memory.temp_size_in_bytes < tokens * rows * 4 / 3


def test_weights_that_depend_on_log_p_give_the_gradient_of_any_loss_of_it(inputs):
    """The loss sum(f (g exp(-log p) - 0.7 entropy)) of facts f and g [T]; chunks of 5 tokens."""
    inputs = inputs | {"targets": np.clip(inputs["targets"], 0, SIZE - 1)}
    facts = np.stack([inputs["weights"], np.full(TOKENS, 0.5, np.float32)], axis=1)

    def weigh(log_p, facts):
        return facts[:, 0] * facts[:, 1] * jnp.exp(-log_p)

    def loss(x, table):
        logits = (x @ table.T)[:, :SIZE]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), inputs["targets"][:, None], axis=1)[:, 0]
        entropy = jnp.sum(jax.scipy.special.entr(jax.nn.softmax(logits)), axis=-1)
        total = jnp.sum(facts[:, 0] * (facts[:, 1] * jnp.exp(-log_p) - 0.7 * entropy))
        return total, jnp.stack([log_p, entropy], axis=-1)

    arrays = inputs["x"], inputs["table"]
    (expected_dx, expected_dtable), expected = jax.grad(loss, (0, 1), has_aux=True)(*arrays)
    objective = Objective(weigh=weigh, entropy_weight=0.7)
    _, dx, dtable, _, scores = loss_and_gradients(
        **inputs | {"weights": facts}, shard=WHOLE, objective=objective, chunk=5
    )
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dtable, expected_dtable, rtol=1e-4, atol=1e-4)
