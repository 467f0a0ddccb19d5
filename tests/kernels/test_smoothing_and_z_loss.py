"""Label smoothing and z-loss in the chunked, sharded loss, against a plain log-softmax and its automatic derivative."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.kernels.cross_entropy import CROSS_ENTROPY, Objective, VocabularyShard, loss_and_gradients, token_losses

TOKENS, HIDDEN, ROWS, SIZE = 23, 5, 24, 17
"""24 rows of the table, 17 in use: of four shards the last is all padding and the third partly."""
OBJECTIVES = [Objective(label_smoothing=0.1), Objective(z_loss=0.03), Objective(label_smoothing=0.3, z_loss=0.01)]
NAMES = ["smoothed", "z", "both"]


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    """Two tokens are masked, one with a label that does not exist and one with a label in the padding."""
    rng = np.random.default_rng(0)
    labels, weights = rng.integers(0, SIZE, TOKENS).astype(np.int32), rng.random(TOKENS).astype(np.float32)
    labels[:2], weights[:2] = (-100, SIZE + 1), 0
    return {
        # Logits are not centred, because log(Z) is not invariant to a shift.
        "x": rng.normal(0.3, 1, size=(TOKENS, HIDDEN)).astype(np.float32),
        "table": rng.normal(0.3, 1, size=(ROWS, HIDDEN)).astype(np.float32),
        "labels": labels,
        "weights": weights,
    }


def plain(objective: Objective, x: Any, table: Any, labels: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    """(what is minimised, losses by name): the target as a distribution over the ids in use."""
    logits = x @ table[:SIZE].T
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


def check(actual: tuple, objective: Objective, inputs: dict[str, np.ndarray]) -> None:
    """(minimised, losses, dx, dtable) by automatic differentiation."""
    with jax.default_matmul_precision("highest"):
        differentiated = jax.value_and_grad(lambda *a: plain(objective, *a), (0, 1), has_aux=True)
        (minimised, losses), gradients = differentiated(*inputs.values())
    np.testing.assert_allclose(actual[0], minimised, rtol=1e-5)
    assert dict(actual[1]).keys() == losses.keys() == set(objective.names)
    for name, expected in losses.items():
        np.testing.assert_allclose(actual[1][name], expected, rtol=1e-5, err_msg=name)
    for value, reference in zip(actual[2:], gradients, strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5)
    assert not np.any(actual[3][SIZE:])


@pytest.mark.parametrize(
    ("objective", "chunk"),
    [*((objective, 5) for objective in OBJECTIVES), (OBJECTIVES[2], TOKENS)],
    ids=[*(f"{name}-5" for name in NAMES), f"both-{TOKENS}"],
)
def test_any_chunk_gives_the_plain_loss_and_gradients(inputs, objective, chunk):
    shard = VocabularyShard(0, SIZE, ())
    sums, dx, dtable, _ = loss_and_gradients(**inputs, shard=shard, objective=objective, chunk=chunk)
    check((objective.minimised(sums), sums, dx, dtable), objective, inputs)


@pytest.mark.parametrize(
    "objective", [*(pytest.param(slow, marks=pytest.mark.slow) for slow in OBJECTIVES[:2]), OBJECTIVES[2]], ids=NAMES
)
def test_sharded_vocabulary_equals_unsharded(inputs, objective):
    """The mean of logits is over all ids, not over a device's, as Megatron-LM's is."""
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def local(x, table, labels, weights):
        shard = VocabularyShard(lax.axis_index("tensor") * table.shape[0], SIZE, ("tensor",))
        sums, dx, dtable, _ = loss_and_gradients(x, table, labels, weights, shard, objective, chunk=8)
        losses = token_losses(x, table, labels, shard, objective, chunk=8)
        return sums, shard.sum(dx), dtable, losses

    ins, out = (P(), P("tensor"), P(), P()), (P(), P(), P("tensor"), P())
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))
    sums, dx, dtable, losses = sharded(*inputs.values())
    check((objective.minimised(sums), sums, dx, dtable), objective, inputs)
    for name, total in sums.items():
        np.testing.assert_allclose(losses[name][2:] @ inputs["weights"][2:], total, rtol=1e-5, err_msg=name)


def test_the_minimum_is_at_the_target_distribution():
    """The gradient is 0 where the softmax is 1 - s for the label and s / (K - 1) for each other id."""
    target = np.full(SIZE, 0.2 / (SIZE - 1))
    target[3] = 0.8
    table = np.zeros((ROWS, 1), np.float32)
    table[:SIZE, 0] = np.log(target)
    arguments = np.ones((1, 1), np.float32), table, np.array([3], np.int32), np.ones(1, np.float32)
    shard = VocabularyShard(0, SIZE, ())
    _, dx, dtable, _ = loss_and_gradients(*arguments, shard, Objective(label_smoothing=0.2), chunk=1)
    np.testing.assert_allclose(dx, 0, atol=1e-6)
    np.testing.assert_allclose(dtable, 0, atol=1e-6)


def test_the_default_objective_computes_only_the_cross_entropy():
    assert replace(OBJECTIVES[2], label_smoothing=0.0, z_loss=0.0) == CROSS_ENTROPY
    assert CROSS_ENTROPY.names == ("loss",)
    losses = {"loss": np.float32(3)}
    assert CROSS_ENTROPY.minimised(losses) is losses["loss"]
