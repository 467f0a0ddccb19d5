"""Attention to a paged cache against attention to whole rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.attention.attention import reference_attention
from megajax.kernels.attention.mask import Mask
from megajax.kernels.paged.attention import KERNELS, tiled
from megajax.kernels.paged.pools import Pools

ANYWHERE = ("reference", "tiled")
"""Kernels that run on a CPU; test_paged_triton.py has the other."""
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


def with_leftovers(pools: Pools, table: Any, positions: Any) -> Pools:
    """The same with NaN and infinity past the end of each row, as an earlier request may leave them."""
    behind = jnp.arange(LENGTH)[None] > positions.max(1)[:, None]
    mark = jnp.zeros(pools.keys.shape[:2], bool).at[table].set(behind.reshape(ROWS, -1, BLOCK))[..., None, None]
    return replace(pools, keys=jnp.where(mark, jnp.nan, pools.keys), values=jnp.where(mark, jnp.nan, pools.values))


@pytest.mark.parametrize("kernel", [*ANYWHERE, "tiles of one block"])
@pytest.mark.parametrize(
    ("groups", "window", "sink", "bias"), [(2, None, False, False), (6, 9, True, False), (2, 0, False, True)]
)
def test_queries_see_the_keys_of_their_rows(
    kernel: Any, groups: int, window: int | None, sink: bool, bias: bool
) -> None:
    attend = partial(tiled, tile=1) if kernel not in ANYWHERE else KERNELS[kernel]
    q, (k, v), pools, table = rows(groups)
    index, draw = jnp.arange(LENGTH), np.random.default_rng(3)
    sinks = jnp.asarray(draw.standard_normal(HEADS), jnp.float32) if sink else None
    values = jnp.asarray(draw.standard_normal((LENGTH, HEADS)), jnp.float32)  # by distance back
    scores = values[jnp.maximum(index[:, None] - index[None], 0)]
    added, mask = jnp.moveaxis(scores, -1, 0) if bias else None, Mask(index, index, None, None, window)
    all_positions = reference_attention(q, k, v, mask, scale=0.3, sink=sinks, bias=added)
    positions = jnp.asarray([[0, 1, 2], [45, 46, 47], [7, 8, -1], [-1, -1, -1]], jnp.int32)
    of = None if not bias else lambda after: values[jnp.clip(-after, 0, LENGTH - 1)]
    queries = jnp.take_along_axis(q, jnp.maximum(positions, 0)[..., None, None], axis=1)
    pools = with_leftovers(pools, table, positions)
    out = jax.jit(partial(attend, scale=0.3, window=window, bias=of))(queries, pools, table, positions, sink=sinks)
    expected = jnp.take_along_axis(all_positions, jnp.maximum(positions, 0)[..., None, None], axis=1)
    np.testing.assert_allclose(out, jnp.where(positions[..., None, None] >= 0, expected, 0), atol=1e-5)


@pytest.mark.parametrize("kernel", ANYWHERE)
def test_values_may_be_the_first_part_of_keys(kernel: Any) -> None:
    q, _, pools, table = rows(1)
    positions = jnp.asarray([[5], [47], [16], [0]], jnp.int32)
    run = partial(KERNELS[kernel], scale=0.2)
    within = run(q[:, :1], Pools(pools.keys, None, 10), table, positions)
    beside = run(q[:, :1], Pools(pools.keys, pools.keys[..., :10], 10), table, positions)
    np.testing.assert_allclose(within, beside, atol=1e-6)


@pytest.mark.parametrize("kernel", ANYWHERE)
def test_scaled_keys_and_values_are_multiplied_by_their_scales(kernel: Any) -> None:
    q, _, pools, table = rows(2)
    draw = np.random.default_rng(4)
    quantized = [jnp.asarray(draw.integers(-127, 128, pools.keys.shape), jnp.int8) for _ in "kv"]
    scales = [jnp.asarray(draw.uniform(0.01, 0.02, pools.keys.shape[:-1]), jnp.float32) for _ in "kv"]
    positions = jnp.asarray([[5], [47], [16], [0]], jnp.int32)
    run = partial(KERNELS[kernel], scale=0.2)
    scaled = run(q[:, :1], Pools(*quantized, SIZE, *scales), table, positions)
    plain = [x.astype(jnp.float32) * scale[..., None] for x, scale in zip(quantized, scales, strict=True)]
    np.testing.assert_allclose(scaled, run(q[:, :1], Pools(*plain, SIZE), table, positions), atol=1e-5)


def test_the_order_of_a_row_s_sums_does_not_depend_on_other_rows() -> None:
    q, _, pools, table = rows(2)
    positions = jnp.asarray([[17], [47], [3], [30]], jnp.int32)
    run = jax.jit(partial(tiled, scale=0.2, tile=8))
    batched = run(q[:, :1], pools, table, positions)
    shorter = run(q[:, :1], pools, table, jnp.asarray([[17], [1], [2], [-1]], jnp.int32))
    np.testing.assert_array_equal(batched[0], shorter[0])
