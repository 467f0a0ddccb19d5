"""Writes a step of a run with only weights, from any source, a chunk at a time.

Arrays that don't fit in memory are written box by box into a folder that Orbax can read. Orbax writes the metadata
files, for scalars of the same names. The database of the arrays is then written with TensorStore, as Zarr 3 arrays
whose chunks are small enough to be buffered.
"""

import json
import shutil
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from megajax.checkpoint import array_serialization, manifest
from megajax.checkpoint.boxes import Box, box_of, chunk_shape, chunks_of
from megajax.checkpoint.step_folders import ARRAYS, META, step_name
from megajax.checkpoint.weight_source import Entry, WeightSource, converted
from megajax.checkpoint.zarr_reader import DATABASE, OBSERVED, WEIGHTS, database
from megajax.interop.weights.stored_model import Advance, StateArray
from megajax.layers.param import ParamSpec
from megajax.storage import disk


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
    shapes, paths, entries = weights.shapes, dict[str, str](), dict[str, Entry]()
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
    manifest.complete_step(step)
    return step


WRITING_BYTES = 2**26
"""Largest number of bytes that are being written in the background."""
DESCRIPTION = f"{DATABASE}/_METADATA"
SHAPES = f"{DATABASE}/array_metadatas"


class ArrayWriter:
    """The arrays of a folder. All boxes of `chunks` are written, then `finish` is called."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]):
        """path: must not exist. entries: dotted name -> shape and dtype; arrays without elements are left out."""
        self._entries = {name: entry for name, entry in entries.items() if prod(entry.shape)}
        array_serialization.start_writing(path, {name: jnp.zeros((), jnp.int32) for name in self._entries}).result()
        for name in ("d", "ocdbt.process_0"):
            shutil.rmtree(path / DATABASE / name)
        (path / DATABASE / "manifest.ocdbt").unlink()
        self._describe(path)
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._database = database(path.resolve())
        self._writing: deque[tuple[int, Any]] = deque()
        self._bytes = 0
        self._open: tuple[str, Any] = ("", None)

    def chunks(self) -> Iterator[tuple[str, Box]]:
        """Name and box of every chunk, array by array."""
        for name, (shape, dtype) in self._entries.items():
            yield from ((name, box) for box in chunks_of(box_of((), shape), chunk_shape(shape, dtype.itemsize)))

    def write(self, name: str, box: Box, values: np.ndarray) -> None:
        """Writes a chunk in the background. The caller must not change the values afterwards.

        Raises OSError if this chunk or an earlier one can't be written.
        """
        if self._open[0] != name:
            self._open = (name, self._create(name, *self._entries[name]))
        while self._writing and self._bytes + values.nbytes > WRITING_BYTES:
            self._wait()
        self._writing.append((values.nbytes, self._open[1][box].write(values)))
        self._bytes += values.nbytes

    def finish(self) -> None:
        """Waits for all chunks. Raises OSError if one can't be written."""
        while self._writing:
            self._wait()

    def abandon(self) -> None:
        """Waits until no chunk is being written and ignores errors, so that the folder can be deleted."""
        while self._writing:
            self._writing.popleft()[1].exception()

    def _wait(self) -> None:
        size, future = self._writing.popleft()
        with _as_os_error():
            future.result()
        self._bytes -= size

    def _create(self, name: str, shape: Sequence[int], dtype: np.dtype) -> Any:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk_shape(shape, dtype.itemsize)}}
        little = [{"name": "bytes", "configuration": {"endian": "little"}}]
        metadata = {"shape": [*shape], "data_type": dtype.name, "chunk_grid": grid, "codecs": little}
        # Chunks of zeros are written too, so that a missing chunk is always an error.
        spec = {
            "driver": "zarr3",
            "kvstore": self._database | {"path": f"{name}/"},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        }
        with _as_os_error():
            return ts.open(spec, create=True, context=self._context).result()

    def _describe(self, path: Path) -> None:
        """Replaces the shapes of the scalars in Orbax's files by those of the arrays."""
        description = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        for array in description["tree_metadata"].values():
            (key,) = array["key_metadata"]
            array["value_metadata"]["write_shape"] = [*self._entries[key["key"]].shape]
        (path / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
        for file in (path / SHAPES).iterdir():
            content = json.loads(file.read_text(encoding="utf-8"))
            for array in content["array_metadatas"]:
                shape, dtype = self._entries[array["array_metadata"]["param_name"]]
                array["array_metadata"] |= {"write_shape": [*shape], "chunk_shape": chunk_shape(shape, dtype.itemsize)}
            file.write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def _as_os_error() -> Generator[None]:
    """Converts TensorStore's errors, which are ValueErrors, to OSError."""
    try:
        yield
    except ValueError as error:
        raise OSError(str(error).partition(" [")[0]) from error
