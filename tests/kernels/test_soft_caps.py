"""Soft caps of scores: the kernels of attention that have them against a plain formula, and the table that says which.

Those of a paged cache are in test_paged.py, those of logits in test_cross_entropy.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.attention import PASSES, Passes, attend, passes_of, reference_attention
from megajax.kernels.attention.capability import choose
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.pallas import AttentionBlocks
from megajax.kernels.attention.request import KernelDevice, KernelRequest

CAP, SCALE, LENGTH, HEADS, GROUPS, SIZE = 1.5, 0.7, 40, 4, 2, 16
INTERPRETED = {"interpret": True, "blocks": AttentionBlocks(16, 16, 4), "cap": CAP}
PALLAS = Passes(partial(pallas_attention.forward, **INTERPRETED), partial(pallas_attention.backward, **INTERPRETED))


def formula(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """tanh(s / cap) cap before the mask, written out."""
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    scores = CAP * jnp.tanh(jnp.einsum("bsnh,btnh->bnst", q, k) * SCALE / CAP)
    weights = jax.nn.softmax(jnp.where(mask.visible()[:, None], scores, -jnp.inf))
    return jnp.einsum("bnst,btnh->bsnh", weights, v)


@pytest.mark.parametrize("kernel", ["reference", "passes of the reference", "pallas"])
def test_capped_attention_and_its_gradients_are_the_formula(kernel: str) -> None:
    draw, index = np.random.default_rng(0).standard_normal, jnp.arange(LENGTH)
    arrays = [jnp.asarray(2 * draw((2, LENGTH, n, SIZE)), jnp.float32) for n in (HEADS, GROUPS, GROUPS)]
    mask = Mask(index, index, None, None, 9)
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


def test_the_table_says_which_kernels_have_caps() -> None:
    h100 = KernelDevice(name="H100", capability=(9, 0), cudnn=(9, 14, 1))
    choice = choose("auto", KernelRequest(dtype="bfloat16", key_dim=256, length=4096, cap=True), h100)
    assert choice.kernel == "pallas" and choice.reasons == ("cudnn: has no soft cap of scores",)
    for name, passes in PASSES.items():
        if not passes.caps:
            with pytest.raises(ValueError, match=f"{name} attention has no soft cap of scores"):
                passes_of(name, CAP)
