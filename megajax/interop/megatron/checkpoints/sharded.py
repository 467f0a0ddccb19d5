"""Folders of `torch.distributed.checkpoint`, in which Megatron-LM's `torch_dist` format keeps its arrays.

`.metadata` is a pickle with the shape, dtype and chunks of every array, and the .distcp file and position of each
chunk and of each object that is no array. A chunk or an object is an archive of `torch.save`.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from megajax.config.errors import UserError
from megajax.interop.megatron.checkpoints.archive import TorchArchive, memory_map
from megajax.interop.megatron.checkpoints.pickles import DTYPES, Name, Record, TensorPlace, read_pickle
from megajax.storage.named_files import is_plain

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of an archive."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of an array."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """An array of the folder."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[Chunk, ...]


class ShardedFolder:
    """The arrays and objects of a folder.

    Attributes:
        arrays: by name.
        objects: names of the others.

    Raises:
        UserError: the folder is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.where, self._files = str(folder / METADATA), dict[str, mmap.mmap]()
        content = read_pickle(memoryview(memory_map(folder / METADATA)), self.where)
        try:
            metadata, storage = content.fields["state_dict_metadata"], content.fields["storage_data"]
            self._places = {(key.fields["fqn"], key.fields.get("offset")): info for key, info in storage.items()}
            self.arrays: Mapping[str, ShardedArray] = {
                name: self._array(name, record)
                for name, record in metadata.items()
                if record.kind.endswith(".TensorStorageMetadata")
            }
            self.objects = frozenset(metadata) - set(self.arrays)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"{self.where} does not describe a checkpoint of torch.distributed ({error!r})") from error

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray:
        """array[index]: a view of the file if it is in one chunk. Reads only the chunks that overlap the index."""
        array = self.arrays[name]
        shape, touched = array.shape[len(index) :], []
        for chunk in array.chunks:
            ahead = list(zip(index, chunk.offsets, chunk.sizes, strict=False))
            if all(start <= number < start + size for number, start, size in ahead):
                inside = tuple(number - start for number, start, _ in ahead)
                touched.append((chunk, self._values(name, array, chunk)[inside]))
        if sum(part.size for _, part in touched) != prod(shape):
            raise UserError(
                f"{self.where} is damaged: the chunks of {name} do not make up its shape {list(array.shape)}"
            )
        if len(touched) == 1:
            return touched[0][1]
        result = np.empty(shape, array.dtype)
        for chunk, part in touched:
            starts = chunk.offsets[len(index) :]
            result[tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))] = part
        return result

    def object(self, name: str) -> TorchArchive:
        """The archive of an object. Raises UserError if it is damaged or refused."""
        try:
            return self._archive(name, self._place(name, None))
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{self.where} does not describe a checkpoint of torch.distributed ({error!r})") from error

    def _archive(self, name: str, place: Place) -> TorchArchive:
        if place.file not in self._files:
            self._files[place.file] = memory_map(self.folder / place.file)
        where = f"{self.folder / place.file} ({name})"
        return TorchArchive(self._files[place.file], where, place.start, place.length)

    def _values(self, name: str, array: ShardedArray, chunk: Chunk) -> np.ndarray:
        archive = self._archive(name, chunk.place)
        if not isinstance(archive.content, TensorPlace):
            raise UserError(f"{archive.where}: a tensor was expected, not a {type(archive.content).__name__}")
        values = archive.view(archive.content)
        if values.shape != chunk.sizes or values.dtype != array.dtype:
            actual, expected = f"{values.dtype.name}{list(values.shape)}", f"{array.dtype.name}{list(chunk.sizes)}"
            raise UserError(f"{archive.where} is {actual}, but {METADATA} says {expected}")
        return values

    def _array(self, name: str, metadata: Record) -> ShardedArray:
        shape, properties = metadata.fields["size"], metadata.fields["properties"]
        dtype = properties.fields["dtype"] if "dtype" in properties.fields else properties.fields["state"][0]
        if not isinstance(dtype, Name) or dtype.dotted not in DTYPES:
            raise UserError(f"{self.where}: {name} has the unknown dtype {dtype}")
        chunks = []
        for chunk in metadata.fields["chunks"]:
            offsets, sizes = chunk.fields["offsets"], chunk.fields["sizes"]
            place = self._place(name, offsets)
            if not all(start + size <= end for start, size, end in zip(offsets, sizes, shape, strict=True)):
                raise UserError(f"{self.where} is damaged: the chunk of {name} at {offsets} is outside of {shape}")
            chunks.append(Chunk(offsets, sizes, place))
        return ShardedArray(shape, DTYPES[dtype.dotted], tuple(chunks))

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> Place:
        """The bytes of a chunk, or of an object. Raises UserError for files that are outside of the folder, missing or
        compressed, and for positions that are none.
        """
        if (name, offsets) not in self._places:
            chunk = name if offsets is None else f"the chunk of {name} at {offsets}"
            raise UserError(f"{self.where} is damaged: it has no position of {chunk}")
        info = self._places[name, offsets].fields
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if not is_plain(file):
            raise UserError(f"{self.where} was refused: it says that {name} is in {file!r}, outside of its folder")
        if file not in self._present:
            raise UserError(f"{self.where} says that {name} is in {file}, which is missing")
        if info.get("transform_descriptors"):
            raise UserError(f"{self.folder / file} is compressed ({info['transform_descriptors']}): save it without")
        if not all(type(number) is int and number >= 0 for number in (start, length)):
            raise UserError(f"{self.where} is damaged: {name} begins at {start!r} and has {length!r} bytes")
        return Place(file, start, length)

    @cached_property
    def _present(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}
