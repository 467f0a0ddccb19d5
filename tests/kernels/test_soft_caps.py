"""Soft caps of scores and logits: every kernel that has them against plain formulas, and the table that says which."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.attention import PASSES, Passes, attend, passes_of, reference_attention
from megajax.kernels.attention.capability import Device, Request, choose
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.pallas import Blocks
from megajax.kernels.cross_entropy import Objective, VocabularyShard, loss_and_gradients, token_losses, token_scores
from megajax.kernels.paged.attention import KERNELS
from megajax.kernels.paged.pools import PagedQueries, Pools
from megajax.kernels.paged.triton import paged_attention

CAP, SCALE, LENGTH, HEADS, GROUPS, SIZE = 1.5, 0.7, 40, 4, 2, 16
INTERPRETED = {"interpret": True, "blocks": Blocks(16, 16, 4), "cap": CAP}
PALLAS = Passes(partial(pallas_attention.forward, **INTERPRETED), partial(pallas_attention.backward, **INTERPRETED))


def draw(*shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(2 * random.standard_normal(shape), jnp.float32) for shape in shapes]


def rows() -> tuple[list[jax.Array], Mask]:
    keyed = (2, LENGTH, GROUPS, SIZE)
    index = jnp.arange(LENGTH)
    return draw((2, LENGTH, HEADS, SIZE), keyed, keyed), Mask(index, index, None, None, 9)


def formula(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """tanh(s / cap) cap before the mask, written out."""
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    scores = CAP * jnp.tanh(jnp.einsum("bsnh,btnh->bnst", q, k) * SCALE / CAP)
    weights = jax.nn.softmax(jnp.where(mask.visible()[:, None], scores, -jnp.inf))
    return jnp.einsum("bnst,btnh->bsnh", weights, v)


@pytest.mark.parametrize("kernel", ["reference", "passes of the reference", "pallas"])
def test_capped_attention_and_its_gradients_are_the_formula(kernel: str) -> None:
    arrays, mask = rows()
    backends: dict[str, Any] = {
        "reference": "reference",
        "passes of the reference": passes_of("reference", CAP),
        "pallas": PALLAS,
    }
    cap = CAP if kernel == "reference" else None

    def total(attention: Any, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(*arrays)
        return jnp.sum(jnp.sin(out)), out

    def run(attention: Any) -> Any:
        return jax.jit(jax.value_and_grad(partial(total, attention), (0, 1, 2), has_aux=True))(*arrays)

    (_, expected), gradients = run(lambda *qkv: formula(*qkv, mask))
    (_, actual), ours = run(lambda *qkv: attend(backends[kernel], *qkv, mask, scale=SCALE, cap=cap))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for mine, theirs in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert np.abs(reference_attention(*arrays, mask, scale=SCALE) - expected).max() > 0.1


@pytest.mark.parametrize("kernel", ["reference", "tiled", "triton"])
def test_capped_attention_to_a_paged_cache(kernel: Any) -> None:
    (q, k, v), mask = rows()
    table = jnp.asarray(np.random.default_rng(1).permutation(2 * LENGTH // 4).reshape(2, -1), jnp.int32)
    pools = Pools(
        *(jnp.zeros((20, 4, GROUPS, SIZE)).at[table].set(x.reshape(2, -1, 4, GROUPS, SIZE)) for x in (k, v)), SIZE
    )
    positions = jnp.asarray([[37, 38], [0, 1]], jnp.int32)
    at = positions[..., None, None]
    queries = PagedQueries(jnp.take_along_axis(q, at, axis=1), table, positions, SCALE, mask.window, cap=CAP)
    attention = partial(paged_attention, interpret=True) if kernel == "triton" else KERNELS[kernel]
    expected = jnp.take_along_axis(formula(q, k, v, mask), at, axis=1)
    np.testing.assert_allclose(attention(queries, pools), expected, atol=1e-5)


@pytest.mark.parametrize("objective", [Objective(logit_cap=CAP), Objective(0.1, 0.01, CAP)])
def test_capped_logits_have_the_loss_and_the_gradients_of_the_formula(objective: Objective) -> None:
    x, table = draw((12, 8), (20, 8))
    labels, size = jnp.arange(12) % 17, 17
    shard, weights = VocabularyShard(0, size, ()), jnp.linspace(0, 1, 12)

    def plain(x: jax.Array, table: jax.Array) -> jax.Array:
        logits = CAP * jnp.tanh(x @ table[:size].T / CAP)
        target = (1 - objective.label_smoothing) * jax.nn.one_hot(labels, size)
        target = target + objective.label_smoothing * (1 - jax.nn.one_hot(labels, size)) / (size - 1)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum(weights * (log_z - jnp.sum(target * logits, -1) + objective.z_loss * log_z**2))

    expected, (dx, dtable) = jax.value_and_grad(plain, (0, 1))(x, table)
    losses, our_dx, our_dtable, *_ = loss_and_gradients(x, table, labels, weights, shard, objective, chunk=5)
    np.testing.assert_allclose(objective.minimised(losses), expected, rtol=1e-5)
    np.testing.assert_allclose(our_dx, dx, atol=1e-5)
    np.testing.assert_allclose(our_dtable, dtable, atol=1e-5)
    scores, _ = token_scores(x, table, labels, shard, chunk=5, cap=CAP)
    plain_losses = token_losses(x, table, labels, shard, objective, chunk=5)["loss"]
    np.testing.assert_allclose(-scores, plain_losses, atol=1e-5)


def test_the_table_says_which_kernels_have_caps() -> None:
    h100 = Device(name="H100", capability=(9, 0), cudnn=(9, 14, 1))
    choice = choose("auto", Request(dtype="bfloat16", key_dim=256, length=4096, cap=True), h100)
    assert choice.kernel == "pallas" and choice.reasons == ("cudnn: has no soft cap of scores",)
    for name, passes in PASSES.items():
        if not passes.caps:
            with pytest.raises(ValueError, match=f"{name} attention has no soft cap of scores"):
                passes_of(name, CAP)
