"""Arrays to disk and back, on any layout: the only file that imports Orbax.

A tree is stored flat, under the dotted names of its leaves ("params.blocks.norm.scale"): what is on disk then
depends on names, shapes and dtypes alone, not on the kind of containers an optimizer happens to use.
"""

import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from megajax.config.errors import UserError

type Tree = Any


def names_of(tree: Tree) -> dict[str, Any]:
    """Dotted name -> leaf. Raises ValueError if two leaves would share a name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have the same dotted name")
    return named


def _stored(leaf: Any) -> bool:
    """Arrays without elements carry nothing and Orbax refuses them: they are made anew when loading."""
    return prod(leaf.shape) > 0


def _context(partial: bool = False) -> ocp.Context:
    context = ocp.Context()
    # Weights and moments in float32 shrink by 8 % under zstd, for several times the time (benchmarks/checkpoint.py).
    context.array.saving.use_compression = False
    # A restore always says its own shardings; those of the saving run are of no use to it.
    context.array.saving.enable_write_sharding_file = False
    context.pytree.loading.partial_load = partial
    return context


def flatten(state: Tree) -> dict[str, jax.Array]:
    """The arrays to store by their names. Raises TypeError if a leaf is no jax.Array, ValueError if names collide."""
    named = names_of(state)
    strangers = [name for name, leaf in named.items() if not isinstance(leaf, jax.Array)]
    if strangers:
        raise TypeError(f"a checkpoint holds jax.Arrays only, but {', '.join(strangers[:5])} are something else")
    return {name: leaf for name, leaf in named.items() if _stored(leaf)}


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Orbax's threads log of an error that it also raises, and so do we: pages of traceback, thrice."""
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


def start_writing(path: Path, named: Mapping[str, jax.Array]) -> Any:
    """Copies arrays on any layout to host memory and returns while they are written to the new folder `path`.

    When it returns, the arrays may be donated. Called by all processes; each writes the shards it holds.
    Returns a response whose `result(timeout)` waits for the writing of all processes and raises what went wrong.
    """
    logging.getLogger("absl").addFilter(_is_news)  # adding it again changes nothing
    with _context():
        return ocp.save_async(str(path), dict(named))


def _stored_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
    return {name: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for name, leaf in ocp.metadata(str(path)).metadata.items()}


def _differences(
    stored: Mapping[str, tuple[tuple[int, ...], jnp.dtype]], wanted: Mapping[str, Any], *, cast: bool, partial: bool
) -> list[tuple[str, str, str, str]]:
    """Rows (name, fault, in the checkpoint, in this run)."""

    def show(shape: tuple[int, ...], dtype: Any) -> str:
        return f"{jnp.dtype(dtype).name}[{', '.join(map(str, shape))}]"

    rows = []
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            rows.append((name, "missing", "-", show(wanted[name].shape, wanted[name].dtype)))
        elif name not in wanted:
            if not partial:
                rows.append((name, "extra", show(*stored[name]), "-"))
        else:
            (shape, dtype), leaf = stored[name], wanted[name]
            floats = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(leaf.dtype, jnp.floating)
            if shape != tuple(leaf.shape):
                rows.append((name, "shape", show(shape, dtype), show(leaf.shape, leaf.dtype)))
            elif dtype != leaf.dtype and not (cast and floats):
                rows.append((name, "dtype", show(shape, dtype), show(leaf.shape, leaf.dtype)))
    return rows


def _table(rows: list[tuple[str, str, str, str]], most: int = 40) -> str:
    head = ("array", "fault", "in the checkpoint", "in this run")
    shown = [head, *rows[:most]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
    if len(rows) > most:
        lines.append(f"  ... and {len(rows) - most} more")
    return "\n".join(line.rstrip() for line in lines)


def read(path: Path, like: Tree, *, cast: bool = False, partial: bool = False) -> Tree:
    """Reads a tree onto the layout of `like`, each process its own shards, whatever layout it was written from.

    like: jax.ShapeDtypeStructs with shardings (in a single process a missing sharding means the first device).
    cast: lets floating-point arrays be read in another floating-point dtype; partial: `like` may name a part of
    what is stored. Raises one UserError with a table if names, shapes or dtypes differ.
    """
    wanted = names_of(like)
    stored = _stored_shapes(path)
    rows = _differences(
        stored, {name: leaf for name, leaf in wanted.items() if _stored(leaf)}, cast=cast, partial=partial
    )
    if rows:
        raise UserError(
            f"the checkpoint {path.parent} does not fit this run: {len(rows)} of its arrays differ.\n{_table(rows)}\n"
            "Use the model and optimizer settings the checkpoint was made with, or start a new run."
        )
    if jax.process_count() > 1 and any(leaf.sharding is None for leaf in wanted.values()):
        raise ValueError("with several processes every array to restore needs a sharding")
    alone = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or alone)
        for name, leaf in wanted.items()
    }
    with _context(partial):
        loaded = ocp.load(str(path), {name: leaf for name, leaf in target.items() if _stored(leaf)})
    empty = {
        name: jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=leaf.sharding)(leaf.shape, leaf.dtype)
        for name, leaf in target.items()
        if not _stored(leaf)
    }
    return jax.tree.unflatten(jax.tree.structure(like), [{**loaded, **empty}[name] for name in wanted])
