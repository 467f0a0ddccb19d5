"""Reads and writes files of `torch.save` without torch: zip archives of a pickle (data.pkl) and storages (data/KEY).

The entries are not compressed. Tensors that are read are views of the memory-mapped file.
"""

import io
import mmap
import struct
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget, Limits, OverBudget
from megajax.interop.megatron.checkpoints.names import LazyTensor
from megajax.interop.megatron.checkpoints.pickles import DTYPES, Name, Record, Storage, TensorPlace, read_pickle

OLD_FORMAT = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
"""First bytes of a file that torch wrote before version 1.6."""
LOCAL_HEADER = b"PK\x03\x04"
LOCAL_HEADER_BYTES = 30
LONGEST_ORDER = 16
"""Maximum bytes of the name of a byte order."""
DIRECTORY = Limits(bytes=2**25)
"""Of the list of entries of an archive, about 100 bytes each."""


def memory_map(path: Path) -> mmap.mmap:
    """The bytes of a file. Raises UserError for one that can't be read or is empty."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}") from error


class TorchArchive:
    """The output of one call of `torch.save`: a file, or a part of one.

    content: the saved object, with `TensorPlace`s for tensors, which `view` reads.
    """

    def __init__(self, data: mmap.mmap, where: str, start: int = 0, length: int | None = None):
        """data: the file that the archive is in, from byte `start` on; where: its name, for messages.

        Raises UserError if the bytes are not such an archive, or if its pickle is refused.
        """
        self.where, self._data = where, data
        self._start, self._stop = start, len(data) if length is None else start + length
        if not 0 <= start <= self._stop <= len(data):
            raise UserError(f"{where} was cut off: bytes {start} to {self._stop} of {len(data)}")
        if data[start : start + len(OLD_FORMAT)] == OLD_FORMAT:
            raise UserError(f"{where} was written by torch before 1.6: load and save it once with a newer version")
        self._entries = self._directory()
        description = next((name for name in self._entries if name.endswith("/data.pkl")), None)
        if description is None or description.count("/") != 1:
            raise UserError(f"{where} is not a file of torch.save: it holds no data.pkl")
        self._prefix = description.removesuffix("data.pkl")
        order = self._entries.get(f"{self._prefix}byteorder")
        if order is not None and order.file_size > LONGEST_ORDER:
            raise UserError(f"{where} was refused: its byte order has {order.file_size:,} bytes")
        if order is not None and bytes(self._bytes(order)) != b"little":
            raise UserError(f"{where} was written on a big-endian machine, which can't be read")
        self.content: Any = read_pickle(self._bytes(self._entries[description]), where)

    def view(self, place: TensorPlace) -> np.ndarray:
        """A tensor of the content. Raises UserError if its storage is missing or has another size."""
        if not prod(place.shape):
            return np.zeros(place.shape, place.dtype)
        start = self._storage(place.storage)
        step = place.dtype.itemsize
        return np.ndarray(
            place.shape,
            place.dtype,
            buffer=memoryview(self._data),
            offset=start + place.offset * step,
            strides=[stride * step for stride in place.strides],
        )

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        """Name -> entry. Raises UserError for an archive that torch does not write."""
        try:
            with zipfile.ZipFile(_Window(self._data, self._start, self._stop, self.where)) as archive:
                entries = archive.infolist()
        except OverBudget:
            raise
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise UserError(f"{self.where} is not a file of torch.save, or it was cut off ({error})") from error
        for entry in entries:
            parts = entry.filename.split("/")
            if ".." in parts or "" in parts or "\\" in entry.filename:
                raise UserError(f"{self.where} was refused: its entry {entry.filename!r} is not a name of torch.save")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise UserError(
                    f"{self.where} was refused: its entry {entry.filename} is compressed; torch compresses none"
                )
        names = {entry.filename: entry for entry in entries}
        if len(names) < len(entries):
            raise UserError(f"{self.where} was refused: it has two entries of one name")
        return names

    def _place(self, entry: zipfile.ZipInfo) -> int:
        """The position in the file where the bytes of an entry begin."""
        start = self._start + entry.header_offset
        header = self._data[start : start + LOCAL_HEADER_BYTES]
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        begin = start + LOCAL_HEADER_BYTES
        name = self._data[begin : begin + lengths[0]]
        begin += sum(lengths)
        misplaced = header[:4] != LOCAL_HEADER or name != entry.filename.encode()
        if misplaced or start < self._start or begin + entry.file_size > self._stop:
            raise UserError(f"{self.where} is damaged: its entry {entry.filename} is not where its directory says")
        return begin

    def _bytes(self, entry: zipfile.ZipInfo) -> memoryview:
        start = self._place(entry)
        return memoryview(self._data)[start : start + entry.file_size]

    def _storage(self, storage: Storage) -> int:
        name = f"{self._prefix}data/{storage.key}"
        if name not in self._entries:
            raise UserError(f"{self.where} is damaged: the storage {name} of a tensor is not in it")
        entry, expected = self._entries[name], storage.numel * storage.dtype.itemsize
        if entry.file_size != expected:
            raise UserError(
                f"{self.where} is damaged: the storage {name} has {entry.file_size} bytes, but {storage.numel} "
                f"elements of {storage.dtype.name} are {expected}"
            )
        return self._place(entry)


class _Window(io.RawIOBase):
    """A part of a memory-mapped file as a file object, for `zipfile`."""

    def __init__(self, data: mmap.mmap, start: int, stop: int, where: str):
        self._budget = Budget(where, DIRECTORY)
        self._data, self._start, self._stop, self._at = data, start, stop, start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: self._at, io.SEEK_END: self._stop}[whence]
        if base + offset < self._start:
            raise ValueError("a position before the archive")
        self._at = base + offset
        return self._at - self._start

    def tell(self) -> int:
        return self._at - self._start

    def read(self, size: int | None = -1) -> bytes:
        self._budget.spend(bytes=max(size or 0, 0))
        return super().read(-1 if size is None else size) or b""

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : min(self._at + len(buffer), self._stop)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


STORAGES: Mapping[np.dtype, str] = {
    dtype: name for name, dtype in DTYPES.items() if name.endswith("Storage") and "Untyped" not in name
}
ALIGNMENT = 64
"""Storages begin at multiples of this number of bytes, as in torch's files."""
ROOT = "archive"


def write_archive(path: Path, content: Any) -> None:
    """Writes containers, scalars, arrays, `LazyTensor`s, records and names, for `torch.load`.

    Raises TypeError for anything else, and for dtypes without a torch storage.
    """
    with open(path, "wb") as file:
        write_archive_to(file, content)


def write_archive_to(file: Any, content: Any) -> None:
    """`write_archive` into an open, seekable binary file; the archive begins at position 0."""
    tensors: list[LazyTensor] = []
    data = b"\x80\x02" + _pickled(content, tensors) + b"."
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _entry(archive, f"{ROOT}/data.pkl", data)
        _entry(archive, f"{ROOT}/byteorder", b"little")
        for number, tensor in enumerate(tensors):
            values = np.asarray(tensor.read(), tensor.dtype, order="C")
            if values.shape != tensor.shape:
                raise ValueError(f"a tensor has shape {values.shape}, but was declared as {tensor.shape}")
            _entry(archive, f"{ROOT}/data/{number}", values.reshape(-1).view(np.uint8).data)
        _entry(archive, f"{ROOT}/version", b"3\n")


def _entry(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    """Writes an entry with aligned bytes."""
    info = zipfile.ZipInfo(name)
    begin = archive.fp.tell() + LOCAL_HEADER_BYTES + len(name) if archive.fp else 0
    # An extra field has a header of 4 bytes. Entries beyond 4 GiB get a second extra field and lose the alignment.
    padding = -(begin + 4) % ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=len(data) >= zipfile.ZIP64_LIMIT) as entry:
        entry.write(data)


def _pickled(value: Any, tensors: list[LazyTensor]) -> bytes:
    """A value as opcodes of protocol 2. tensors: list to which its tensors are appended."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            size = value.bit_length() // 8 + 1
            fits = -(2**31) <= value < 2**31
            long = b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
            return b"J" + struct.pack("<i", value) if fits else long
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(text)) + text
        case Name(dotted):
            module, _, name = dotted.rpartition(".")
            return f"c{module}\n{name}\n".encode()
        case Record(kind, arguments, fields):
            opcode = b"\x81" if kind == NAMESPACE else b"R"
            pickled = _pickled(Name(kind), tensors) + _pickled(arguments, tensors) + opcode
            return pickled + (_pickled(fields, tensors) + b"b" if fields else b"")
        case tuple():
            return b"(" + b"".join(_pickled(item, tensors) for item in value) + b"t"
        case list():
            return b"](" + b"".join(_pickled(item, tensors) for item in value) + b"e"
        case Mapping():
            pairs = (_pickled(key, tensors) + _pickled(item, tensors) for key, item in value.items())
            return b"}(" + b"".join(pairs) + b"u"
        case LazyTensor():
            return _tensor(value, tensors)
        case np.ndarray():
            return _tensor(LazyTensor(value.shape, value.dtype, lambda: value), tensors)
    raise TypeError(f"a {type(value).__name__} can't be written")


NAMESPACE = "argparse.Namespace"
HOST = b"X\x03\x00\x00\x00cpu"
"""The opcode of "cpu", the device that tensors are loaded to."""


def _tensor(tensor: LazyTensor, tensors: list[LazyTensor]) -> bytes:
    """The call that builds a contiguous tensor with a storage of its own."""
    if tensor.dtype not in STORAGES:
        raise TypeError(f"torch has no storage for {tensor.dtype.name}")
    place, strides = ("storage", Name(STORAGES[tensor.dtype]), str(len(tensors))), [1]
    tensors.append(tensor)
    for size in tensor.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    size = _pickled(prod(tensor.shape), [])
    storage = b"(" + b"".join(_pickled(argument, []) for argument in place) + HOST + size + b"tQ"
    rest = (0, tuple(tensor.shape), tuple(strides[: len(tensor.shape)]), False, Record("collections.OrderedDict"))
    arguments = b"(" + storage + b"".join(_pickled(argument, []) for argument in rest) + b"t"
    return _pickled(Name("torch._utils._rebuild_tensor_v2"), []) + arguments + b"R"
