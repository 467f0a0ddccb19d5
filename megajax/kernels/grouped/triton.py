"""The grouped matmul as Pallas Triton kernels, for NVIDIA GPUs from compute capability 8.0 on.

T rows, E groups; x [T, K], w [E, K, N]. A program computes one block of results; sums are in float32 in a fixed order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from megajax.kernels.grouped.tiles import tiles


class Blocks(NamedTuple):
    """Block sizes, powers of two from 16 on, and how a program runs."""

    rows: int
    """Rows of the result."""
    columns: int
    """Columns of the result."""
    summed: int
    """Elements of the contracted dimension per step."""
    warps: int = 8
    stages: int = 3
    """Number of steps in flight, including the current one."""

    def parameters(self) -> triton.CompilerParams:
        """Compiler parameters."""
        return triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


# The usual sizes of dense matmuls on an A100; three stages take 96 and 48 KiB of shared memory.
ROWS, MATRICES = Blocks(128, 128, 64), Blocks(128, 128, 32)


def _dividing(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides the size."""
    return min(most, size & -size)


def _load(ref: Any, *at: Array, mask: Array | None) -> Array:
    return triton.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


def rows(
    x: Array,
    w: Array,
    sizes: Array,
    *,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
    blocks: Blocks = ROWS,
    interpret: bool = False,
) -> Array:
    """Each row times the matrix of its group: see `Products.rows`. `interpret` runs the kernel on a CPU."""
    (count, inner), outer = x.shape, w.shape[1 if transposed else 2]
    tiled, depth = tiles(sizes, count, blocks.rows), _dividing(inner, blocks.summed)

    def kernel(group_ref: Any, first_ref: Any, end_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        tile = pl.program_id(1)
        group, end = group_ref[tile], end_ref[tile]
        row = first_ref[tile] + jnp.arange(blocks.rows, dtype=jnp.int32)
        column = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns, dtype=jnp.int32)
        column_mask = None if outer % blocks.columns == 0 else column < outer
        # Rows of other groups may be computed, because rows don't mix; rows outside x must not be read.
        loaded_row = jnp.minimum(row, count - 1)

        def step(i: Array, total: Array) -> Array:
            at = i * depth + jnp.arange(depth, dtype=jnp.int32)
            a = _load(x_ref, loaded_row[:, None], at[None], mask=None)
            if transposed:
                b = _load(
                    w_ref, group, column[:, None], at[None], mask=None if column_mask is None else column_mask[:, None]
                ).T
            else:
                b = _load(
                    w_ref, group, at[:, None], column[None], mask=None if column_mask is None else column_mask[None]
                )
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)

        # Bounds of a loop must have one type, int32.
        steps = jnp.where(end > first_ref[tile], jnp.int32(inner // depth), jnp.int32(0))
        total = lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
        row_mask = (row < end)[:, None]
        mask = jnp.broadcast_to(row_mask, total.shape) if column_mask is None else row_mask & column_mask[None]
        triton.store(y_ref.at[row[:, None], column[None]], total.astype(y_ref.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        # Columns first: the rows of a tile are read from memory once, and the group's matrix stays in the L2 cache.
        grid=(pl.cdiv(outer, blocks.columns), tiled.group.size),
        out_shape=jax.ShapeDtypeStruct((count, outer), dtype or x.dtype),
        compiler_params=blocks.parameters(),
        interpret=interpret,
        name="grouped_rows",
    )(tiled.group, tiled.first, tiled.end, x, w)


def matrices(
    x: Array, dy: Array, sizes: Array, *, dtype: jnp.dtype, blocks: Blocks = MATRICES, interpret: bool = False
) -> Array:
    """The sum over each group's rows of x^T dy: see `Products.matrices`."""
    inner, outer = x.shape[1], dy.shape[1]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)

    def kernel(first_ref: Any, end_ref: Any, x_ref: Any, dy_ref: Any, dw_ref: Any) -> None:
        group = pl.program_id(2)
        first, end = first_ref[group], end_ref[group]
        column = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns, dtype=jnp.int32)
        line = pl.program_id(1) * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)

        def step(i: Array, total: Array) -> Array:
            row = first + i * blocks.summed + jnp.arange(blocks.summed, dtype=jnp.int32)
            row_mask = (row < end)[:, None]  # rows of other groups may hold NaN and are not read
            a = _load(x_ref, row[:, None], line[None], mask=row_mask & (line < inner)[None])
            b = _load(dy_ref, row[:, None], column[None], mask=row_mask & (column < outer)[None])
            return total + jnp.dot(a.T, b, preferred_element_type=jnp.float32)

        steps = pl.cdiv(end - first, jnp.int32(blocks.summed))
        total = lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
        mask = (line < inner)[:, None] & (column < outer)[None]
        triton.store(dw_ref.at[group, line[:, None], column[None]], total.astype(dw_ref.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(outer, blocks.columns), pl.cdiv(inner, blocks.rows), sizes.shape[0]),
        out_shape=jax.ShapeDtypeStruct((sizes.shape[0], inner, outer), dtype),
        compiler_params=blocks.parameters(),
        interpret=interpret,
        name="grouped_matrices",
    )(ends - sizes, ends, x, dy)
