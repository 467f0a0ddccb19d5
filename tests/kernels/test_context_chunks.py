"""cuDNN over sharded rows: triangles, rectangles and squares, with its calls in plain jax."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_in_jax import stand_in
from flax import nnx
from jax.sharding import PartitionSpec as P
from sharded_rows import Case, check, documents, texts
from user_errors import user_error

from megajax.kernels.attention import cudnn
from megajax.kernels.attention.attention import PASSES, local_device
from megajax.kernels.attention.mask import Mask
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.context import Context
from megajax.layers.param import LayerSettings, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.mesh.zigzag_order import SequenceSharding

GPU = local_device().capability is not None if jax.default_backend() == "gpu" else False
TRIANGLES = ["forward CAUSAL", "forward PADDING", "forward PADDING"]
WITH_PADDING = ["forward PADDING_CAUSAL", *TRIANGLES[1:]]
RING = Case(strategy="ring")
CASES = {
    "gather, documents": (Case(segments=documents(), sink=True, groups=2), WITH_PADDING),
    "ring": (replace(RING, sink=True, groups=2), ["forward CAUSAL", *["forward NO_MASK"] * 3]),
    "gather, 2 rounds, MLA": (Case(rounds=2, context=2, size=24, wide=16), [TRIANGLES[0], *TRIANGLES[1:] * 2]),
    "gather, plain chunks": (Case(rounds=0), TRIANGLES[:2]),
    "gather, both ways, padded": (Case(causal=False, padded=True, segments=texts()), ["forward PADDING"]),
    "ring, both ways": (replace(RING, causal=False), ["forward NO_MASK"] * 4),
    "ring, both ways, padded": (
        replace(RING, causal=False, padded=True, segments=texts(), context=2),
        ["forward PADDING"] * 2,
    ),
    "heads, documents, window": (
        Case(strategy="all_to_all", segments=documents(), window=9, groups=2),
        WITH_PADDING[:1],
    ),
    "groups": (Case(strategy="ring+all_to_all", groups=2), ["forward CAUSAL", "forward NO_MASK"]),
}


@pytest.mark.parametrize(
    "name", [name if number == 1 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(CASES)]
)
def test_the_calls_of_cudnn_sum_to_whole_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = CASES[name]
    actual = stand_in(monkeypatch, pallas=False)
    check(case, "cudnn")
    assert actual == [*calls, *(call.replace("forward", "backward") for call in calls)]


@pytest.mark.slow
def test_rows_with_too_many_documents_in_a_chunk_or_one_in_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel computes them, and computes them right."""
    stand_in(monkeypatch)
    monkeypatch.setattr(cudnn, "DOCUMENTS", 2)
    check(Case(segments=documents(), context=2), "cudnn")
    monkeypatch.setattr(cudnn, "DOCUMENTS", 8)
    pieces = documents()
    pieces[0, 40:] = 1
    check(Case(segments=pieces), "cudnn")


def test_a_window_over_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    for strategy in ("all_gather", "ring"):
        with pytest.raises(ValueError, match="chunks have no windows, window=3"):
            check(Case(strategy=strategy, context=2, window=3), "cudnn")


def calls_of_a_layer(strategy: str, *, manual: bool = True, length: int = 64, **settings: object) -> list[str]:
    """Mask types that an attention layer passes to cuDNN on context 4 x tensor 2, within a step or by `jax.jit`."""
    parallel = ParallelConfig(data=1, context=4, tensor=2, context_strategy=strategy)
    sharding = SequenceSharding.of(parallel, causal=True)
    layer = LayerSettings(layout=Layout(Plan.of(parallel), rows=sharding), hidden=64, std=0.1, output_std=0.1)
    cfg = AttentionConfig(heads=8, kv_heads=4, kernel="cudnn", **settings)
    module = nnx.eval_shape(lambda: cfg.build(layer))
    weights = {path: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for path, spec in specs(module).items()}

    def attention(weights: dict, x: jax.Array) -> jax.Array:
        index = sharding.local_index(x.shape[1]) if manual else jnp.arange(x.shape[1])
        return bind(module, weights)(x, Context(jnp.zeros(x.shape[:2], jnp.int32), index, None))

    row, outer = P(None, "context"), {"pipeline", "replica", "data", "expert", "context"}
    mesh, run = build_mesh(parallel), attention
    if manual:
        ins = (P(), row)
        run = jax.shard_map(attention, mesh=mesh, axis_names=outer, in_specs=ins, out_specs=row, check_vma=False)
    with jax.set_mesh(mesh):
        traced = jax.jit(run).trace(weights, jax.ShapeDtypeStruct((2, length, 64), jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"mask_type\\22: ?\\22(\w+)", text)


@pytest.mark.parametrize(
    ("strategy", "calls"), [("all_gather", ["CAUSAL", "PADDING", "PADDING"]), ("ring", ["CAUSAL", *["NO_MASK"] * 3])]
)
def test_layers_call_cudnn_by_chunks(strategy: str, calls: list[str]) -> None:
    assert calls_of_a_layer(strategy) == calls
    # Outside a step, rows are in plain chunks, one per device.
    assert calls_of_a_layer(strategy, manual=False) == ["CAUSAL", "PADDING"]


def test_layers_refuse_unsupported_cudnn_attention_over_context() -> None:
    with user_error():
        calls_of_a_layer("all_gather", window=8)
    # Of the whole row's 72 positions, not of a device's 18.
    with user_error():
        calls_of_a_layer("all_gather", length=72)


def check_rectangle(start: int, segments: bool, chunk: int) -> None:
    """A chunk that begins at `start` of rows of four chunks, in bfloat16, against the formula in float32."""
    rng, length, heads, groups, size = np.random.default_rng(0), 4 * chunk, 4, 2, 64
    shapes = [(2, chunk, heads, size), *[(2, length, groups, size)] * 2, (2, chunk, heads, size)]
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    ids = jnp.asarray(documents([[5, chunk + 3, 2 * chunk + 9], [2 * chunk]], length)) if segments else None
    chunk_ids = None if ids is None else ids[:, start : start + chunk]
    mask = Mask(jnp.full((chunk,), start - 1), jnp.arange(length), chunk_ids, ids)

    def passes(forward: Callable, backward: Callable, *arrays: jax.Array) -> tuple:
        q, k, v, dout = arrays
        out, lse = forward(q, k, v, mask, scale=0.125)
        # In a row the log-sum-exp is over more keys, and finite.
        total = jnp.logaddexp(lse, 1.0)
        return out, jnp.exp(lse), *backward(q, k, v, mask, out, total, dout, scale=0.125)

    actual = jax.jit(partial(passes, cudnn.rectangle_forward, cudnn.rectangle_backward))(q, k, v, dout)
    exact = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(passes, *PASSES["reference"][:2]))(*exact)
    for value, reference in zip(actual, expected, strict=True):
        reference = np.asarray(reference)
        np.testing.assert_allclose(value.astype(np.float32), reference, atol=2**-6 * max(np.abs(reference).max(), 1e-3))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("start", "segments"), [(0, False), (0, True), (1, False), (1, True), (2, True)])
def test_rectangles_on_a_gpu_match_the_formula(start: int, segments: bool) -> None:
    check_rectangle(256 * start, segments, 256)
