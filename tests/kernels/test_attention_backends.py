"""Every attention backend against the formula in float64: result, log-sum-exp, gradients, sinks, isolated documents.

The Pallas kernels run in interpret mode; cudnn_in_jax.py computes cuDNN's calls, with NaN where cuDNN need not write.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_in_jax import stand_in

from megajax.kernels.attention import cudnn
from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.attention import (
    PASSES,
    Mask,
    Passes,
    attend,
    local_device,
    passes_of,
    reference_attention,
)
from megajax.kernels.attention.pallas import AttentionBlocks

HEADS, GROUPS, SCALE = 2, 1, 0.3
SMALL = {"interpret": True, "blocks": AttentionBlocks(16, 16, 4)}
PALLAS = Passes(partial(pallas_attention.forward, **SMALL), partial(pallas_attention.backward, **SMALL))
GPU = local_device().capability is not None if jax.default_backend() == "gpu" else False
ON_A_GPU = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
NAMES = ("reference", "pallas", "cudnn", "cudnn_mask")
BACKENDS = pytest.mark.parametrize("name", NAMES)
SLOW = pytest.mark.slow


@pytest.fixture
def passes(name: str, monkeypatch: pytest.MonkeyPatch) -> Passes:
    # Float32 here: the formula is compared, not the rounding.
    stand_in(monkeypatch)
    return PALLAS if name == "pallas" else PASSES[name]


def documents(length: int) -> jax.Array:
    """Of lengths 5, 20 and the rest, and of 1, 1 and the rest."""
    cuts = np.array([[5, 25], [1, 2]])
    return jnp.asarray((np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1), jnp.int32)


class Case(NamedTuple):
    """Rows of `queries` and `keys` positions."""

    queries: int
    keys: int
    texts: tuple[int, ...] | None = None
    """Lengths of the texts of padded rows; None: no padding."""
    key_texts: tuple[int, ...] | None = None
    """Those of the keys where they differ."""
    causal: bool = False
    window: int | None = None
    size: int = 16
    wide: int | None = None
    """Size of a value head, if it differs."""
    documents: bool = False
    cap: float | None = None
    """A soft cap of scores."""

    def mask(self) -> Mask:
        segments = [documents(self.queries)] * 2 if self.documents else [None, None]
        if self.texts is not None:
            lengths = self.texts if self.key_texts is None else self.key_texts
            pairs = ((self.queries, self.texts), (self.keys, lengths))
            segments = [jnp.asarray(np.arange(n)[None] < np.array(texts)[:, None], jnp.int32) for n, texts in pairs]
        index = jnp.arange(self.queries), jnp.arange(self.keys)
        return Mask(*index, *segments, self.window, self.causal, self.texts is not None)

    def arrays(self, dtype: Any = jnp.float32) -> list[jax.Array]:
        """Queries, keys, values, and a gradient of the result, which is not zero on padding either."""
        rng, rows = np.random.default_rng(0), 2 if self.texts is None else len(self.texts)
        q, k = (self.queries, HEADS), (self.keys, GROUPS)
        sizes = [self.size, self.size, *[self.wide or self.size] * 2]
        shapes = [(rows, *shape, size) for shape, size in zip((q, k, k, q), sizes, strict=True)]
        return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


CAUSAL = Case(48, 48, causal=True)
CASES = {
    "documents, a window, values of another size": CAUSAL._replace(size=32, wide=16, documents=True, window=3),
    "full, odd": Case(37, 37),
    "across, rows of padding": Case(18, 50, (18, 0, 7, 0), (0, 50, 20, 0)),
    "documents": CAUSAL._replace(documents=True),
    "documents, no multiple of a block": Case(34, 34, causal=True, documents=True),
    "padded, a row of padding": Case(34, 34, (20, 0, 34)),
    "padded, causal, a window": Case(32, 32, (32, 20, 0), causal=True, window=4),
    "across, more queries, odd": Case(67, 18, size=32),
    "across, one query": Case(2, 34, (1, 2), (30, 1)),
    "a soft cap": CAUSAL._replace(window=9, cap=0.5),
}
PAIRS = [
    *((case, name) for case in [*CASES][:3] for name in NAMES),
    *(("a soft cap", name) for name in ("reference", "pallas")),
    # The kernels take what decides which scores exist from different functions.
    *(pytest.param(case, name, marks=SLOW) for case in [*CASES][3:-1] for name in ("pallas", "cudnn")),
]
DOCUMENTS = CASES["documents"]


def formula(mask: Mask, q, k, v, dout, cap: float | None = None) -> list[np.ndarray]:
    """In float64: the result, its log-sum-exp, and the gradients of queries, keys and values."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    share = q.shape[2] // k.shape[2]
    many_k, many_v = (np.repeat(x, share, axis=2) for x in (k, v))
    visible = np.asarray(mask.visible())[:, None]
    scores = np.einsum("bsnh,btnh->bnst", q, many_k) * SCALE
    capped = scores if cap is None else cap * np.tanh(scores / cap)
    slope = 1 if cap is None else 1 - (capped / cap) ** 2
    scores = np.where(visible, capped, -np.inf)
    top = np.where(np.isinf(top := scores.max(-1, keepdims=True)), 0, top)
    powers = np.exp(scores - top)
    sums = powers.sum(-1, keepdims=True)
    p = powers / np.where(sums == 0, 1, sums)
    dp = np.einsum("bsnu,btnu->bnst", dout, many_v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope * SCALE
    dk, dv = np.einsum("bnst,bsnh->btnh", ds, q), np.einsum("bnst,bsnu->btnu", p, dout)
    grouped = [x.reshape(*k.shape[:3], share, -1).sum(3) for x in (dk, dv)]
    with np.errstate(divide="ignore"):
        lse = (np.log(sums) + top)[..., 0]
    return [np.einsum("bnst,btnu->bsnu", p, many_v), lse, np.einsum("bnst,btnh->bsnh", ds, many_k), *grouped]


def computed(passes: Passes, mask: Mask, *arrays: jax.Array) -> list[jax.Array]:
    """As `formula`, by the functions of a backend."""

    @jax.jit
    def run(q, k, v, dout):
        out, lse = passes.forward(q, k, v, mask, scale=SCALE)
        return out, lse, *passes.backward(q, k, v, mask, out, lse, dout, scale=SCALE)

    with jax.default_matmul_precision("highest"):
        return list(run(*arrays))


def differentiated(mask: Mask, cap: float | None, *arrays: jax.Array) -> list[jax.Array]:
    """As `formula` without the log-sum-exp, by the reference and its automatic derivative."""

    @jax.jit
    def run(q, k, v, dout):
        out, pullback = jax.vjp(lambda *qkv: reference_attention(*qkv, mask, scale=SCALE, cap=cap), q, k, v)
        return out, *pullback(dout)

    with jax.default_matmul_precision("highest"):
        return list(run(*arrays))


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_results_and_gradients_match_the_formula(case: str, name: str, passes: Passes) -> None:
    arrays, mask, cap = CASES[case].arrays(), CASES[case].mask(), CASES[case].cap
    expected = formula(mask, *arrays, cap)
    for actual, reference in zip(computed(passes.with_arguments(cap=cap), mask, *arrays), expected, strict=True):
        assert actual.shape == reference.shape
        np.testing.assert_allclose(actual, reference, atol=1e-5)
    if name == "reference":
        del expected[1]
        for actual, reference in zip(differentiated(mask, cap, *arrays), expected, strict=True):
            np.testing.assert_allclose(actual, reference, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "masked"), [("cudnn", True), *(pytest.param(name, False, marks=SLOW) for name in ("pallas", "cudnn_mask"))]
)
def test_a_sink_and_its_gradient_are_exact(masked: bool, name: str, passes: Passes) -> None:
    """Fused backends have no sinks: the result is scaled, and the backward kernel receives the increased sum."""
    case = Case(32, 32, causal=True, documents=masked)
    *qkv, dout = case.arrays()
    sink = jnp.asarray([-2.0, 3.0])

    def total(attention, *args):
        *qkv, sink = args
        return jnp.sum(attention(*qkv, case.mask(), scale=SCALE, sink=sink) * dout)

    ways = [partial(total, way) for way in (partial(attend, passes), reference_attention)]
    both = jax.jit(lambda *args: [jax.value_and_grad(way, (0, 1, 2, 3))(*args) for way in ways])
    with jax.default_matmul_precision("highest"):
        actual, expected = both(*qkv, sink)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for value, reference in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5 * max(1, np.abs(reference).max()))


def check_isolation(passes: Passes, arrays: list[jax.Array], mask: Mask, *, rounded: int = 0) -> None:
    """Another document 1 in each row leaves all bits of the others' results and gradients; of the last `rounded` of
    them nearly all, where a kernel adds in the order in which its threads come."""
    inside = np.asarray(mask.query_segments == 1)
    changed = [jnp.where(inside[..., None, None], x + 1, x) for x in arrays]
    first, second = (computed(passes, mask, *inputs) for inputs in (arrays, changed))
    for place, pair in enumerate(zip(first, second, strict=True)):
        value, reference = (np.asarray(x, np.float32) for x in pair)
        if place == 1:  # The log-sum-exp has heads before positions.
            value, reference = value.transpose(0, 2, 1), reference.transpose(0, 2, 1)
        if place < len(first) - rounded:
            np.testing.assert_array_equal(value[~inside], reference[~inside])
        np.testing.assert_allclose(value[~inside], reference[~inside], atol=2**-8 * np.abs(value).max())
        assert np.abs(value - reference)[inside].max() > 2**-6 * np.abs(value).max()


@BACKENDS
def test_documents_are_isolated_bitwise(name: str, passes: Passes) -> None:
    case = DOCUMENTS._replace(window=4)
    check_isolation(passes, case.arrays(), case.mask())


@pytest.mark.gpu
@ON_A_GPU
@BACKENDS
def test_documents_are_isolated_bitwise_on_a_gpu(name: str) -> None:
    segments = jnp.asarray((np.arange(512)[None, :, None] >= np.array([[100, 300], [7, 256]])[:, None]).sum(-1))
    case, index = Case(512, 512, size=64), jnp.arange(512)
    # cuDNN's backward kernel accumulates with atomics, so two runs on the same inputs need not agree to the bit.
    rounded = 3 if name.startswith("cudnn") else 0
    check_isolation(PASSES[name], case.arrays(jnp.bfloat16), Mask(index, index, segments, segments), rounded=rounded)


def check_rounded(passes: Passes, case: Case) -> None:
    """In bfloat16."""
    arrays, mask = case.arrays(jnp.bfloat16), case.mask()
    pairs = zip(computed(passes, mask, *arrays), formula(mask, *arrays), strict=True)
    for place, (value, reference) in enumerate(pairs):
        # bfloat16 keeps 8 bits; the longest path from inputs to a gradient rounds a few times.
        finite = np.isfinite(reference)
        bits = 8 if place == 1 else 6
        np.testing.assert_array_equal(np.isfinite(np.asarray(value, np.float32)), finite)
        bound = 2.0**-bits * np.abs(reference[finite]).max()
        np.testing.assert_allclose(np.asarray(value, np.float32)[finite], reference[finite], atol=bound)


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize("name", ["pallas", "cudnn", "cudnn_mask"])
@pytest.mark.parametrize(
    "case", [name for name, case in CASES.items() if case.queries % 2 == 0 and case.cap is None and "block" not in name]
)
def test_kernels_on_a_gpu_match_the_formula(case: str, name: str) -> None:
    selected = CASES[case]
    if selected.texts is None and selected.queries == selected.keys:
        selected = selected._replace(queries=256, keys=256)
    check_rounded(PASSES[name], selected if selected.wide else selected._replace(size=64))


@pytest.mark.slow
def test_rows_with_too_many_documents_use_the_pallas_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do rows with a document in two pieces: only the running program knows which case it is."""
    monkeypatch.setattr(cudnn, "DOCUMENTS", 3)
    stand_in(monkeypatch, pallas=False)
    case = Case(32, 32, causal=True, documents=True)
    arrays, index, three = case.arrays()[:3], jnp.arange(32), documents(32)
    run = jax.jit(lambda q, k, v, ids: cudnn.forward(q, k, v, Mask(index, index, ids, ids), scale=SCALE)[0])
    for segments, fits in ((three, True), (three.at[0, 30:].set(3), False), (three.at[0, 28:].set(0), False)):
        assert np.isfinite(run(*arrays, segments)).all() == bool(cudnn.Documents.of(segments, 3).fit) == fits


@pytest.mark.parametrize("row", ["padded first", pytest.param("padded between", marks=SLOW)])
def test_cudnn_leaves_unsupported_rows_to_the_pallas_kernel(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with padding before the text are right too."""
    stand_in(monkeypatch)
    ids = jnp.asarray(np.repeat([{"padded first": [0, 0, 1], "padded between": [1, 0, 1]}[row]], 8, axis=1), jnp.int32)
    assert not cudnn.Padding.of(ids, 24).fit
    index, arrays = jnp.arange(24), Case(24, 24, (24,)).arrays()
    mask = Mask(index, index, ids, ids, None, False, True)
    for value, reference in zip(computed(PASSES["cudnn"], mask, *arrays), formula(mask, *arrays), strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5)


@pytest.mark.parametrize("feature", ["bias", "dropout"])
@pytest.mark.parametrize("name", ["cudnn", "cudnn_mask", "pallas"])
def test_unsupported_features_of_fused_backends_are_refused(name: str, feature: str) -> None:
    case = Case(32, 32, causal=True)
    q, k, v, _ = case.arrays()
    with pytest.raises(ValueError, match="kernel=reference"):
        attend(name, q, k, v, case.mask(), scale=SCALE, **{feature: jnp.zeros((HEADS, 32, 32))})
    if not PASSES[name].caps:
        with pytest.raises(ValueError, match=f"{name} attention has no soft cap of scores"):
            passes_of(name, 1.5)
