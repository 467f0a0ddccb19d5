"""The grouped matmul as Pallas Mosaic kernels, for Hopper (compute capability 9.0).

After jax.experimental.pallas.ops.gpu.ragged_dot_mgpu and transposed_ragged_dot_mgpu. Those compute tiles that have no
rows as well, and multiply rows of other groups by 0, so that NaN in a row past the groups reaches every gradient.

T rows, E groups; x [T, K], w [E, K, N]. One block of threads for each multiprocessor computes blocks of results one
after another; copies by the tensor memory accelerator run ahead of the tensor cores.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from megajax.kernels.grouped_tiles import tiles

PROGRAMS = 132
"""Blocks of threads: the multiprocessors of an H100 SXM and an H200. Any number is right."""
ALIGN = 8
"""Copies of rows start at multiples of this, as shared memory is laid out in tiles of 8 rows."""


class Blocks(NamedTuple):
    """Block sizes, multiples of 64."""

    rows: int = 128
    """Of results."""
    columns: int = 128
    """Of results; at most 192."""
    summed: int = 64
    """Elements of the dimension that is summed over, in one step."""
    steps: int = 4
    """Steps that are in flight at a time."""


BLOCKS = Blocks()


def _launched(kernel: Callable, out: jax.ShapeDtypeStruct, programs: int) -> Callable:
    return mosaic.kernel(
        kernel,
        out_type=out,
        grid=(programs,),
        grid_names=("sm",),
        compiler_params=mosaic.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
    )


def _swizzled(columns: int, dtype: Any) -> tuple:
    """The layout of a block in shared memory that copies and tensor cores share, without conflicts between banks."""
    size = jnp.dtype(dtype).itemsize
    swizzle = mosaic.find_swizzle(columns * size * 8)
    tiling = mosaic.TilingTransform((ALIGN, swizzle // size))  # ty: ignore[abstract-class-instantiation] nothing calls it
    return tiling, mosaic.SwizzleTransform(swizzle)  # ty: ignore[abstract-class-instantiation]


def rows(
    x: Array, w: Array, sizes: Array, *, transposed: bool = False, blocks: Blocks = BLOCKS, programs: int = PROGRAMS
) -> Array:
    """Each row times the matrix of its group: see `Products.rows`."""
    (count, inner), outer = x.shape, w.shape[1 if transposed else 2]
    height = blocks.rows if count >= blocks.rows else 64
    found, across = tiles(sizes, count, height, ALIGN), pl.cdiv(outer, blocks.columns)
    side = (blocks.columns, blocks.summed) if transposed else (blocks.summed, blocks.columns)

    def grouped_rows(group_ref: Any, first_ref: Any, end_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        @mosaic.nd_loop((found.group.size * across,), collective_axes="sm")
        def _(loop: mosaic.NDLoopInfo) -> None:
            # Columns first: the rows of a tile are read once, and the group's matrix stays in the L2 cache.
            tile, column = lax.div(loop.index[0], jnp.int32(across)), lax.rem(loop.index[0], jnp.int32(across))
            first, end = first_ref[tile], end_ref[tile]

            @pl.when(end > first)
            def _() -> None:
                # The last tile may begin earlier, so that no copy ends after the last row.
                start = pl.multiple_of(jnp.minimum(first // ALIGN * ALIGN, count - height), ALIGN)

                def product(total: Any) -> Array:
                    mosaic.emit_pipeline(
                        lambda _, a, b: mosaic.wgmma(total, a, b.transpose((1, 0)) if transposed else b),
                        grid=(inner // blocks.summed,),
                        in_specs=[
                            mosaic.BlockSpec((height, blocks.summed), lambda i: (0, i), delay_release=1),
                            mosaic.BlockSpec(
                                side, lambda i: (column, i) if transposed else (i, column), delay_release=1
                            ),
                        ],
                        max_concurrent_steps=blocks.steps,
                    )(x_ref.at[pl.ds(start, height)], w_ref.at[group_ref[tile]])
                    return total[...]

                y = pl.run_scoped(product, mosaic.ACC((height, blocks.columns)))
                store = partial(_store_rows, y, y_ref, start, first, end, column * blocks.columns)
                pl.run_scoped(store, mosaic.SMEM((height, blocks.columns), dtype=y_ref.dtype))

    out = jax.ShapeDtypeStruct((count, outer), x.dtype)
    return _launched(grouped_rows, out, programs)(found.group, found.first, found.end, x, w)


def _store_rows(y: Array, y_ref: Any, start: Array, first: Array, end: Array, column: Array, block: Any) -> None:
    """Writes rows [first, end) of a block of results, whose first row is `start`, to y_ref.

    Copies have static sizes: there is one of each power of two that the number of rows is made of.
    """
    block[...] = y.astype(block.dtype)
    mosaic.commit_smem()
    height, width = block.shape
    count, row = end - first, first - start
    for size in (1 << bit for bit in reversed(range(height.bit_length()))):

        @pl.when(count & size != 0)
        def _(row: Array = row, size: int = size) -> None:
            to = y_ref.at[pl.ds(start + row, size), pl.ds(column, width)]
            mosaic.copy_smem_to_gmem(block.at[pl.ds(row, size)], to)

        row = row + (count & size)
    mosaic.wait_smem_to_gmem(0, wait_read_only=True)


def matrices(
    x: Array, dy: Array, sizes: Array, *, dtype: jnp.dtype, blocks: Blocks = BLOCKS, programs: int = PROGRAMS
) -> Array:
    """The sum over each group's rows of x^T dy: see `Products.matrices`."""
    (count, inner), outer = x.shape, dy.shape[1]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    origins = starts // ALIGN * ALIGN
    steps = -(-(ends - origins) // blocks.summed)
    cells = pl.cdiv(inner, blocks.rows), pl.cdiv(outer, blocks.columns)
    transforms, out_transforms = _swizzled(64, x.dtype), _swizzled(64, dtype)

    def grouped_matrices(
        start_ref: Any, end_ref: Any, origin_ref: Any, steps_ref: Any, x_ref: Any, dy_ref: Any, dw_ref: Any
    ) -> None:
        @mosaic.nd_loop((sizes.shape[0], cells[0] * cells[1]), collective_axes="sm")
        def _(loop: mosaic.NDLoopInfo) -> None:
            group = loop.index[0]
            line, column = lax.div(loop.index[1], jnp.int32(cells[1])), lax.rem(loop.index[1], jnp.int32(cells[1]))
            start, end, count_of_steps = start_ref[group], end_ref[group], steps_ref[group]
            origin = pl.multiple_of(origin_ref[group], ALIGN)

            def product(total: Any) -> Array:
                def step(index: tuple, a: Any, b: Any) -> None:
                    @pl.when((index[0] == 0) | (index[0] == count_of_steps - 1))
                    def _() -> None:
                        for ref in (a, b):
                            _clear_others(ref, origin + index[0] * blocks.summed, start, end)
                        mosaic.commit_smem()

                    mosaic.wgmma(total, a.transpose((1, 0)), b)

                @pl.when(end > start)
                def _() -> None:
                    specs = [
                        mosaic.BlockSpec(
                            (blocks.summed, size), lambda i, at=at: (i, at), delay_release=1, transforms=transforms
                        )
                        for size, at in ((blocks.rows, line), (blocks.columns, column))
                    ]
                    pipeline = mosaic.emit_pipeline(
                        step, grid=(count_of_steps,), in_specs=specs, max_concurrent_steps=blocks.steps
                    )
                    # These may reach beyond the last row; what a step reads there is 0.
                    pipeline(x_ref.at[pl.ds(origin, count), :], dy_ref.at[pl.ds(origin, count), :])

                return total[...]

            dw = pl.run_scoped(product, mosaic.ACC((blocks.rows, blocks.columns)))

            @partial(
                pl.run_scoped,
                block=mosaic.SMEM((blocks.rows, blocks.columns), dtype=dw_ref.dtype, transforms=out_transforms),
            )
            def _(block: Any) -> None:
                block[...] = dw.astype(block.dtype)
                mosaic.commit_smem()
                lines, columns = pl.ds(line * blocks.rows, blocks.rows), pl.ds(column * blocks.columns, blocks.columns)
                mosaic.copy_smem_to_gmem(block, dw_ref.at[group, lines, columns])
                mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((sizes.shape[0], inner, outer), dtype)
    return _launched(grouped_matrices, out, programs)(starts, ends, origins, steps, x, dy)


def _clear_others(ref: Any, row: Array, start: Array, end: Array) -> None:
    """Sets rows outside [start, end) of a block in shared memory to 0; `row` is its first. 0 times NaN would be NaN."""
    value = ref[...]
    index = mosaic.layout_cast(lax.broadcasted_iota(jnp.int32, ref.shape, 0), mosaic.Layout.WGMMA) + row
    ref[...] = jnp.where((index >= start) & (index < end), value, jnp.zeros_like(value))
