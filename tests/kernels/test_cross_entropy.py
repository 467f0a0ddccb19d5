"""The chunked, sharded loss against a dense one in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.kernels.cross_entropy import VocabularyShard, loss_and_gradients, token_losses

pytestmark = pytest.mark.smoke

TOKENS, HIDDEN, ROWS, SIZE = 23, 5, 24, 17
"""24 rows of the table, 17 in use: of four shards the last is all padding and the third partly."""


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32),
        "table": rng.normal(size=(ROWS, HIDDEN)).astype(np.float32),
        "labels": rng.integers(0, SIZE, TOKENS).astype(np.int32),
        "weights": (rng.random(TOKENS) < 0.8).astype(np.float32) * rng.random(TOKENS).astype(np.float32),
    }


def dense(inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token losses, d loss/dx and d loss/dtable by their closed forms, in float64."""
    x, table = inputs["x"].astype(np.float64), inputs["table"].astype(np.float64)
    logits = x @ table[:SIZE].T
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -log_p[np.arange(TOKENS), inputs["labels"]]
    dlogits = np.zeros((TOKENS, ROWS))
    dlogits[:, :SIZE] = np.exp(log_p)
    dlogits[np.arange(TOKENS), inputs["labels"]] -= 1
    dlogits *= inputs["weights"][:, None]
    return losses, dlogits @ table, dlogits.T @ x


def test_the_closed_form_is_the_derivative(inputs):
    """The formula that the other tests compare with, against automatic differentiation."""

    def loss(x, table):
        log_p = jax.nn.log_softmax(x @ table[:SIZE].T)
        return -jnp.sum(log_p[jnp.arange(TOKENS), inputs["labels"]] * inputs["weights"])

    with jax.default_matmul_precision("highest"):
        dx, dtable = jax.grad(loss, (0, 1))(inputs["x"], inputs["table"])
    np.testing.assert_allclose(dx, dense(inputs)[1], atol=1e-5)
    np.testing.assert_allclose(dtable, dense(inputs)[2], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 100])
def test_any_chunk_gives_the_dense_loss_and_gradients(inputs, chunk):
    shard = VocabularyShard(0, SIZE, ())
    losses, dx, dtable = dense(inputs)
    actual = loss_and_gradients(**inputs, shard=shard, chunk=chunk)
    np.testing.assert_allclose(actual[0]["loss"], losses @ inputs["weights"], rtol=1e-5)
    np.testing.assert_allclose(actual[1], dx, atol=1e-5)
    np.testing.assert_allclose(actual[2], dtable, atol=1e-5)
    losses_by_name = token_losses(inputs["x"], inputs["table"], inputs["labels"], shard, chunk=chunk)
    np.testing.assert_allclose(losses_by_name["loss"], losses, rtol=1e-5)


def test_a_bias_is_a_column_of_the_table_times_ones(inputs):
    bias = np.linspace(-1, 1, ROWS, dtype=np.float32)
    wide = {"x": np.pad(inputs["x"], ((0, 0), (0, 1)), constant_values=1), "table": np.c_[inputs["table"], bias]}
    losses, dx, dtable = dense(inputs | wide)
    actual = loss_and_gradients(**inputs, shard=VocabularyShard(0, SIZE, ()), chunk=8, bias=bias)
    np.testing.assert_allclose(actual[0]["loss"], losses @ inputs["weights"], rtol=1e-5)
    for gradient, expected in zip(actual[1:], (dx[:, :-1], dtable[:, :-1], dtable[:, -1]), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_padding_does_not_change_the_loss(inputs):
    shard = VocabularyShard(0, SIZE, ())
    padded = inputs | {"table": np.where(np.arange(ROWS)[:, None] < SIZE, inputs["table"], 1e4).astype(np.float32)}
    loss, dx, dtable, _ = loss_and_gradients(**inputs, shard=shard, chunk=8)
    actual = loss_and_gradients(**padded, shard=shard, chunk=8)
    np.testing.assert_array_equal(loss["loss"], actual[0]["loss"])
    np.testing.assert_array_equal(dx, actual[1])
    assert not np.any(dtable[SIZE:])


def test_a_masked_token_has_no_effect_with_any_label(inputs):
    """Label -100 (no label) and a label in the padding, at weight 0."""
    shard = VocabularyShard(0, SIZE, ())
    masked = inputs | {"weights": inputs["weights"].copy()}
    masked["weights"][:2] = 0
    relabelled = masked | {"labels": masked["labels"].copy()}
    relabelled["labels"][:2] = -100, SIZE + 1
    runs = [loss_and_gradients(**arguments, shard=shard, chunk=8) for arguments in (relabelled, masked)]
    for actual, expected in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_vocabulary_equals_unsharded(inputs, size):
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

    def local(x, table, labels, weights):
        shard = VocabularyShard(lax.axis_index("tensor") * table.shape[0], SIZE, ("tensor",))
        loss, dx, dtable, _ = loss_and_gradients(x, table, labels, weights, shard, chunk=8)
        return loss, shard.sum(dx), dtable, token_losses(x, table, labels, shard, chunk=8)

    ins, out = (P(), P("tensor"), P(), P()), (P(), P(), P("tensor"), P())
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))
    loss, dx, dtable, token_losses_by_name = sharded(*inputs.values())
    losses, dense_dx, dense_dtable = dense(inputs)
    np.testing.assert_allclose(loss["loss"], losses @ inputs["weights"], rtol=1e-5)
    np.testing.assert_allclose(dx, dense_dx, atol=1e-5)
    np.testing.assert_allclose(dtable, dense_dtable, atol=1e-5)
    np.testing.assert_allclose(token_losses_by_name["loss"], losses, rtol=1e-5)


def test_bfloat16_keeps_loss_and_table_gradient_in_float32(inputs):
    low = inputs | {name: jnp.asarray(inputs[name], jnp.bfloat16) for name in ("x", "table")}
    rounded = inputs | {name: np.asarray(low[name], np.float32) for name in ("x", "table")}
    sums, dx, dtable, _ = loss_and_gradients(**low, shard=VocabularyShard(0, SIZE, ()), chunk=8)
    loss = sums["loss"]
    losses, dense_dx, dense_dtable = dense(rounded)
    assert (loss.dtype, dx.dtype, dtable.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    # Logits, softmax and loss lose no precision; gradients pass through matmuls of bfloat16 operands.
    np.testing.assert_allclose(loss, losses @ inputs["weights"], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(dx, np.float32), dense_dx, atol=2**-6)
    np.testing.assert_allclose(dtable, dense_dtable, atol=2**-6)


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
