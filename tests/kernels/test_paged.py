"""Attention to a paged cache against attention to whole rows, the interpreted Triton kernels too, and their choice."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import UserError
from megajax.inference.assembly import choose_kernel
from megajax.kernels.attention.attention import reference_attention
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.request import KernelDevice
from megajax.kernels.paged.attention import KERNELS, reference, tiled
from megajax.kernels.paged.capability import PAGED_BACKENDS, PagedRequest, choose_paged
from megajax.kernels.paged.pools import PagedQueries, Pools
from megajax.kernels.paged.triton import paged_attention

ANYWHERE = ("reference", "tiled")
"""Kernels that run on a CPU."""
ROWS, HEADS, SIZE, BLOCK, LENGTH = 4, 6, 16, 4, 48


def rows(groups: int, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Queries and keys of whole rows, the keys' blocks in a pool in any order, and the tables."""
    draw = np.random.default_rng(seed)
    q, k, v = (draw.standard_normal((ROWS, LENGTH, n, SIZE)).astype("float32") for n in (HEADS, groups, groups))
    blocks = draw.permutation(ROWS * LENGTH // BLOCK + 7)
    table = blocks[: ROWS * LENGTH // BLOCK].reshape(ROWS, -1).astype(np.int32)
    pools = [np.full((len(blocks), BLOCK, groups, SIZE), 99.0, np.float32) for _ in "kv"]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[table] = x.reshape(ROWS, -1, BLOCK, groups, SIZE)
    return q, (k, v), Pools(jnp.asarray(pools[0]), jnp.asarray(pools[1]), SIZE), jnp.asarray(table)


def with_leftovers(pools: Pools, table: Any, positions: Any, window: int | None) -> Pools:
    """The same with NaN past the end of each row and before its window, as another request may leave them."""
    at = jnp.arange(table.shape[1] * pools.keys.shape[1])[None]
    lowest = jnp.where(positions < 0, 10**6, positions).min(1)
    unseen = (at > positions.max(1)[:, None]) | (at < lowest[:, None] - (10**6 if window is None else window))
    mark = jnp.zeros(pools.keys.shape[:2], bool).at[table].set(unseen.reshape(*table.shape, -1))[..., None, None]
    return replace(pools, keys=jnp.where(mark, jnp.nan, pools.keys), values=jnp.where(mark, jnp.nan, pools.values))


@pytest.mark.parametrize("kernel", [*ANYWHERE, "tiles of one block"])
@pytest.mark.parametrize(
    ("groups", "window", "sink", "bias", "cap"),
    [(2, None, False, False, None), (6, 9, True, False, None), (2, 0, False, True, None), (2, 9, False, False, 0.5)],
)
def test_queries_see_the_keys_of_their_rows(
    kernel: Any, groups: int, window: int | None, sink: bool, bias: bool, cap: float | None
) -> None:
    attend = partial(tiled, tile=1) if kernel not in ANYWHERE else KERNELS[kernel]
    q, (k, v), pools, table = rows(groups)
    index, draw = jnp.arange(LENGTH), np.random.default_rng(3)
    sinks = jnp.asarray(draw.standard_normal(HEADS), jnp.float32) if sink else None
    values = jnp.asarray(draw.standard_normal((LENGTH, HEADS)), jnp.float32)  # by distance back
    scores = values[jnp.maximum(index[:, None] - index[None], 0)]
    added, mask = jnp.moveaxis(scores, -1, 0) if bias else None, Mask(index, index, None, None, window)
    all_positions = reference_attention(q, k, v, mask, scale=0.3, sink=sinks, bias=added, cap=cap)
    positions = jnp.asarray([[0, 1, 2], [45, 46, 47], [7, 8, -1], [-1, -1, -1]], jnp.int32)
    of = None if not bias else lambda after: values[jnp.clip(-after, 0, LENGTH - 1)]
    queries = jnp.take_along_axis(q, jnp.maximum(positions, 0)[..., None, None], axis=1)
    pools = with_leftovers(pools, table, positions, window)
    out = jax.jit(lambda *arrays: attend(PagedQueries(*arrays, 0.3, window, sinks, of, cap=cap), pools))(
        queries, table, positions
    )
    expected = jnp.take_along_axis(all_positions, jnp.maximum(positions, 0)[..., None, None], axis=1)
    np.testing.assert_allclose(out, jnp.where(positions[..., None, None] >= 0, expected, 0), atol=1e-5)


@pytest.mark.parametrize("kernel", [reference, partial(paged_attention, interpret=True)])
def test_queries_see_the_keys_of_their_chunk(kernel: Any) -> None:
    q, (k, v), pools, table = rows(2)
    index = jnp.arange(LENGTH)
    chunks = jnp.broadcast_to(index // 7, (ROWS, LENGTH))
    all_positions = reference_attention(q, k, v, Mask(index, index, chunks, chunks), scale=0.3)
    positions = jnp.asarray([[0, 1, 2], [45, 46, 47], [6, 7, -1], [-1, -1, -1]], jnp.int32)
    at = jnp.maximum(positions, 0)[..., None, None]
    out = kernel(PagedQueries(jnp.take_along_axis(q, at, axis=1), table, positions, 0.3, chunk=7), pools)
    expected = jnp.take_along_axis(all_positions, at, axis=1)
    np.testing.assert_allclose(out, jnp.where(positions[..., None, None] >= 0, expected, 0), atol=1e-5)


@pytest.mark.parametrize("kernel", ANYWHERE)
def test_values_may_be_the_first_part_of_keys(kernel: Any) -> None:
    q, _, pools, table = rows(1)
    positions = jnp.asarray([[5], [47], [16], [0]], jnp.int32)
    run = partial(KERNELS[kernel], PagedQueries(q[:, :1], table, positions, 0.2))
    within = run(Pools(pools.keys, None, 10))
    beside = run(Pools(pools.keys, pools.keys[..., :10], 10))
    np.testing.assert_allclose(within, beside, atol=1e-6)


@pytest.mark.parametrize("kernel", ANYWHERE)
def test_scaled_keys_and_values_are_multiplied_by_their_scales(kernel: Any) -> None:
    q, _, pools, table = rows(2)
    draw = np.random.default_rng(4)
    quantized = [jnp.asarray(draw.integers(-127, 128, pools.keys.shape), jnp.int8) for _ in "kv"]
    scales = [jnp.asarray(draw.uniform(0.01, 0.02, pools.keys.shape[:-1]), jnp.float32) for _ in "kv"]
    positions = jnp.asarray([[5], [47], [16], [0]], jnp.int32)
    run = partial(KERNELS[kernel], PagedQueries(q[:, :1], table, positions, 0.2))
    scaled = run(Pools(*quantized, SIZE, *scales))
    plain = [x.astype(jnp.float32) * scale[..., None] for x, scale in zip(quantized, scales, strict=True)]
    np.testing.assert_allclose(scaled, run(Pools(*plain, SIZE)), atol=1e-5)


def test_the_order_of_a_row_s_sums_does_not_depend_on_other_rows() -> None:
    q, _, pools, table = rows(2)
    positions = jnp.asarray([[17], [47], [3], [30]], jnp.int32)
    run = jax.jit(lambda positions: tiled(PagedQueries(q[:, :1], table, positions, 0.2), pools, tile=8))
    batched = run(positions)
    shorter = run(jnp.asarray([[17], [1], [2], [-1]], jnp.int32))
    np.testing.assert_array_equal(batched[0], shorter[0])


WIDE_BLOCK, TABLE = 16, 36
"""A table of 576 positions: three splits."""


def step(width: int, heads: int, groups: int, size: int, *, latent: int | None = None, stored: str = "float32"):
    """Queries of five rows and their cache. Row 0 is full, row 1 begins, row 2 is half a step, row 4 is empty."""
    draw = np.random.default_rng(width + heads + size)
    rows, blocks = 5, 5 * TABLE + 3

    def pool(*rest: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal((blocks, WIDE_BLOCK, groups, *rest)), "float32")

    q = jnp.asarray(draw.standard_normal((rows, width, heads, size)), "float32")
    keys, values = pool(size), None if latent else pool(size)
    scales = (None, None)
    if stored != "float32":
        keys, values = ((10 * x).astype(stored) for x in (keys, values))
        scales = jnp.abs(pool()) / 10, jnp.abs(pool()) / 10
    table = draw.permutation(blocks)[: rows * TABLE].reshape(rows, TABLE)
    first = np.array([TABLE * WIDE_BLOCK - width, 0, 300, 255, 0])
    positions = first[:, None] + np.arange(width)
    positions[2, (width + 1) // 2 :] = positions[4] = -1
    pools = Pools(keys, values, latent or size, *scales)
    return q, pools, jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32)


CASES = {
    "a window and sinks": {"width": 1, "heads": 6, "groups": 2, "size": 48, "window": 300, "sinks": True},
    "a soft cap": {"width": 2, "heads": 4, "groups": 2, "size": 16, "window": 9, "cap": 0.5},
    "prompts with a window and sinks": {"width": 20, "heads": 4, "groups": 2, "size": 32, "window": 100, "sinks": True},
    "values inside keys": {"width": 1, "heads": 20, "groups": 1, "size": 80, "latent": 64},
    "prompts with values inside keys": {"width": 17, "heads": 2, "groups": 1, "size": 48, "latent": 32},
    "int8": {"width": 1, "heads": 4, "groups": 2, "size": 16, "stored": "int8"},
    "prompts in float8": {"width": 2, "heads": 4, "groups": 2, "size": 16, "stored": "float8_e4m3fn"},
}


@pytest.mark.parametrize("case", [c if n < 1 else pytest.param(c, marks=pytest.mark.slow) for n, c in enumerate(CASES)])
def test_the_interpreted_kernels_equal_the_reference(case: str) -> None:
    rest = dict(CASES[case])
    window, sinks, cap = rest.pop("window", None), rest.pop("sinks", False), rest.pop("cap", None)
    q, pools, table, positions = step(**rest)
    sink = jnp.linspace(-1, 2, q.shape[2]) if sinks else None
    queries = PagedQueries(q, table, positions, 0.3, window, sink, cap=cap)
    expected = reference(queries, pools)
    if window is not None:
        pools = with_leftovers(pools, table, positions, window)
    actual = paged_attention(queries, pools, interpret=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(actual[4]).any()


H100 = KernelDevice(name="H100", capability=(9, 0))
A100 = KernelDevice(name="A100", capability=(8, 0))
CPU = KernelDevice(name="cpu")
PLAIN = PagedRequest(dtype="bfloat16", stored="bfloat16", key_dim=128, value_dim=128)
CHOICES = [
    (H100, PLAIN, "triton", None),
    (CPU, PLAIN, "tiled", "needs an NVIDIA GPU, jax found cpu"),
    (KernelDevice(name="V100", capability=(7, 0)), PLAIN, "tiled", "runs from compute capability 8.0 on, V100 has 7.0"),
    (H100, replace(PLAIN, dtype="float32"), "tiled", "computes in bfloat16 or float16, not in float32"),
    (H100, replace(PLAIN, bias=True), "tiled", "has no bias of scores"),
    (H100, replace(PLAIN, key_dim=576, value_dim=512), "triton", None),
    (H100, replace(PLAIN, key_dim=592, value_dim=512), "tiled", "takes heads up to 576, not of 592 with values of 512"),
    (H100, replace(PLAIN, key_dim=72, value_dim=72), "tiled", "takes heads of a multiple of 16, not of 72"),
    (A100, replace(PLAIN, stored="int8"), "triton", None),
    (H100, replace(PLAIN, stored="float8_e4m3fn"), "triton", None),
    (A100, replace(PLAIN, stored="float8_e4m3fn"), "tiled", "float8_e4m3fn from compute capability 8.9 on, A100 has"),
    (H100, replace(PLAIN, stored="float32"), "tiled", "reads a cache in bfloat16, float16, int8, float8_e4m3fn, not"),
]


@pytest.mark.parametrize(("device", "request_", "kernel", "why"), CHOICES)
def test_auto_chooses_the_fastest_kernel_that_supports_all_layers(device, request_, kernel, why) -> None:
    choice = choose_paged("auto", [PagedRequest(), request_], device)
    assert choice.kernel == kernel and (why or "") in "; ".join(choice.reasons)
    assert bool(choice.reasons) == (why is not None)
    assert choose_paged(kernel, [request_], device).kernel == kernel


def test_an_unsupported_kernel_is_refused_with_an_alternative() -> None:
    assert list(PAGED_BACKENDS) == list(KERNELS)
    with pytest.raises(UserError) as caught:
        choose_paged("triton", [PLAIN, replace(PLAIN, bias=True)], H100, "engine.kernel")
    assert str(caught.value) == (
        "engine.kernel=triton: the Triton kernel of a paged cache has no bias of scores. "
        "Set engine.kernel=tiled or auto."
    )


def test_requests_of_models_have_their_head_sizes() -> None:
    request = PagedRequest(dtype="bfloat16", stored="int8")
    latent = load("deepseek.py:deepseek_v3").model.paged_requests(request)
    assert set(latent) == {replace(request, key_dim=576, value_dim=512)}
    llama = load("llama3.py:llama3_8b").model.paged_requests(request)
    assert set(llama) == {replace(request, key_dim=128, value_dim=128)}
    assert load("mamba2.py:mamba2_130m").model.paged_requests(request) == ()


def test_the_kernel_of_a_model_is_chosen_for_the_device_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("llama3.py:llama3_8b").model
    assert choose_kernel("auto", model, "bfloat16", "bfloat16") == "tiled"
    with user_error("inference.kernel"):
        choose_kernel("triton", model, "bfloat16", "bfloat16")
    monkeypatch.setattr("megajax.inference.assembly.local_device", lambda: H100)
    assert choose_kernel("auto", model, "bfloat16", "bfloat16") == "triton"
    assert choose_kernel("auto", model, "bfloat16", "float32") == "tiled"
