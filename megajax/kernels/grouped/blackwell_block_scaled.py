"""Products of groups of 8-bit and 4-bit codes as Pallas Mosaic kernels, for Blackwell (compute capability 10).

A code stands for itself times the scale of its block: 32 codes of 8 bits with a power of two, or 16 codes of 4 bits
with a number in e4m3. The tensor cores multiply codes and scales and sum in float32 (`tcgen05.mma` with block scaling).
Based on jax.experimental.pallas.ops.gpu.blackwell_ragged_dot_mgpu, which has no scales and computes empty tiles.

T rows, E groups. One program per multiprocessor computes cells of the result one after another. One of its warps copies
ahead, one issues the products, and the second warp group stores results.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, Ref, ShapeDtypeStruct, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from megajax.kernels.grouped.mosaic import ALIGN, divided, line, store, swizzled
from megajax.kernels.grouped.row_tiles import tiles

PROGRAMS = 148
"""Number of multiprocessors of a B200. Any number gives correct results."""
BLOCK = 128
"""Codes of a step of a sum, of each operand; rows of a cell."""
STEPS = 4
"""Number of steps whose operands are in shared memory at once."""
TILE = 32, 16
"""The scales of 128 rows and four blocks, as tensor memory takes them."""
COPY, MULTIPLY = 0, 1
"""Warps of the first warp group."""


class Scratch(NamedTuple):
    """Memory and barriers of a program."""

    a: Ref
    """Codes and scales of the operands in shared memory, by step."""
    s: Ref
    b: Ref
    t: Ref
    total: Any
    """The sum and the scales of steps in tensor memory."""
    of_a: tuple[Ref, ...]
    of_b: tuple[Ref, ...]
    block: Ref
    """Columns of the result in shared memory, on their way out."""
    filled: Ref
    """A step's operands have come."""
    freed: Ref
    """They were read."""
    summed: Any
    """The products of a cell are done."""
    stored: Any
    """Their sum was read."""

    @classmethod
    def of(cls, width: int, a: jnp.dtype, b: jnp.dtype, scales: jnp.dtype, out: ShapeDtypeStruct) -> dict:
        """Their types, for cells with this number of columns and codes and scales of these dtypes."""
        ordered = partial(mosaic.Barrier, orders_tensor_core=True)
        whole = out.ndim == 3  # matrices; parts of a cell of rows are copied
        types = {
            "total": mosaic.TMEM((BLOCK, width), jnp.float32),
            "block": mosaic.SMEM((BLOCK, line(out.dtype)), out.dtype, transforms=swizzled(out.dtype) if whole else ()),
            "filled": mosaic.Barrier(num_arrivals=4, num_barriers=STEPS),
            "freed": ordered(num_barriers=STEPS),
            "summed": ordered(),
            "stored": ordered(),
        }
        blocks, layout = blocks_of(scales), mosaic.TMEMLayout.SCALES_LAYOUT
        for names, rows, codes in ((("a", "s", "of_a"), BLOCK, a), (("b", "t", "of_b"), width, b)):
            shapes = (STEPS, rows, BLOCK), (STEPS, rows // BLOCK, blocks // 4, *TILE), (rows, blocks)
            types[names[0]] = mosaic.SMEM(shapes[0], codes, transforms=_swizzled(codes))
            types[names[1]] = mosaic.SMEM(shapes[1], scales)
            types[names[2]] = (mosaic.TMEM(shapes[2], scales, layout=layout),) * STEPS
        return types


class Cell(NamedTuple):
    """A block of the result, of one program."""

    live: Array
    """Whether it is computed, bool []."""
    steps: Array
    """Number of blocks that it sums over, int32 []."""
    at: Callable[[Array], tuple]
    """Step -> codes and scales of both operands in global memory: references like those in shared memory."""
    to: Ref
    """Reference to the result."""
    place: tuple
    """Row and column of the cell in it."""
    span: tuple[Array, Array] | None
    """First row of the cell that is stored, and their number; None: all."""


def rows(
    x: Array, x_scales: Array, w: Array, w_scales: Array, sizes: Array, *, dtype: jnp.dtype, programs: int = PROGRAMS
) -> Array:
    """Each row times the transposed matrix of its group: see `CodeProducts.rows`."""
    (count, inner), (_, outer, _) = x.shape, w.shape
    tiled, width = tiles(sizes, count, BLOCK, ALIGN), _width(outer)
    across = outer // width
    # The last tile may start earlier, so that no copy goes beyond the last row.
    starts = jnp.minimum(tiled.first // ALIGN * ALIGN, count - BLOCK)
    of_rows = as_stored(jnp.take(_bits(x_scales), starts[:, None] + jnp.arange(BLOCK)[None], axis=0), x_scales.dtype)

    def cell(index: Array, refs: tuple) -> Cell:
        group_ref, first_ref, end_ref, start_ref, x_ref, s_ref, w_ref, t_ref, y_ref = refs
        tile, column = divided(index, across)
        group, first, end, start = (ref[tile] for ref in (group_ref, first_ref, end_ref, start_ref))
        start = pl.multiple_of(start, ALIGN)

        def at(step: Array) -> tuple:
            summed, scales = _step(step, x_scales)
            columns = pl.ds(column * width, width), pl.ds(column * (width // BLOCK), width // BLOCK)
            return (
                *(x_ref.at[pl.ds(start, BLOCK), summed], s_ref.at[pl.ds(tile, 1), 0, scales]),
                *(w_ref.at[group, columns[0], summed], t_ref.at[group, columns[1], scales]),
            )

        span = first - start, end - first
        return Cell(end > first, jnp.int32(inner // BLOCK), at, y_ref, (start, column * width), span)

    out = ShapeDtypeStruct((count, outer), dtype)
    arrays = tiled.group, tiled.first, tiled.end, starts, x, of_rows, w, as_stored(w_scales)
    return _launched(cell, tiled.group.size * across, width, out, arrays, programs)


def matrices(
    x: Array, x_scales: Array, dy: Array, dy_scales: Array, sizes: Array, *, dtype: jnp.dtype, programs: int = PROGRAMS
) -> Array:
    """The sum over each group's rows of x^T dy: see `CodeProducts.matrices`."""
    inner, outer, groups = x.shape[0], dy.shape[0], sizes.size
    width = _width(outer)
    down, across = inner // BLOCK, outer // width
    blocks = sizes // BLOCK
    starts = jnp.cumsum(blocks, dtype=jnp.int32) - blocks

    def cell(index: Array, refs: tuple) -> Cell:
        start_ref, blocks_ref, x_ref, s_ref, dy_ref, t_ref, dw_ref = refs
        group, rest = divided(index, down * across)
        row, column = divided(rest, across)
        start = start_ref[group]

        def at(step: Array) -> tuple:
            summed, scales = _step(start + step, x_scales)
            columns = pl.ds(column * width, width), pl.ds(column * (width // BLOCK), width // BLOCK)
            return (
                *(x_ref.at[pl.ds(row * BLOCK, BLOCK), summed], s_ref.at[pl.ds(row, 1), scales]),
                *(dy_ref.at[columns[0], summed], t_ref.at[columns[1], scales]),
            )

        return Cell(jnp.bool(True), blocks_ref[group], at, dw_ref.at[group], (row * BLOCK, column * width), None)

    out = ShapeDtypeStruct((groups, inner, outer), dtype)
    arrays = starts, blocks, x, as_stored(x_scales), dy, as_stored(dy_scales)
    return _launched(cell, groups * down * across, width, out, arrays, programs)


def _width(outer: int) -> int:
    """Columns of a cell."""
    return 256 if outer % 256 == 0 else BLOCK


def _bits(scales: Array) -> Array:
    return lax.bitcast_convert_type(scales, jnp.uint8)


def as_stored(scales: Array, dtype: jnp.dtype | None = None) -> Array:
    """Scales [..., N, blocks] in tiles [..., N / 128, blocks / 4, 32, 16]; dtype: of scales given by their bits."""
    bits = _bits(scales) if dtype is None else scales
    *outer, height, width = bits.shape
    parts = bits.reshape(*outer, height // BLOCK, BLOCK // TILE[0], TILE[0], width // 4, 4)
    stored = jnp.moveaxis(parts, (-2, -3, -4), (-4, -3, -2)).reshape(*outer, height // BLOCK, width // 4, *TILE)
    return lax.bitcast_convert_type(stored, dtype or scales.dtype)


def blocks_of(scales: jnp.dtype) -> int:
    """Blocks of a step, by the dtype of their scales: of 32 codes, or of 16."""
    return 4 if scales == jnp.float8_e8m0fnu else 8


def _step(step: Array, scales: Array) -> tuple[pl.Slice, pl.Slice]:
    """The codes of a step along the summed dimension, and their tiles of scales."""
    count = blocks_of(scales.dtype) // 4
    return pl.ds(step * BLOCK, BLOCK), pl.ds(step * count, count)


def _swizzled(dtype: jnp.dtype) -> tuple:
    """Layout of a step's codes: lines of 128 bytes with 8 bits, of 64 with 4."""
    size = BLOCK * jnp.finfo(dtype).bits // 8
    return mosaic.TilingTransform((ALIGN, BLOCK)), mosaic.SwizzleTransform(size)  # ty: ignore[abstract-class-instantiation]


def _launched(
    cell: Callable[[Array, tuple], Cell], cells: int, width: int, out: ShapeDtypeStruct, arrays: tuple, programs: int
) -> Array:
    """The result. cell(index, references to the arrays and the result) -> Cell."""
    *_, a, scales, b, _ = arrays

    def products(*refs: Ref, **allocated: Any) -> None:
        scratch, part = Scratch(**allocated), lax.axis_index("part")

        @mosaic.nd_loop((cells,), collective_axes="sm", init_carry=(jnp.int32(0), jnp.int32(0)))
        def _(loop: mosaic.NDLoopInfo, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            earlier, number = carry
            target = cell(loop.index[0], refs)

            @pl.when(target.live & (part == 0))
            def _() -> None:
                @mosaic.warp_map
                def _(warp: Array) -> None:
                    pl.when(warp == COPY)(lambda: _copy(scratch, target, earlier))
                    pl.when((warp == MULTIPLY) & (number > 0))(lambda: mosaic.barrier_wait(scratch.stored))
                    pl.when(warp == MULTIPLY)(lambda: _multiply(scratch, target, earlier))

            pl.when(target.live & (part == 1))(lambda: _save(scratch, target, width))
            live = target.live.astype(jnp.int32)
            return earlier + live * target.steps, number + live

        mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    return mosaic.kernel(
        products,
        out_type=out,
        scratch_types=Scratch.of(width, a.dtype, b.dtype, scales.dtype, out),
        grid=(programs,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="part",
        compiler_params=mosaic.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
    )(*arrays)


def _copy(scratch: Scratch, cell: Cell, earlier: Array) -> None:
    """Copies the operands of a cell; earlier: steps of cells before it."""

    def step(index: Array, _: None) -> None:
        slot = lax.rem(earlier + index, jnp.int32(STEPS))
        pl.when(earlier + index >= STEPS)(lambda: mosaic.barrier_wait(scratch.freed.at[slot]))
        for source, to in zip(cell.at(index), (scratch.a, scratch.s, scratch.b, scratch.t), strict=True):
            mosaic.copy_gmem_to_smem(source, to.at[slot], scratch.filled.at[slot])

    lax.fori_loop(jnp.int32(0), cell.steps, step, None)


def _multiply(scratch: Scratch, cell: Cell, earlier: Array) -> None:
    """Issues the products of a cell.

    A product comes after the copies of its scales, but a copy could overtake the product before it: each slot has
    scales of its scratch, which are free when its codes are (slices of these references are not supported).
    """

    def step(index: Array, _: None) -> None:
        slot = lax.rem(earlier + index, jnp.int32(STEPS))
        mosaic.barrier_wait(scratch.filled.at[slot])
        operands = scratch.a.at[slot], scratch.b.at[slot].transpose((1, 0)), scratch.freed.at[slot]
        for number, scales in enumerate(zip(scratch.of_a, scratch.of_b, strict=True)):

            @pl.when(slot == number)
            def _(scales: tuple = scales) -> None:
                for source, to in zip((scratch.s, scratch.t), scales, strict=True):
                    mosaic.async_copy_scales_to_tmem(source.at[slot], to)
                mosaic.tcgen05_mma(scratch.total, *operands, a_scale=scales[0], b_scale=scales[1], accumulate=index > 0)

    lax.fori_loop(jnp.int32(0), cell.steps, step, None)
    mosaic.tcgen05_commit_arrive(scratch.summed)


def _save(scratch: Scratch, cell: Cell, width: int) -> None:
    """Writes the sum of a cell, zeros without steps, to the result."""
    mosaic.barrier_wait(scratch.summed)
    (row, first), columns = cell.place, scratch.block.shape[1]
    for column in range(0, width, columns):
        value = mosaic.async_load_tmem(scratch.total.at[:, pl.ds(column, columns)])
        mosaic.wait_load_tmem()
        value = jnp.where(jnp.broadcast_to(cell.steps, value.shape) > 0, value, jnp.zeros_like(value))
        store(value, cell.to, (row, first + column), scratch.block, cell.span)
    mosaic.barrier_arrive(scratch.stored)
