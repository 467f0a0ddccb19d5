"""What strategies send along the `context` mesh axis; to be called where every mesh axis is manual, in an island.

B rows, S positions of a device, T of a row, N heads.
"""

from functools import partial

from jax import Array, lax

from megajax.mesh.row_cut import AXIS, RowCut


def _same_heads(cut: RowCut) -> list[list[int]] | None:
    """Groups of devices with different positions of the same heads; None: all devices of the axis."""
    if cut.stride == 1:
        return None
    return [[first + n * cut.stride for n in range(cut.devices)] for first in range(cut.stride)]


def _same_positions(cut: RowCut) -> list[list[int]] | None:
    """Groups of neighbours that exchange heads; None: all devices of the axis."""
    if cut.exchanging == cut.devices:
        return None
    groups = range(cut.devices // cut.exchanging)
    return [[group * cut.exchanging + n for n in range(cut.exchanging)] for group in groups]


def gather_devices(cut: RowCut, x: Array) -> Array:
    """[B, S, ...] -> whole rows, device by device, [B, T, ...]."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True, axis_index_groups=_same_heads(cut))


def gather_rows(cut: RowCut, x: Array) -> Array:
    """[B, S, ...] -> whole rows in order, [B, T, ...]."""
    return cut.in_order(gather_devices(cut, x))


def reduce_rows(cut: RowCut, x: Array) -> Array:
    """The transpose of `gather_rows`: [B, T, ...] -> the sum over devices of each one's positions, [B, S, ...]."""
    return lax.psum_scatter(cut.by_device(x), AXIS, scatter_dimension=1, tiled=True, axis_index_groups=_same_heads(cut))


def from_before(cut: RowCut, x: Array, places: int) -> Array:
    """What the device so many places before this one in the ring holds."""
    total = cut.devices * cut.stride
    return lax.ppermute(x, AXIS, [(i, (i + places * cut.stride) % total) for i in range(total)])


def to_heads(cut: RowCut, x: Array) -> Array:
    """[B, S, N, ...] -> the positions of all devices of the group, in order, of a part of the heads."""
    move = partial(lax.all_to_all, axis_name=AXIS, axis_index_groups=_same_positions(cut), tiled=True)
    return cut.neighbours().in_order(move(x, split_axis=2, concat_axis=1))


def to_positions(cut: RowCut, x: Array) -> Array:
    """The inverse of `to_heads`."""
    move = partial(lax.all_to_all, axis_name=AXIS, axis_index_groups=_same_positions(cut), tiled=True)
    return move(cut.neighbours().by_device(x), split_axis=1, concat_axis=2)


def gather_group(cut: RowCut, x: Array) -> Array:
    """[B, S] -> the positions of all devices of the group, in order."""
    return cut.neighbours().in_order(
        lax.all_gather(x, AXIS, axis=1, tiled=True, axis_index_groups=_same_positions(cut))
    )
