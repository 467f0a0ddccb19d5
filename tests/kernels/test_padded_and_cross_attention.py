"""Full, padded and cross attention of every backend against the formula in float64: results and gradients.

The Pallas kernels are interpreted, and cuDNN's calls are computed by the stand-in of test_attention_backends.py, which
leaves NaN wherever cuDNN is not told to write.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_backends import BACKENDS, GPU, GROUPS, HEADS, SCALE, passes, stand_in

from megajax.kernels.attention import cudnn
from megajax.kernels.attention.attention import PASSES, Mask, Passes, attend

__all__ = ["passes"]  # a fixture


class Case(NamedTuple):
    """Lengths of the texts of rows with `queries` and `keys` positions; none: no padding, no segments."""

    queries: int
    keys: int
    texts: tuple[int, ...] | None = None
    key_texts: tuple[int, ...] | None = None
    causal: bool = False
    window: int | None = None
    size: int = 16

    def mask(self) -> Mask:
        segments = [None, None]
        if self.texts is not None:
            lengths = self.texts if self.key_texts is None else self.key_texts
            pairs = ((self.queries, self.texts), (self.keys, lengths))
            segments = [jnp.asarray(np.arange(n)[None] < np.array(texts)[:, None], jnp.int32) for n, texts in pairs]
        padded = self.texts is not None
        return Mask(jnp.arange(self.queries), jnp.arange(self.keys), *segments, self.window, self.causal, padded)

    def arrays(self, dtype: jnp.dtype = jnp.float32) -> list[jax.Array]:
        """Queries, keys, values, and a gradient of the result, which is not zero on padding either."""
        rng, rows = np.random.default_rng(0), 2 if self.texts is None else len(self.texts)
        shapes = ((self.queries, HEADS), (self.keys, GROUPS), (self.keys, GROUPS), (self.queries, HEADS))
        return [jnp.asarray(rng.normal(size=(rows, *shape, self.size)), dtype) for shape in shapes]


CASES = {
    "full": Case(48, 48),
    "full, odd": Case(37, 37),
    "padded": Case(48, 48, (48, 5, 31)),
    "padded, a row of padding": Case(34, 34, (20, 0, 34)),
    "padded, causal": Case(32, 32, (32, 7, 0), causal=True),
    "padded, causal, a window": Case(32, 32, (32, 20, 0), causal=True, window=4),
    "across": Case(32, 48),
    "across, more queries, odd": Case(67, 18, size=32),
    "across, padded": Case(32, 48, (32, 9, 30), (40, 48, 3)),
    "across, rows of padding": Case(18, 50, (18, 0, 7, 0), (0, 50, 20, 0)),
    "across, one query": Case(2, 34, (1, 2), (30, 1)),
}
DEFAULT = ["full, odd", "across, rows of padding"]


def formula(case: Case, q, k, v, dout) -> list[np.ndarray]:
    """In float64: the result, and the gradients of queries, keys and values."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    share = q.shape[2] // k.shape[2]
    many_k, many_v = (np.repeat(x, share, axis=2) for x in (k, v))
    visible = np.asarray(case.mask().visible())[:, None]
    scores = np.where(visible, np.einsum("bsnh,btnh->bnst", q, many_k) * SCALE, -np.inf)
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(top), 0, top))
    sums = powers.sum(-1, keepdims=True)
    p = powers / np.where(sums == 0, 1, sums)
    dp = np.einsum("bsnu,btnu->bnst", dout, many_v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * SCALE
    dk, dv = np.einsum("bnst,bsnh->btnh", ds, q), np.einsum("bnst,bsnu->btnu", p, dout)
    grouped = [x.reshape(*k.shape[:3], share, -1).sum(3) for x in (dk, dv)]
    return [np.einsum("bnst,btnu->bsnu", p, many_v), np.einsum("bnst,btnh->bsnh", ds, many_k), *grouped]


def computed(kernel: str | Passes, case: Case, *arrays: jax.Array) -> list[jax.Array]:
    """As `formula`, by a backend."""

    @jax.jit
    def run(q, k, v, dout):
        out, pullback = jax.vjp(lambda *qkv: attend(kernel, *qkv, case.mask(), scale=SCALE), q, k, v)
        return out, *pullback(dout)

    with jax.default_matmul_precision("highest"):
        return list(run(*arrays))


@BACKENDS
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in CASES]
)
def test_results_and_gradients_match_the_formula(case: str, name: str, passes: Passes) -> None:
    selected = CASES[case]
    arrays = selected.arrays()
    actual = computed("reference" if name == "reference" else passes, selected, *arrays)
    for value, reference in zip(actual, formula(selected, *arrays), strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5)


@pytest.mark.parametrize(
    "row",
    ["padded first", *(pytest.param(row, marks=pytest.mark.slow) for row in ("padded between", "padded last"))],
)
def test_cudnn_leaves_unsupported_rows_to_the_pallas_kernel(row, monkeypatch) -> None:
    """Rows with padding before the text are right too; which rows there are, only the running program knows."""
    monkeypatch.setitem(cudnn.ELEMENT, jnp.dtype(jnp.float32), "BF16")
    stand_in(monkeypatch)
    ids = {"padded first": [0, 0, 1], "padded between": [1, 0, 1], "padded last": [1, 1, 0]}[row]
    ids = jnp.asarray(np.repeat([ids], 8, axis=1), jnp.int32)
    assert bool(cudnn.Padding.of(ids, 24).fit) == (row == "padded last")
    index = jnp.arange(24)
    mask = Mask(index, index, ids, ids, None, False, True)
    q, k, v, dout = Case(24, 24, (24,)).arrays()

    @partial(jax.jit, static_argnums=0)
    def run(kernel, q, k, v, dout):
        out, pullback = jax.vjp(lambda *qkv: attend(kernel, *qkv, mask, scale=SCALE), q, k, v)
        return out, *pullback(dout)

    with jax.default_matmul_precision("highest"):
        actual, expected = run("cudnn", q, k, v, dout), run("reference", q, k, v, dout)
    for value, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["pallas", "cudnn"])
@pytest.mark.parametrize("case", [name for name, entry in CASES.items() if entry.queries % 2 == 0])
def test_kernels_on_a_gpu_match_the_formula(case: str, name: str) -> None:
    selected = CASES[case]._replace(size=64)
    check_rounded(PASSES[name], selected)


@pytest.mark.slow
@BACKENDS
def test_the_check_for_gpus_passes_for_the_cpu_replacements(name: str, passes: Passes) -> None:
    check_rounded(passes, CASES["across, padded"])


def check_rounded(passes: Passes, case: Case) -> None:
    """In bfloat16."""
    arrays = case.arrays(jnp.bfloat16)
    for value, reference in zip(computed(passes, case, *arrays), formula(case, *arrays), strict=True):
        # bfloat16 keeps 8 bits; the longest path from inputs to a gradient rounds a few times.
        np.testing.assert_allclose(np.asarray(value, np.float32), reference, atol=2**-6 * np.abs(reference).max())
