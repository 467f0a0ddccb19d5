"""Trees of arrays as bytes: a line of JSON with the structure, then the arrays. Reading them runs no code."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.inference.embedder import Embedder
from megajax.inference.sampling.choose import Drawing, Edits, RowSampling
from megajax.inference.sampling.chooser import PromptScorer
from megajax.inference.speculation.prediction_heads import AfterStep
from megajax.inference.step_arrays import Bucket, StepArrays, Texts

CLASSES: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (Bucket, StepArrays, Texts, RowSampling, Drawing, Edits, AfterStep, PromptScorer, Embedder)
}
"""Named tuples that a tree may have."""
ALIGNMENT = 16
"""Arrays begin at multiples of this number of bytes."""


def encode(tree: Any) -> bytes:
    """None, numbers, texts, arrays, and tuples and mappings of them, as bytes. Raises TypeError for anything else."""
    arrays: list[np.ndarray] = []
    structure, parts, entries = _described(tree, arrays), [], []
    for array in arrays:
        stored, fill = _trimmed(array)
        entries.append([array.dtype.name, array.shape, stored.shape, fill])
        parts += [stored.tobytes(), b"\0" * (-stored.nbytes % ALIGNMENT)]
    head = json.dumps([structure, entries], separators=(",", ":")).encode() + b"\n"
    return b"".join([head, b"\0" * (-len(head) % ALIGNMENT), *parts])


def decode(data: bytes | bytearray) -> Any:
    """The tree of `encode`. Arrays without omitted columns are views of the data."""
    end = data.index(b"\n") + 1
    (structure, entries), arrays, place = json.loads(data[:end]), list[np.ndarray](), end + -end % ALIGNMENT
    for name, shape, stored, fill in entries:
        dtype, count = jnp.dtype(name), prod(stored)
        values = np.frombuffer(data, dtype, count, place).reshape(stored)
        place += count * dtype.itemsize + -(count * dtype.itemsize) % ALIGNMENT
        if shape != stored:
            values = np.concatenate([values, np.full((shape[0], shape[1] - stored[1]), fill, dtype)], axis=1)
        arrays.append(values)
    return _built(structure, arrays)


def _trimmed(array: np.ndarray) -> tuple[np.ndarray, Any]:
    """A matrix without the last columns that have one value, which are most of a table of blocks or of a mask of the
    vocabulary, and this value. Other arrays as they are."""
    if array.ndim != 2 or not array.size:
        return array, None
    fill = array[-1, -1]
    used = np.flatnonzero((array != fill).any(axis=0))
    return array[:, : int(used[-1]) + 1 if used.size else 0], fill.item()


def _described(tree: Any, arrays: list[np.ndarray]) -> Any:
    """The structure of a tree as JSON. arrays: those of the tree are appended."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case np.ndarray() | np.generic():
            arrays.append(np.asarray(tree))
            return {"array": len(arrays) - 1}
        case tuple() if hasattr(tree, "_fields"):
            name = type(tree).__name__
            if CLASSES.get(name) is not type(tree):
                raise TypeError(f"{name} is not among the named tuples that processes exchange")
            return {"class": name, "fields": [_described(value, arrays) for value in tree]}
        case tuple():
            return [_described(value, arrays) for value in tree]
        case dict():
            return {"items": [[key, _described(value, arrays)] for key, value in tree.items()]}
    raise TypeError(f"processes exchange no {type(tree).__name__}")


def _built(structure: Any, arrays: Sequence[np.ndarray]) -> Any:
    match structure:
        case list():
            return tuple(_built(part, arrays) for part in structure)
        case {"array": number}:
            return arrays[number]
        case {"class": name, "fields": fields}:
            return CLASSES[name](*(_built(part, arrays) for part in fields))
        case {"items": items}:
            return {key: _built(part, arrays) for key, part in items}
    return structure
