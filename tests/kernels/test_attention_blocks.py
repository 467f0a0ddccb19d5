"""Attention in blocks of queries has the values and gradients of the reference, for every mask and option."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_rows import Case, check

from megajax.kernels.attention import blocks
from megajax.kernels.attention.attention import Mask, Passes, attend
from megajax.kernels.attention.dropout import AttentionDropout

LENGTH, HEADS, SIZE = 21, 4, 8
PARTS = Passes(blocks.forward, blocks.backward, dropout=True, caps=True)
CASES: dict[str, dict] = {
    "documents and values of another size": {"segments": "documents", "groups": 2, "values": 12},
    "dropout of documents": {"rate": 0.3, "segments": "documents", "groups": 2},
    "padded rows of an encoder": {"causal": False, "segments": "padded", "groups": 2},
    "an encoder with a window, a cap and a sink": {
        **{"causal": False, "window": 6, "cap": 2.0, "sink": True, "groups": 1}
    },
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks in a row, the last one shorter, and rows that no turn of the loop divides."""
    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(blocks, "ROWS", 2)


def segments_of(kind: str | None, rng: np.random.Generator) -> np.ndarray | None:
    if kind is None:
        return None
    drawn = np.sort(rng.integers(0, 4, (3, LENGTH)), 1).astype(np.int32)
    return (drawn[:, ::-1] > 0).astype(np.int32) if kind == "padded" else drawn


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "dropout" in name else name for name in CASES]
)
def test_whole_rows_and_parts_of_rows_equal_the_reference(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    groups, cap, rate = case.get("groups", HEADS), case.get("cap"), case.get("rate", 0.0)
    index = jnp.arange(LENGTH, dtype=jnp.int32)
    ids = segments_of(case.get("segments"), rng)
    mask = Mask(
        index, index, ids, ids, case.get("window"), case.get("causal", True), padded=case.get("segments") == "padded"
    )
    values = case.get("values", SIZE)
    q, k, v, dout = (
        rng.normal(size=(3, LENGTH, *shape)).astype(np.float32)
        for shape in ((HEADS, SIZE), (groups, SIZE), (groups, values), (HEADS, values))
    )
    sink = rng.normal(size=HEADS).astype(np.float32) if case.get("sink") else None
    keys = rng.integers(0, 2**31, (3, 2)).astype(np.uint32)
    drop = AttentionDropout(rate, jnp.asarray(keys), jnp.arange(HEADS), index, LENGTH) if rate else None

    def results(kernel: str | Passes) -> tuple:
        options = {"scale": 0.3, "cap": cap, "dropout": drop}
        if isinstance(kernel, Passes):
            kernel, options["cap"] = kernel.with_arguments(cap=cap), None

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None) -> jax.Array:
            return attend(kernel, q, k, v, mask, sink=sink, **options)

        out, back = jax.vjp(attention, q, k, v, sink)
        return out, back(dout)

    expected, *found = jax.jit(lambda: [results(kernel) for kernel in ("reference", "blocks", PARTS)])()
    for actual in found:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual, expected)


def test_a_block_reads_the_keys_that_its_queries_see() -> None:
    index = jnp.arange(LENGTH)

    def keys(whole: bool, **changes: object) -> list[tuple[int, int]]:
        mask = Mask(index, index, None, None)._replace(**changes)
        return [(block.keys.start, block.keys.stop) for block in blocks._blocks(mask, LENGTH, LENGTH, whole)]

    assert keys(True) == [(0, 8), (0, 16), (0, 21)] and keys(False) == [(0, 21)] * 3
    assert keys(True, window=2) == [(0, 8), (0, 16), (8, 21)]
    assert keys(True, causal=False) == [(0, 21)] * 3
    assert keys(True, causal=False, window=3) == [(0, 21), (0, 21), (8, 21)]


def test_long_rows_have_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCKS", 4)
    index = jnp.arange(100)
    found = list(blocks._blocks(Mask(index, index, None, None), 100, 100, True))
    assert [block.queries.stop for block in found] == [32, 64, 96, 100]


def test_queries_in_the_middle_of_a_row_see_the_keys_before_them() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, length, 2, SIZE)).astype(np.float32) for length in (7, LENGTH, LENGTH))
    mask = Mask(jnp.arange(4, 11), jnp.arange(LENGTH), None, None)
    actual, expected = (attend(kernel, q, k, v, mask, scale=0.3) for kernel in (PARTS, "reference"))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_inputs_and_outputs_alone() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(1, LENGTH, 2, SIZE)), jnp.bfloat16) for _ in range(3))
    index = jnp.arange(LENGTH)
    low = attend("blocks", q, k, v, Mask(index, index, None, None), scale=0.3)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    exact = attend("reference", *wide, Mask(index, index, None, None), scale=0.3)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(low, np.float32), exact, atol=2**-7)


def test_over_rows_that_are_sharded() -> None:
    """Parts of rows in the order of the devices, which is not that of positions."""
    check(Case(strategy="all_gather", context=2, rate=0.3, window=9, length=32, groups=2), "blocks")
