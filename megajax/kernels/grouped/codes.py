"""Products of groups of 8-bit codes as Pallas Mosaic kernels, for Hopper (compute capability 9.0).

A code stands for itself times the scale of its block of 128 numbers along the dimension that is summed over. The tensor
cores multiply the codes of one block, and that sum times the scales of both blocks is added to the result in float32
(DeepSeek-V3, 2024, section 3.3.2): Hopper's sums of 8-bit products have about 14 bits, and only 128 products are
summed in them. One scale per tensor is the case in which all scales are equal.

8-bit operands lie in shared memory with the summed dimension last, so gradients of matrices take transposed rows.
T rows, E groups; the programs are as in `megajax.kernels.grouped.mosaic`, but each of the two warp groups multiplies
half of a cell's rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from megajax.kernels.grouped.mosaic import ALIGN, LINE, PROGRAMS, MatmulProgram, Operand, divided, line, store, swizzled
from megajax.kernels.grouped.row_tiles import tiles

BLOCK = 128
"""Numbers of a block with one scale; side of a cell of the result."""
HALF = BLOCK // 2
STEPS = 4
"""Number of blocks of each operand that are in shared memory at once."""
SCALES = mosaic.BlockSpec((1, BLOCK), lambda i: (i, 0))
"""The scales of such a block: one of each row or column."""


def rows(
    x: Array, x_scales: Array, w: Array, w_scales: Array, sizes: Array, *, dtype: jnp.dtype, programs: int = PROGRAMS
) -> Array:
    """Each row times the transposed matrix of its group: see `CodeProducts.rows`."""
    (count, inner), (_, outer, _) = x.shape, w.shape
    tiled, across = tiles(sizes, count, BLOCK, ALIGN), outer // BLOCK
    program = MatmulProgram((_codes(x), _codes(w), SCALES), STEPS)

    def rows_of_codes(
        group_ref: Ref, first_ref: Ref, end_ref: Ref, x_ref: Ref, w_ref: Ref, s_ref: Ref, t_ref: Ref, y_ref: Ref
    ) -> None:
        part = lax.axis_index("part")

        def compute(cell: Array, allocations: Any, block: Ref) -> None:
            tile, column = divided(cell, across)
            group, first, end = group_ref[tile], first_ref[tile], end_ref[tile]
            # The last tile may start earlier, so that no copy goes beyond the last row.
            start = pl.multiple_of(jnp.minimum(first // ALIGN * ALIGN, count - BLOCK), ALIGN)

            def multiply(index: tuple, a: Ref, b: Ref, s: Ref, total: Array) -> Array:
                scales = s[0, pl.ds(part * HALF, HALF)] * t_ref[group, column, index[0]]
                mosaic.commit_smem()  # the next copy comes after this read
                return total + _product(a, b, part) * lax.broadcast_in_dim(scales, (HALF, BLOCK), (0,))

            def save(total: Array) -> None:
                low = part * HALF
                span = [jnp.clip(row - start - low, 0, HALF) for row in (first, end)]
                place = start + low, column * BLOCK
                store(total, y_ref, place, block.at[part], (span[0], span[1] - span[0]))

            @pl.when(end > first)
            def _() -> None:
                span = pl.ds(start, BLOCK)
                program.pipeline(inner // BLOCK, multiply, _summed(save))(
                    x_ref.at[span],
                    w_ref.at[group, pl.ds(column * BLOCK, BLOCK)],
                    s_ref.at[:, span],
                    allocations=allocations,
                )

        block = mosaic.SMEM((2, HALF, line(y_ref.dtype)), dtype=y_ref.dtype)
        refs = x_ref, w_ref.at[0], s_ref
        program.run(tiled.group.size * across, refs, inner // BLOCK, compute, block=block)

    out = jax.ShapeDtypeStruct((count, outer), dtype)
    arrays = x, w, x_scales.T, w_scales
    return program.launched(rows_of_codes, out, programs)(tiled.group, tiled.first, tiled.end, *arrays)


def matrices(
    x: Array, x_scales: Array, dy: Array, dy_scales: Array, sizes: Array, *, dtype: jnp.dtype, programs: int = PROGRAMS
) -> Array:
    """The sum over each group's rows of x^T dy: see `CodeProducts.matrices`."""
    (inner, count), outer, groups = x.shape, dy.shape[0], sizes.size
    down, across = inner // BLOCK, outer // BLOCK
    program = MatmulProgram((_codes(x), _codes(dy), SCALES, SCALES), STEPS)
    blocks = sizes // BLOCK
    starts = jnp.cumsum(blocks, dtype=jnp.int32) - blocks

    def matrices_of_codes(
        start_ref: Ref, blocks_ref: Ref, x_ref: Ref, dy_ref: Ref, s_ref: Ref, t_ref: Ref, dw_ref: Ref
    ) -> None:
        part = lax.axis_index("part")

        def compute(cell: Array, allocations: Any, block: Ref) -> None:
            group, rest = divided(cell, down * across)
            row, column = divided(rest, across)
            start, number = start_ref[group], blocks_ref[group]

            def multiply(_: tuple, a: Ref, b: Ref, s: Ref, t: Ref, total: Array) -> Array:
                of_rows, of_columns = s[0, pl.ds(part * HALF, HALF)], t[0]
                mosaic.commit_smem()
                by_row = lax.broadcast_in_dim(of_rows, (HALF, BLOCK), (0,))
                return total + _product(a, b, part) * by_row * lax.broadcast_in_dim(of_columns, (HALF, BLOCK), (1,))

            def save(total: Array) -> None:
                store(total, dw_ref.at[group], (row * BLOCK + part * HALF, column * BLOCK), block.at[part], None)

            # The spans may extend beyond the last row; no step reads there.
            summed = pl.ds(pl.multiple_of(start * BLOCK, BLOCK), count)
            of_rows, of_columns = pl.ds(row * BLOCK, BLOCK), pl.ds(column * BLOCK, BLOCK)
            program.pipeline(number, multiply, _summed(save))(
                x_ref.at[of_rows, summed],
                dy_ref.at[of_columns, summed],
                s_ref.at[pl.ds(start, count // BLOCK), of_rows],
                t_ref.at[pl.ds(start, count // BLOCK), of_columns],
                allocations=allocations,
            )

        block = mosaic.SMEM((2, HALF, line(dtype)), dtype=dw_ref.dtype, transforms=swizzled(dtype))
        program.run(groups * down * across, (x_ref, dy_ref, s_ref, t_ref), STEPS, compute, block=block)

    out = jax.ShapeDtypeStruct((groups, inner, outer), dtype)
    arrays = x, dy, x_scales.T, dy_scales.T
    return program.launched(matrices_of_codes, out, programs)(starts, blocks, *arrays)


def _codes(x: Array) -> mosaic.BlockSpec:
    """Blocks of codes: 128 rows or columns of a cell."""
    return Operand((BLOCK, LINE), 1).spec(x.dtype)


def _product(a: Ref, b: Any, part: Array) -> Array:
    """Codes of one block times codes of one block, for this warp group's rows of the cell: float32 [64, 128]."""

    def product(total: Any) -> Array:
        mosaic.wgmma(total, a.at[pl.ds(part * HALF, HALF)], b.transpose((1, 0)))
        return total[...]

    return pl.run_scoped(product, mosaic.ACC((HALF, BLOCK)))


def _summed(save: Callable) -> Callable:
    """Calls the steps of a cell with a sum of zero, and then save(sum)."""
    return lambda run: save(run(mosaic.layout_cast(jnp.zeros((HALF, BLOCK), jnp.float32), mosaic.Layout.WGMMA)))
