"""Saving and loading arrays with any layout: the only file that imports Orbax, which writes them.

A tree is stored flat, under the dotted names of its leaves ("params.blocks.norm.scale"). The files thus depend on
names, shapes and dtypes only, not on the container types of an optimizer.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from megajax.checkpoint.boxes import Box, box_of, shape_of
from megajax.checkpoint.weight_source import array_of
from megajax.config.errors import UserError

type Tree = Any

GROUP_BYTES = 2**29
"""Bytes to read before they are moved to the devices; an array of more is read by itself."""


class ArraySource(Protocol):
    """Stored arrays, of which parts can be read."""

    @property
    def step(self) -> object:
        """Name of the step, for messages."""
        ...

    @property
    def arrays(self) -> Mapping[str, Any]:
        """Dotted name -> an object with the shape and dtype of an array."""
        ...

    def read_all(self, wanted: Sequence[tuple[str, Box]]) -> list[np.ndarray]:
        """Boxes of arrays, verified. Raises Damaged."""
        ...


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Dotted name -> leaf. Raises ValueError if two leaves have the same name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    leaf_by_name = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(leaf_by_name) != len(leaves):
        raise ValueError("two leaves of the state have the same dotted name")
    return leaf_by_name


def _stored(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is stored: Orbax refuses arrays without elements, so loading creates them anew."""
    return prod(leaf.shape) > 0


def _context() -> ocp.Context:
    context = ocp.Context()
    # zstd shrinks float32 weights and moments by only 8 %, and takes several times as long (benchmarks/results/
    # checkpoint.json).
    context.array.saving.use_compression = False
    # A restore has its own shardings, so those of the saving run are not needed.
    context.array.saving.enable_write_sharding_file = False
    # Orbax's documented default is pinned memory on GPUs, whose pool never returns memory to the host (orbax#2090).
    context.array.saving.enable_pinned_host_transfer = False
    return context


def flatten(state: Tree) -> dict[str, jax.Array]:
    """The arrays to store, by name. Raises TypeError if a leaf is not a jax.Array, ValueError if names collide."""
    leaves = named_leaves(state)
    non_arrays = [name for name, leaf in leaves.items() if not isinstance(leaf, jax.Array)]
    if non_arrays:
        raise TypeError(f"a checkpoint holds only jax.Arrays, but {', '.join(non_arrays[:5])} have another type")
    return {name: leaf for name, leaf in leaves.items() if _stored(leaf)}


def _is_not_raised(record: logging.LogRecord) -> bool:
    """False for tracebacks that Orbax's threads log although the same error is raised here as well."""
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


def _is_late(error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether it is the error of a TensorStore callback on an event loop that Orbax has closed.

    Orbax closes the loop at the first error of a save, and that error is raised by the save itself.
    """
    # The outermost frame of a callback from C++; a call from Python has a caller.
    outermost = "" if trace is None else trace.tb_frame.f_code.co_name
    return outermost == "call_soon_threadsafe" and str(error) == "Event loop is closed"


class _IgnoreLateCallbacks:
    """sys.excepthook or sys.unraisablehook that ignores errors of late callbacks, which report them in either way."""

    def __init__(self, previous_hook: Callable[..., Any]):
        self._previous_hook = previous_hook

    def __call__(self, *raised: Any) -> None:
        if not _is_late(*(raised[1:] if len(raised) > 1 else (raised[0].exc_value, raised[0].exc_traceback))):
            self._previous_hook(*raised)


def start_writing(path: Path, arrays: Mapping[str, jax.Array]) -> Any:
    """Copies arrays to host memory, then writes them to the new folder `path` in the background.

    The arrays may be donated as soon as it returns. Called by all processes; each writes its own shards.
    Returns a response whose `result(timeout)` waits until all processes have written, and raises their errors.
    """
    logging.getLogger("absl").addFilter(_is_not_raised)  # adding the same filter again has no effect
    for name in ("excepthook", "unraisablehook"):
        if not isinstance(hook := getattr(sys, name), _IgnoreLateCallbacks):
            setattr(sys, name, _IgnoreLateCallbacks(hook))
    with _context():
        return ocp.save_async(str(path), dict(arrays))


def stored_shapes(stored: ArraySource) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
    """Dotted name -> shape and dtype of the arrays of a step."""
    return {name: (array.shape, jnp.dtype(array.dtype)) for name, array in stored.arrays.items()}


def _differences(
    stored: Mapping[str, tuple[tuple[int, ...], jnp.dtype]], expected: Mapping[str, Any]
) -> list[tuple[str, str, str, str]]:
    """Table rows (name, kind of difference, in the checkpoint, in this run)."""

    def show(shape: tuple[int, ...], dtype: jnp.dtype) -> str:
        return f"{jnp.dtype(dtype).name}[{', '.join(map(str, shape))}]"

    rows = []
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored:
            rows.append((name, "missing", "-", show(expected[name].shape, expected[name].dtype)))
        elif name not in expected:
            rows.append((name, "extra", show(*stored[name]), "-"))
        else:
            (shape, dtype), leaf = stored[name], expected[name]
            if shape != tuple(leaf.shape):
                rows.append((name, "shape", show(shape, dtype), show(leaf.shape, leaf.dtype)))
            elif dtype != leaf.dtype:
                rows.append((name, "dtype", show(shape, dtype), show(leaf.shape, leaf.dtype)))
    return rows


def _table(rows: list[tuple[str, str, str, str]], limit: int = 40) -> str:
    table = [("array", "fault", "in the checkpoint", "in this run"), *rows[:limit]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)) for row in table]
    if len(rows) > limit:
        lines.append(f"  ... and {len(rows) - limit} more")
    return "\n".join(line.rstrip() for line in lines)


def demand_fit(
    checkpoint: str, stored: Mapping[str, tuple[tuple[int, ...], jnp.dtype]], expected: Mapping[str, Any]
) -> None:
    """Raises one UserError with a table if names, shapes or dtypes differ."""
    rows = _differences(stored, expected)
    if rows:
        raise UserError(
            f"the checkpoint {checkpoint} does not match this run: {len(rows)} arrays differ.\n{_table(rows)}\n"
            "Use the model and optimizer settings of the run that saved it, or start a new run; with checkpoint.load, "
            "checkpoint.parts=weights takes only the weights, for example to train adapters or with another optimizer."
        )


def read(stored: ArraySource, like: Tree) -> Tree:
    """Reads a tree with the layout of `like`, whatever layout it was saved with. Each process reads its own shards.

    like: jax.ShapeDtypeStructs with shardings (in a single process a missing sharding means the first device).
    Raises one UserError with a table if names, shapes or dtypes differ; Damaged if a hash differs.
    """
    expected = named_leaves(like)
    to_load = {name: leaf for name, leaf in expected.items() if _stored(leaf)}
    demand_fit(str(stored.step), stored_shapes(stored), to_load)
    if jax.process_count() > 1 and any(leaf.sharding is None for leaf in expected.values()):
        raise ValueError("with several processes every array to restore needs a sharding")
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first_device)
        for name, leaf in expected.items()
    }
    loaded = dict[str, jax.Array]()
    for group in _groups({name: target[name] for name in to_load}):
        wanted = [(name, box) for name, boxes in group.items() for box in boxes]
        read_boxes = dict(zip(wanted, stored.read_all(wanted), strict=True))
        for name in group:
            loaded[name] = array_of(target[name], functools.partial(_box_values, read_boxes, name, target[name].dtype))
        jax.block_until_ready([loaded[name] for name in group])  # the memory of the group is free after this
    empty = {
        name: array_of(leaf, lambda box, dtype=leaf.dtype: np.zeros(shape_of(box), dtype))
        for name, leaf in target.items()
        if name not in to_load
    }
    return jax.tree.unflatten(jax.tree.structure(like), [{**loaded, **empty}[name] for name in expected])


def _box_values(boxes: dict[tuple[str, Box], np.ndarray], name: str, dtype: jnp.dtype, box: Box) -> np.ndarray:
    return boxes.pop((name, box)).astype(dtype, copy=False)


def _groups(target: Mapping[str, Any]) -> Iterator[dict[str, set[Box]]]:
    """Array -> its boxes on local devices, in the order of names, which is that of the files; GROUP_BYTES at a time."""
    group, size = dict[str, set[Box]](), 0
    for name in sorted(target):
        sharding, shape, itemsize = target[name].sharding, target[name].shape, np.dtype(target[name].dtype).itemsize
        boxes = {box_of(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}
        group[name], size = boxes, size + itemsize * sum(prod(shape_of(box)) for box in boxes)
        if size >= GROUP_BYTES:
            yield group
            group, size = {}, 0
    yield group
