"""Every attention backend against the plain formula: result, log-sum-exp, gradients, sinks, and documents kept apart.

The Pallas kernels run in interpret mode here. In place of cuDNN's custom calls stand functions in numpy that read the
operands and the configuration of the calls as cuDNN does: what is tested is what it is handed.
"""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.attention import cudnn
from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.attention import PASSES, Mask, Passes, attend, local_device, reference_attention
from megajax.kernels.attention.pallas import Blocks

ROWS, HEADS, GROUPS = 2, 2, 1
SCALE = 0.3
SMALL = {"interpret": True, "blocks": Blocks(16, 16, 4)}
PALLAS = Passes(partial(pallas_attention.forward, **SMALL), partial(pallas_attention.backward, **SMALL))
GPU = local_device().capability is not None if jax.default_backend() == "gpu" else False


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """cuDNN's kernels in numpy, and the Pallas kernels interpreted; gives the targets called."""
    calls: list[str] = []

    def ffi_call(target: str, shapes: Any, *, legacy_backend_config: str, **_: Any) -> Any:
        calls.append(target)
        config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
        return lambda *operands: jax.pure_callback(partial(custom_call, target, config), shapes, *operands)

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    monkeypatch.setattr(pallas_attention, "forward", PALLAS.forward)
    monkeypatch.setattr(pallas_attention, "backward", PALLAS.backward)
    return calls


def custom_call(target: str, config: dict, *operands: Any) -> list[np.ndarray]:
    """cuDNN's result of a call: piece by piece of the flat arrays, with the given lengths and offsets.

    What no piece covers is NaN: cuDNN need not write there.
    """
    backward, biased, causal = "Backward" in target, "Bias" in target, "CAUSAL" in config["mask_type"]
    rest = [np.asarray(x, np.int64 if x.dtype == jnp.int32 else np.float64) for x in operands]
    q, k, v = rest[:3]
    rest = rest[3:]
    statistics, dout = (rest.pop(0), rest.pop(0)) if backward else (None, None)
    bias = rest.pop(0) if biased else None
    if backward:
        rest.pop(0)  # The output, of which the kernel needs only its product with the gradient.
        saved_statistics = np.asarray(operands[5 + biased], np.float64)
        delta = (saved_statistics * dout).sum(-1)
    most, (batch, length, heads, _), key_length = config["max_seg_per_batch"], q.shape, k.shape[1]
    if most == 1:
        lengths, key_lengths = rest if "PADDING" in config["mask_type"] else np.tile([[length], [key_length]], batch)
        assert (lengths > 0).all() and (key_lengths > 0).all(), "cuDNN before 9.25 makes NaNs of rows without keys"
        q_begins, k_begins = np.arange(batch) * length, np.arange(batch) * key_length
    else:
        lengths, key_lengths, q_begins, k_begins = (x.reshape(x.size) for x in rest)
        assert (lengths == key_lengths).all() and lengths.size == batch * most and q_begins.size == batch * (most + 1)
        q_begins, k_begins = q_begins // (heads * q.shape[3]), k_begins // (k.shape[2] * k.shape[3])
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out, stats = np.full((batch * length, heads, v.shape[3]), np.nan), np.full((batch * most, heads, length), np.nan)
    grads = [np.full_like(x, np.nan) for x in flat]
    share = heads // k.shape[2]
    for piece, (size, key_size) in enumerate(zip(lengths, key_lengths, strict=True)):
        query_range = slice(q_begins[piece], q_begins[piece] + size)
        key_range = slice(k_begins[piece], k_begins[piece] + key_size)
        for grad, part in zip(grads, (query_range, key_range, key_range), strict=True):
            grad[part] = 0
        before = np.arange(size)[:, None] - np.arange(key_size)[None]
        visible = before >= 0 if causal else before == before
        visible &= before < (config["sliding_window_length"] or size + 1)
        for n in range(heads):
            a, b, c = flat[0][query_range, n], flat[1][key_range, n // share], flat[2][key_range, n // share]
            scores = a @ b.T * config["fmha_scale"] + (0 if bias is None else bias[piece % len(bias), 0])
            scores = np.where(visible, scores, -np.inf)
            if not backward:
                stats[piece, n, :size] = lse = np.logaddexp.reduce(scores, axis=1)
                out[query_range, n] = np.exp(scores - lse[:, None]) @ c
                continue
            p = np.exp(scores - statistics[piece, n, :size, None])
            do = dout.reshape(batch * length, heads, -1)[query_range, n]
            ds = p * (do @ c.T - delta.reshape(batch * length, heads)[query_range, n, None]) * config["fmha_scale"]
            grads[0][query_range, n] += ds @ b
            grads[1][key_range, n // share] += ds.T @ a
            grads[2][key_range, n // share] += p.T @ do
    results = grads if backward else [out]
    turned = [x.reshape(batch, -1, *x.shape[1:]).transpose(0, 2, 1, 3) for x in results]
    last = [np.zeros((0,), np.uint8)]
    return [x.astype(operands[0].dtype) for x in turned] + ([] if backward else [stats.astype(np.float32)]) + last


BACKENDS = pytest.mark.parametrize("name", ["reference", "pallas", "cudnn", "cudnn_mask"])


@pytest.fixture
def passes(name: str, monkeypatch: pytest.MonkeyPatch) -> Passes:
    # Float32 here: the formula is compared, not the rounding.
    monkeypatch.setitem(cudnn.ELEMENT, jnp.dtype(jnp.float32), "BF16") if name.startswith("cudnn") else None
    stand_in(monkeypatch)
    return PALLAS if name == "pallas" else PASSES[name]


def inputs(length: int, size: int, wide: int, seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = [(ROWS, length, n, h) for n, h in ((HEADS, size), (GROUPS, size), (GROUPS, wide), (HEADS, wide))]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def documents(length: int) -> jax.Array:
    """Of lengths 5, 20 and the rest, and of 1, 1 and the rest."""
    cuts = np.array([[5, 25], [1, 2]])
    return jnp.asarray((np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1), jnp.int32)


def mask_of_rows(length: int, segments: jax.Array | None = None, **rest: Any) -> Mask:
    index = jnp.arange(length)
    return Mask(index, index, segments, segments, **rest)


def plain(q, k, v, mask: Mask):
    """float64: the result and the log of the sum of exponentials."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.where(np.asarray(mask.visible())[:, None], np.einsum("bsnh,btnh->bnst", q, k) * SCALE, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.einsum("bnst,btnu->bsnu", np.exp(scores - lse[..., None]), v), lse


SHAPES = {
    "documents, a window, values of another size": (48, 32, 16, {"segments": True, "window": 3}),
    "values of another size": (32, 48, 32, {}),
    "whole rows": (48, 32, 32, {}),
    "a window": (48, 16, 16, {"window": 5}),
    "documents": (48, 32, 32, {"segments": True}),
    "documents with values of another size": (32, 48, 32, {"segments": True}),
    "no multiple of a block": (34, 16, 16, {"segments": True}),
    "both ways": (32, 16, 16, {"causal": False}),
}
FIRST, SLOW = next(iter(SHAPES)), [pytest.param(case, marks=pytest.mark.slow) for case in list(SHAPES)[1:]]


@BACKENDS
@pytest.mark.parametrize("case", [FIRST, *SLOW])
def test_output_log_sum_exp_and_gradients_match_the_formula(case: str, name: str, passes: Passes) -> None:
    length, size, wide, rest = SHAPES[case]
    q, k, v, dout = inputs(length, size, wide)
    rest = dict(rest)
    mask = mask_of_rows(length, documents(length) if rest.pop("segments", False) else None, **rest)

    @jax.jit
    def run(q, k, v, dout):
        out, lse = passes.forward(q, k, v, mask, scale=SCALE)
        _, pullback = jax.vjp(lambda q, k, v: reference_attention(q, k, v, mask, scale=SCALE), q, k, v)
        return out, lse, passes.backward(q, k, v, mask, out, lse, dout, scale=SCALE), pullback(dout)

    with jax.default_matmul_precision("highest"):
        out, lse, actual, expected = run(q, k, v, dout)
    exact, exact_lse = plain(q, k, v, mask)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)
    for value, reference in zip(actual, expected, strict=True):
        assert value.shape == reference.shape
        np.testing.assert_allclose(value, reference, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["cudnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "pallas", "cudnn_mask"))]
)
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole_rows", "documents"])
def test_a_sink_and_its_gradient_are_exact(masked: bool, name: str, passes: Passes) -> None:
    """Fused backends have no sinks: the result is scaled, and the backward kernel receives the increased sum."""
    q, k, v, dout = inputs(32, 16, 16)
    sink = jnp.asarray([-2.0, 3.0])
    mask = mask_of_rows(32, documents(32) if masked else None)

    def total(attention, *args):
        *qkv, sink = args
        return jnp.sum(attention(*qkv, mask, scale=SCALE, sink=sink) * dout)

    ways = [partial(total, way) for way in (partial(attend, passes), reference_attention)]
    with jax.default_matmul_precision("highest"):
        actual, expected = jax.jit(lambda *args: [jax.value_and_grad(way, (0, 1, 2, 3))(*args) for way in ways])(
            q, k, v, sink
        )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for value, reference in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-5 * max(1, np.abs(reference).max()))


def changed(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.where(where[..., None, None], x + 1, x)


def check_isolation(
    passes: Passes, arrays: list[jax.Array], segments: jax.Array, *, rounded: int = 0, **rest: Any
) -> None:
    """Another document 1 in each row leaves all bits of the others' results and gradients; of the last `rounded` of
    them nearly all, where a kernel adds in the order in which its threads come."""
    mask = mask_of_rows(segments.shape[1], segments, **rest)

    @jax.jit
    def run(q, k, v, dout):
        out, lse = passes.forward(q, k, v, mask, scale=SCALE)
        return out, lse.transpose(0, 2, 1)[..., None], *passes.backward(q, k, v, mask, out, lse, dout, scale=SCALE)

    first = run(*arrays)
    second = run(*(changed(x, segments == 1) for x in arrays))
    unchanged = np.asarray(segments != 1)
    for place, pair in enumerate(zip(first, second, strict=True)):
        value, reference = (np.asarray(x, np.float32) for x in pair)
        if place < len(first) - rounded:
            np.testing.assert_array_equal(value[unchanged], reference[unchanged])
        np.testing.assert_allclose(value[unchanged], reference[unchanged], atol=2**-8 * np.abs(value).max())
        assert np.abs(value - reference)[~unchanged].max() > 2**-6 * np.abs(value).max()


@BACKENDS
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_documents_are_isolated_bitwise(window: int | None, name: str, passes: Passes) -> None:
    check_isolation(passes, inputs(48, 16, 16), documents(48), window=window)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@BACKENDS
def test_documents_are_isolated_bitwise_on_a_gpu(name: str) -> None:
    shape = (2, 512)
    segments = jnp.asarray((np.arange(512)[None, :, None] >= np.array([[100, 300], [7, 256]])[:, None]).sum(-1))
    rng = np.random.default_rng(0)
    heads = [(HEADS, 64), (GROUPS, 64), (GROUPS, 64), (HEADS, 64)]
    arrays = [jnp.asarray(rng.normal(size=(*shape, *head_shape)), jnp.bfloat16) for head_shape in heads]
    # cuDNN's backward kernel accumulates with atomics, so two runs on the same inputs need not agree to the bit.
    check_isolation(PASSES[name], arrays, segments, rounded=3 if name.startswith("cudnn") else 0)


def check_formula(passes: Passes, case: str, length: int) -> None:
    """In bfloat16."""
    _, size, wide, rest = SHAPES[case]
    q, k, v, dout = (x.astype(jnp.bfloat16) for x in inputs(length, size, wide))
    rest = dict(rest)
    mask = mask_of_rows(length, documents(length) if rest.pop("segments", False) else None, **rest)

    @jax.jit
    def run(q, k, v, dout):
        out, lse = passes.forward(q, k, v, mask, scale=SCALE)
        return out, lse, passes.backward(q, k, v, mask, out, lse, dout, scale=SCALE)

    @jax.jit
    def expected_gradients(q, k, v, dout):
        return jax.vjp(lambda q, k, v: reference_attention(q, k, v, mask, scale=SCALE), q, k, v)[1](dout)

    out, lse, actual = run(q, k, v, dout)
    gradients = expected_gradients(*(x.astype(jnp.float32) for x in (q, k, v, dout)))
    exact, exact_lse = plain(q, k, v, mask)
    np.testing.assert_allclose(lse, exact_lse, atol=2**-8 * np.abs(exact_lse).max())
    for value, reference in zip((out, *actual), (exact, *gradients), strict=True):
        # bfloat16 keeps 8 bits; the longest path from inputs to a gradient rounds a few times.
        np.testing.assert_allclose(np.asarray(value, np.float32), reference, atol=2**-6 * np.abs(reference).max())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["pallas", "cudnn", "cudnn_mask"])
@pytest.mark.parametrize("case", [case for case in SHAPES if case != "no multiple of a block"])
def test_kernels_on_a_gpu_match_the_formula(case: str, name: str) -> None:
    check_formula(PASSES[name], case, 256)


@pytest.mark.parametrize(
    "name", ["cudnn_mask", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "pallas", "cudnn"))]
)
def test_the_check_for_gpus_passes_for_the_cpu_replacements(name: str, passes: Passes) -> None:
    check_formula(passes, FIRST, 32)


def test_rows_with_too_many_documents_use_the_pallas_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rows with a document in two pieces: which case it is, only the running program knows."""
    monkeypatch.setitem(cudnn.ELEMENT, jnp.dtype(jnp.float32), "BF16")
    monkeypatch.setattr(cudnn, "DOCUMENTS", 3)
    stand_in(monkeypatch)
    q, k, v, _ = inputs(32, 16, 16)
    calls = []
    callback = jax.pure_callback
    monkeypatch.setattr(jax, "pure_callback", lambda f, *args: callback(lambda *x: (calls.append(1), f(*x))[1], *args))
    run = jax.jit(lambda q, k, v, segments: cudnn.forward(q, k, v, mask_of_rows(32, segments), scale=SCALE))
    three = documents(32)
    for segments, fits in ((three, True), (three.at[0, 30:].set(3), False), (three.at[0, 28:].set(0), False)):
        calls.clear()
        with jax.default_matmul_precision("highest"):
            out, lse = run(q, k, v, segments)
        exact, exact_lse = plain(q, k, v, mask_of_rows(32, segments))
        np.testing.assert_allclose(out, exact, atol=1e-5)
        np.testing.assert_allclose(lse, exact_lse, atol=1e-5)
        assert bool(cudnn.Documents.of(segments, 3).fit) == bool(calls) == fits


@pytest.mark.parametrize("name", ["reference", pytest.param("pallas", marks=pytest.mark.slow)])
def test_partial_results_combine_by_log_sum_exp(name: str, passes: Passes) -> None:
    """As in ring attention: keys in two halves, in blocks out of order, and gradients half by half."""
    q, k, v, dout = inputs(32, 16, 16)
    order = jnp.asarray(np.r_[16:32, 0:16])
    segments = documents(32)
    exact, exact_lse = plain(q, k, v, mask_of_rows(32, segments))
    halves = [order[:16], order[16:]]

    @jax.jit
    def run(q, k, v, dout):
        masks = [Mask(jnp.arange(32), keys, segments, segments[:, keys]) for keys in halves]
        key_halves = [(k[:, keys], v[:, keys]) for keys in halves]
        parts = [passes.forward(q, *kv, mask, scale=SCALE) for kv, mask in zip(key_halves, masks, strict=True)]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        out = sum(part_out * jnp.exp(part_lse - lse).transpose(0, 2, 1)[..., None] for part_out, part_lse in parts)
        grads = [
            passes.backward(q, *kv, mask, out, lse, dout, scale=SCALE)
            for kv, mask in zip(key_halves, masks, strict=True)
        ]
        _, pullback = jax.vjp(
            lambda q, k, v: reference_attention(q, k, v, mask_of_rows(32, segments), scale=SCALE), q, k, v
        )
        return out, lse, parts, grads, pullback(dout)

    with jax.default_matmul_precision("highest"):
        out, lse, parts, grads, (dq, dk, dv) = run(q, k, v, dout)
    assert any(bool(jnp.isneginf(part_lse).any()) for _, part_lse in parts), "some queries see no key of a half"
    np.testing.assert_allclose(out, exact, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)
    np.testing.assert_allclose(grads[0][0] + grads[1][0], dq, atol=1e-5)
    for keys, (_, part_dk, part_dv) in zip(halves, grads, strict=True):
        np.testing.assert_allclose(part_dk, dk[:, keys], atol=1e-5)
        np.testing.assert_allclose(part_dv, dv[:, keys], atol=1e-5)


def test_fully_masked_blocks_are_skipped() -> None:
    segments = jnp.asarray(np.repeat(np.arange(4), 64)[None])
    mask = mask_of_rows(256, segments)
    walk = pallas_attention._split_into_blocks(mask, 1, Blocks(32, 32, 4))
    first, last = np.asarray(walk.keys_of)[0]
    # Two blocks a document: the first visits one block, the second two.
    np.testing.assert_array_equal(last - first, [1, 2] * 4)
    np.testing.assert_array_equal(first, np.repeat([0, 2, 4, 6], 2))
    first, last = np.asarray(
        pallas_attention._split_into_blocks(mask_of_rows(256, window=31), 1, Blocks(32, 32, 4)).keys_of
    )[0]
    np.testing.assert_array_equal(last - first, [1] + [2] * 7)
    first, last = np.asarray(walk.queries_of)[0]
    np.testing.assert_array_equal(last - first, [2, 1] * 4)


@pytest.mark.parametrize("name", ["cudnn", "cudnn_mask", "pallas"])
def test_unsupported_features_of_fused_backends_are_refused(name: str) -> None:
    q, k, v, _ = inputs(32, 16, 16)
    with pytest.raises(ValueError, match="kernel=reference"):
        attend(name, q, k, v, mask_of_rows(32), scale=SCALE, bias=jnp.zeros((HEADS, 32, 32)))
