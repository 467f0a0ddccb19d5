"""Shows where weights are placed: a table, and a grid of blocks for each kind of sharding."""

import io
import sys
from collections.abc import Mapping, Sequence
from math import prod
from shutil import get_terminal_size
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.batch import Params
from megajax.layers.param import ParamSpec
from megajax.training.session import Run

MEBIBYTE = 2**20
WIDTH = 150
"""Characters of a line, but on a terminal, which has its own."""

type Span = tuple[int, int]


def visualize(run: Run) -> None:
    """Print the placement of a run's weights at rest, on process 0: the text of `drawing`.

    Example: `mj.visualize(mj.setup(mj.load("quickstart.py")))`
    """
    if jax.process_index() == 0:
        print(drawing(run, get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH))


def drawing(run: Run, width: int = WIDTH) -> str:
    """The placement of a run's weights at rest, as text of at most `width` columns.

    First a table (path, shape, logical axes, partition over the mesh, MiB on each device), then, for each kind of
    sharding, one weight as a grid of its blocks with the ids of the devices that hold each block.
    """
    declared, arrays = run.program.declared, run.state.params
    sizes = ", ".join(f"{name} {size}" for name, size in run.mesh.shape.items() if size > 1) or "all axes 1"
    count = f"{run.mesh.size} device" + "s" * (run.mesh.size > 1)
    weights, optimizer = (_mebibytes(tree) for tree in (arrays, run.state.optimizer))
    parts: list[RenderableType] = [
        Text(f"{len(arrays)} weights on {count} ({sizes}), {run.cfg.parallel.data_sharding}"),
        _table(declared, arrays),
        Text(f"each device: {weights:.3f} MiB of weights, {optimizer:.3f} MiB of optimizer state"),
    ]
    for alike in _ways(arrays):
        spec, array = declared[alike[0]], arrays[alike[0]]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        parts += [Text(f"\n{alike[0]}{more}: {_cuts(spec, array)}"), _grid(spec, array)]
    text = io.StringIO()
    # In a notebook rich would display the text instead of writing it to the file.
    Console(file=text, width=width, color_system=None, force_jupyter=False).print(Group(*parts))
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _table(declared: Mapping[str, ParamSpec], arrays: Params) -> Table:
    table = Table("weight", "shape", "logical axes", "at rest", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("MiB per device", justify="right")
    for path, array in arrays.items():
        axes = " ".join(str(name or "-") for name in declared[path].axes)
        shape = " x ".join(map(str, array.shape))
        table.add_row(path, shape, axes, _partition(array), f"{_mebibytes(array):.3f}")
    return _folding(table)


def _folding(table: Table) -> Table:
    """The table with long text over several lines where the terminal is narrow, instead of cut."""
    for column in table.columns:
        column.overflow = "fold"
    return table


def _mebibytes(tree: object) -> float:
    """MiB of the arrays on one device."""
    leaf_bytes = (prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return sum(leaf_bytes) / MEBIBYTE


def _partition(array: jax.Array) -> str:
    """Mesh axes of each dimension, "-" for an unsharded one."""
    return ", ".join("+".join(axes) or "-" for axes in _mesh_axes(array))


def _mesh_axes(array: jax.Array) -> list[tuple[str, ...]]:
    """For each dimension, the mesh axes with more than one device that shard it."""
    sharding: Any = array.sharding
    spec: PartitionSpec = sharding.spec
    entries = [*spec, *[None] * (array.ndim - len(spec))]
    axes_of_dimensions = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    return [tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1) for axes in axes_of_dimensions]


def _ways(arrays: Params) -> list[list[str]]:
    """Groups of paths sharded over the same mesh axes in the same order, in any dimensions."""
    ways: dict[tuple, list[str]] = {}
    for path, array in arrays.items():
        ways.setdefault(tuple(axes for axes in _mesh_axes(array) if axes), []).append(path)
    return list(ways.values())


def _cuts(spec: ParamSpec, array: jax.Array) -> str:
    pairs = zip(spec.axes, _mesh_axes(array), strict=True)
    return ", ".join(f"{name} over {' and '.join(axes)}" for name, axes in pairs if axes) or "whole on every device"


def _grid(spec: ParamSpec, array: jax.Array) -> RenderableType:
    """A table of blocks with the ids of their devices: the first sharded dimension down, the others across."""
    holders: dict[tuple[Span, ...], list[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        spans = tuple(part.indices(length)[:2] for part, length in zip(index, array.shape, strict=True))
        holders.setdefault(spans, []).append(device.id)
    sharded = [dimension for dimension, axes in enumerate(_mesh_axes(array)) if axes]
    down, across = sharded[:1], sharded[1:]
    rows = sorted({_at(spans, down) for spans in holders})
    columns = sorted({_at(spans, across) for spans in holders})
    cells = {(_at(spans, down), _at(spans, across)): ids for spans, ids in holders.items()}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=bool(across))
    table.add_column("")
    for column in columns:
        table.add_column(_label(spec, across, column))
    for row in rows:
        table.add_row(_label(spec, down, row) or "all", *[_ids(cells[row, column]) for column in columns])
    return _folding(table)


def _at(spans: Sequence[Span], dimensions: list[int]) -> tuple[Span, ...]:
    return tuple(spans[dimension] for dimension in dimensions)


def _label(spec: ParamSpec, dimensions: list[int], spans: tuple[Span, ...]) -> str:
    return ", ".join(_part(spec, d, *span) for d, span in zip(dimensions, spans, strict=True))


def _part(spec: ParamSpec, dimension: int, first: int, last: int) -> str:
    """ "embed 0:32"; for stacked rows the numbers of the layers, "layers 0-1, 4-5": virtual stages reorder them."""
    if spec.axes[dimension] != "layer":
        return f"{spec.axes[dimension]} {first}:{last}"
    return f"layers {_runs([layer for layer in spec.layers[first:last] if layer >= 0])}"


def _ids(devices: list[int]) -> str:
    """[0, 1, 2, 5] -> "devices 0-2, 5"."""
    return f"device{'s' * (len(devices) > 1)} {_runs(devices)}"


def _runs(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    ordered = np.sort(numbers)
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
