"""Writes a step of a run with only weights, from any source, a chunk at a time."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import integrity
from megajax.checkpoint.boxes import Box
from megajax.checkpoint.folder import ARRAYS, META, step_name
from megajax.checkpoint.stored_arrays import OBSERVED, WEIGHTS
from megajax.checkpoint.weights.copying import converted
from megajax.checkpoint.weights.foreign import Entry, WeightSource
from megajax.interop.runs.array_writer import ArrayWriter
from megajax.layers.param import ParamSpec
from megajax.storage import disk

type Advance = Callable[[int], None]
"""Called with the number of elements that were written since the last call."""


class StateArray(NamedTuple):
    """An array of a run's state that is not a weight."""

    entry: Entry
    read: Callable[[Box], np.ndarray]


def write_step(
    folder: Path,
    declared: Mapping[str, ParamSpec],
    weights: WeightSource,
    meta: Mapping[str, Any],
    *,
    dtype: np.dtype,
    number: int = 0,
    state: Mapping[str, StateArray] = MappingProxyType({}),
    advance: Advance = lambda elements: None,
) -> Path:
    """Writes a step into a new checkpoints folder: weights in `dtype`, observations in float32, quantized ones as is.

    state: further arrays, by their names in a checkpoint. The caller commits the step: `folder` is below a
    `new_folder`. Raises OSError if it can't be written.
    """
    step = folder / step_name(number)
    step.mkdir(parents=True)
    shapes, paths, entries = weights.shapes(), dict[str, str](), dict[str, Entry]()
    for path, spec in declared.items():
        if path in shapes:
            name = (WEIGHTS if spec.updater is None else OBSERVED) + path
            paths[name] = path
            keeps_dtype = spec.updater is not None or spec.role == "quantized"
            entries[name] = Entry(shapes[path], jnp.dtype(spec.dtype) if keeps_dtype else dtype)
    writer = ArrayWriter(step / ARRAYS, entries | {name: array.entry for name, array in state.items()})
    try:
        for name, box in writer.chunks():
            if name in state:
                writer.write(name, box, np.asarray(state[name].read(box), state[name].entry.dtype, order="C"))
                continue
            values = converted(weights.read(paths[name], box), entries[name].dtype, f"{weights.where}: {paths[name]}")
            writer.write(name, box, values)
            advance(values.size)
        writer.finish()
    finally:
        writer.abandon()
    # Not sorted: a config.json in it keeps its order.
    text = json.dumps({"step": number, "meta": dict(meta)}, allow_nan=False, indent=1)
    disk.write_durably(step / META, text)
    integrity.complete_step(step)
    return step
