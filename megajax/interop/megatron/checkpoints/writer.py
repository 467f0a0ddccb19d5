"""Writes files for `torch.load` without torch; see `megajax.interop.megatron.checkpoints.archive` for the format."""

import struct
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megajax.interop.megatron.checkpoints.archive import LOCAL_HEADER_BYTES
from megajax.interop.megatron.checkpoints.names import LazyTensor
from megajax.interop.megatron.checkpoints.pickles import DTYPES, Name, Record

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
