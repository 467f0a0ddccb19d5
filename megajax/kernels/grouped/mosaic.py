"""The grouped matmul as Pallas Mosaic kernels, for Hopper (compute capability 9.0).

Based on jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu. jax's own grouped matmuls, ragged_dot_mgpu and
transposed_ragged_dot_mgpu, also compute empty tiles, and they multiply rows of other groups by 0, so that a NaN in a
row past the groups reaches the gradients.

T rows, E groups; x [T, K], w [E, K, N]. One program per multiprocessor computes cells of the result one after another.
One of its three warp groups copies ahead of the others, and two multiply, each for half of a cell's columns.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from megajax.kernels.grouped.row_tiles import tiles

PROGRAMS = 132
"""Number of multiprocessors of an H100 SXM and an H200. Any number gives correct results."""
ALIGN = 8
"""Copies of rows start at multiples of this, because shared memory is laid out in tiles of 8 rows."""
LINE = 128
"""Bytes per row of such a tile."""
FEW_ROWS = 1024
"""Average rows per group below which tiles have 64 rows."""


class BlockSizes(NamedTuple):
    """Sizes of a cell of the result, multiples of 64, and of a step of its sum."""

    rows: int
    columns: int
    """128 or 256."""
    summed: int = 64
    """Elements of the contracted dimension per step."""
    steps: int = 4
    """Number of steps whose operands are in shared memory at once."""


def blocks_for(outer: int, rows: int = 128) -> BlockSizes:
    """256 columns, or 128 if fewer of them would then lie beyond the last column."""
    return BlockSizes(rows, 256 if -(-outer // 256) * 2 <= -(-outer // 128) else 128)


def tile_rows(count: int, groups: int) -> int:
    """Rows of a tile. On average, half of a group's last tile is empty."""
    return 128 if count >= FEW_ROWS * groups else 64


class Operand(NamedTuple):
    """A matrix in global memory; each step copies one block of it."""

    block: tuple[int, int]
    along: int
    """The contracted dimension: step i takes block i along it."""

    def spec(self, dtype: jnp.dtype) -> mosaic.BlockSpec:
        """The block specification for a pipeline."""
        index = (lambda i: (i, 0)) if self.along == 0 else (lambda i: (0, i))
        return mosaic.BlockSpec(self.block, index, transforms=swizzled(dtype))


def swizzled(dtype: jnp.dtype) -> tuple:
    """The layout of a block in shared memory, for copies and tensor cores, without bank conflicts."""
    tiling = mosaic.TilingTransform((ALIGN, line(dtype)))  # ty: ignore[abstract-class-instantiation] nothing calls it
    return tiling, mosaic.SwizzleTransform(LINE)  # ty: ignore[abstract-class-instantiation]


def line(dtype: jnp.dtype) -> int:
    """Elements per row of a tile in shared memory."""
    return LINE // jnp.dtype(dtype).itemsize


class MatmulProgram(NamedTuple):
    """The common parts of both kernels."""

    inputs: tuple[mosaic.BlockSpec, ...]
    """Blocks that a step reads."""
    steps: int
    """Number of steps whose inputs are in shared memory at once."""

    def pipeline(self, steps: Array | int, multiply: Callable, around: Callable) -> Callable:
        """Calls multiply(index, *inputs, sum) -> sum in each step; around(run) calls run(sum) and stores the sum."""
        # No delayed release: the copies of the next cell would not wait for the last blocks of this one.
        return mosaic.emit_pipeline_warp_specialized(
            multiply,
            grid=(steps,),
            in_specs=self.inputs,
            memory_registers=40,
            wg_axis="part",
            num_compute_wgs=2,
            max_concurrent_steps=self.steps,
            compute_context=around,
        )

    def run(self, cells: int, refs: tuple, steps: int, compute: Callable, **scratch: Any) -> None:
        """Calls compute(cell, allocations, **scratch) for the cells of this program.

        refs: the inputs, or refs like them; steps: steps of a cell, or the number in shared memory at once.
        """

        def every(allocations: Any, **scratch: Any) -> None:
            @mosaic.nd_loop((cells,), collective_axes="sm")
            def _(loop: mosaic.NDLoopInfo) -> None:
                compute(loop.index[0], allocations, **scratch)

            mosaic.wait_smem_to_gmem(0, wait_read_only=True)

        pipeline: Any = self.pipeline(steps, lambda *_: None, lambda *_: None)
        pl.run_scoped(every, allocations=pipeline.get_allocations(*refs), **scratch, collective_axes="part")

    def launched(self, kernel: Callable, out: jax.ShapeDtypeStruct, programs: int) -> Callable:
        """The kernel as a function of arrays."""
        return mosaic.kernel(
            kernel,
            out_type=out,
            grid=(programs,),
            grid_names=("sm",),
            num_threads=3,
            thread_name="part",
            compiler_params=mosaic.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
        )


def divided(index: Array, by: int) -> tuple[Array, Array]:
    """Quotient and remainder."""
    return lax.div(index, jnp.int32(by)), lax.rem(index, jnp.int32(by))


def rows(
    x: Array,
    w: Array,
    sizes: Array,
    *,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
    blocks: BlockSizes | None = None,
    programs: int = PROGRAMS,
) -> Array:
    """Each row times the matrix of its group: see `Products.rows`."""
    (count, inner), outer = x.shape, w.shape[1 if transposed else 2]
    blocks = blocks or blocks_for(outer, tile_rows(count, sizes.shape[0]))
    height, width, depth, _ = blocks
    half, tiled, across = width // 2, tiles(sizes, count, height, ALIGN), pl.cdiv(outer, width)
    matrix = Operand((width, depth), 1) if transposed else Operand((depth, width), 0)
    program = MatmulProgram((Operand((height, depth), 1).spec(x.dtype), matrix.spec(x.dtype)), blocks.steps)

    def grouped_rows(group_ref: Ref, first_ref: Ref, end_ref: Ref, x_ref: Ref, w_ref: Ref, y_ref: Ref) -> None:
        part = lax.axis_index("part")
        part_columns = pl.ds(part * half, half)

        def compute(cell: Array, allocations: Any, block: Ref) -> None:
            # Columns first: the rows of a tile are read once, and the group's matrix stays in the L2 cache.
            tile, column = divided(cell, across)
            first, end = first_ref[tile], end_ref[tile]
            # The last tile may start earlier, so that no copy goes beyond the last row.
            start = pl.multiple_of(jnp.minimum(first // ALIGN * ALIGN, count - height), ALIGN)

            def multiply(_: tuple, a: Ref, b: Ref, total: Any) -> Any:
                mosaic.wgmma(total, a, b.at[part_columns].transpose((1, 0)) if transposed else b.at[:, part_columns])
                mosaic.wgmma_wait(0)
                return total

            def around(run: Callable) -> None:
                def product(total: Ref) -> None:
                    run(total)
                    place = start, column * width + part * half
                    store(total[...], y_ref, place, block.at[part], (first - start, end - first))

                pl.run_scoped(product, mosaic.ACC((height, half)))

            @pl.when(end > first)
            def _() -> None:
                matrix, side = w_ref.at[group_ref[tile]], pl.ds(column * width, width)
                program.pipeline(inner // depth, multiply, around)(
                    x_ref.at[pl.ds(start, height)],
                    matrix.at[side] if transposed else matrix.at[:, side],
                    allocations=allocations,
                )

        block = mosaic.SMEM((2, height, line(y_ref.dtype)), dtype=y_ref.dtype)
        program.run(tiled.group.size * across, (x_ref, w_ref.at[0]), inner // depth, compute, block=block)

    out = jax.ShapeDtypeStruct((count, outer), dtype or x.dtype)
    return program.launched(grouped_rows, out, programs)(tiled.group, tiled.first, tiled.end, x, w)


def store(value: Array, ref: Ref, place: tuple, block: Any, span: tuple[Array, Array] | None) -> None:
    """Writes a cell of results to ref at `place`, through a block in shared memory with some of its columns.

    span: the first row to write and the number of rows; None: all rows. Copies have static sizes, so the rows are
    copied by powers of two.
    """
    height, width = block.shape
    row, column = place
    for at in range(0, value.shape[1], width):
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        block[...] = value[:, at : at + width].astype(block.dtype)
        mosaic.commit_smem()
        in_bounds = column + at < ref.shape[1]
        if span is None:
            to = ref.at[pl.ds(row, height), pl.ds(column + at, width)]
            pl.when(in_bounds)(partial(mosaic.copy_smem_to_gmem, block, to))
            continue
        first, count = span
        for size in (1 << bit for bit in reversed(range(height.bit_length()))):
            to = ref.at[pl.ds(row + first, size), pl.ds(column + at, width)]
            copy = partial(mosaic.copy_smem_to_gmem, block.at[pl.ds(first, size)], to)
            pl.when((count & size != 0) & in_bounds)(copy)
            first = first + (count & size)


def matrices(
    x: Array, dy: Array, sizes: Array, *, dtype: jnp.dtype, blocks: BlockSizes | None = None, programs: int = PROGRAMS
) -> Array:
    """The sum over each group's rows of x^T dy: see `Products.matrices`."""
    (count, inner), outer, groups = x.shape, dy.shape[1], sizes.shape[0]
    blocks = blocks or blocks_for(outer)
    height, width, depth, _ = blocks
    half, down, across = width // 2, pl.cdiv(inner, height), pl.cdiv(outer, width)
    program = MatmulProgram(tuple(Operand((depth, side), 0).spec(x.dtype) for side in (height, width)), blocks.steps)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    origins = starts // ALIGN * ALIGN
    steps = jnp.where(sizes > 0, -(-(ends - origins) // depth), 0)

    def grouped_matrices(
        start_ref: Ref, end_ref: Ref, origin_ref: Ref, steps_ref: Ref, x_ref: Ref, dy_ref: Ref, dw_ref: Ref
    ) -> None:
        part = lax.axis_index("part")
        part_columns = pl.ds(part * half, half)

        def compute(cell: Array, allocations: Any, block: Ref, cleared: Any) -> None:
            group, (line, column) = (rest := divided(cell, down * across))[0], divided(rest[1], across)
            start, end, last = start_ref[group], end_ref[group], steps_ref[group] - 1
            origin = pl.multiple_of(origin_ref[group], ALIGN)

            def multiply(index: tuple, a: Any, b: Ref, total: Any) -> Any:
                b = b.at[:, part_columns]

                @pl.when((index[0] == 0) | (index[0] == last))
                def _() -> None:
                    clear = partial(_clear_others, row=origin + index[0] * depth, start=start, end=end)
                    clear(b)
                    pl.when(part == 0)(partial(clear, a))
                    mosaic.commit_smem()
                    mosaic.barrier_arrive(cleared)
                    mosaic.barrier_wait(cleared)

                mosaic.wgmma(total, a.transpose((1, 0)), b)
                mosaic.wgmma_wait(0)
                return total

            def around(run: Callable) -> None:
                def product(total: Ref) -> None:
                    run(total)
                    place = line * height, column * width + part * half
                    store(total[...], dw_ref.at[group], place, block.at[part], None)

                pl.run_scoped(product, mosaic.ACC((height, half)))

            # These may extend beyond the last row, where a step reads zeros.
            span = pl.ds(origin, count)
            program.pipeline(last + 1, multiply, around)(
                x_ref.at[span, pl.ds(line * height, height)],
                dy_ref.at[span, pl.ds(column * width, width)],
                allocations=allocations,
            )

        block = mosaic.SMEM((2, height, line(dtype)), dtype=dw_ref.dtype, transforms=swizzled(dtype))
        cleared = mosaic.Barrier(num_arrivals=2)
        program.run(groups * down * across, (x_ref, dy_ref), blocks.steps, compute, block=block, cleared=cleared)

    out = jax.ShapeDtypeStruct((groups, inner, outer), dtype)
    return program.launched(grouped_matrices, out, programs)(starts, ends, origins, steps, x, dy)


def _clear_others(ref: Ref, row: Array, start: Array, end: Array) -> None:
    """Sets rows outside [start, end) of a block in shared memory to 0; `row` is its first. 0 times NaN would be NaN."""
    value = ref[...]
    index = mosaic.layout_cast(lax.broadcasted_iota(jnp.int32, ref.shape, 0), mosaic.Layout.WGMMA) + row
    ref[...] = jnp.where((index >= start) & (index < end), value, jnp.zeros_like(value))
