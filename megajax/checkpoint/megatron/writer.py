"""Writes files that `torch.load` reads, without torch: see `megajax.checkpoint.megatron.archive` for the format."""

import struct
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.megatron.archive import LOCAL_HEADER_BYTES
from megajax.checkpoint.megatron.names import LazyTensor
from megajax.checkpoint.megatron.pickles import DTYPES, Name, Record

STORAGES: Mapping[np.dtype, str] = {
    dtype: name for name, dtype in DTYPES.items() if name.endswith("Storage") and "Untyped" not in name
}
ALIGNMENT = 64
"""Bytes; storages begin at multiples of it, as torch writes them."""
ROOT = "archive"


def write_archive(path: Path, content: Any) -> None:
    """Writes what `torch.load` gives back as `content`: containers, scalars, arrays, `LazyTensor`s, records and names.

    Raises TypeError for anything else, and for dtypes that torch has no storage of.
    """
    with open(path, "wb") as file:
        write_archive_to(file, content)


def write_archive_to(file: Any, content: Any) -> None:
    """The same into an open binary file that can seek; the archive begins at its position 0."""
    tensors: list[LazyTensor] = []
    data = b"\x80\x02" + _pickled(content, tensors) + b"."
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _entry(archive, f"{ROOT}/data.pkl", data)
        _entry(archive, f"{ROOT}/byteorder", b"little")
        for number, tensor in enumerate(tensors):
            values = np.asarray(tensor.read(), tensor.dtype, order="C")
            if values.shape != tensor.shape:
                raise ValueError(f"a tensor of {values.shape} where {tensor.shape} was announced")
            _entry(archive, f"{ROOT}/data/{number}", values.reshape(-1).view(np.uint8).data)
        _entry(archive, f"{ROOT}/version", b"3\n")


def _entry(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    """An entry whose bytes are aligned."""
    info = zipfile.ZipInfo(name)
    begin = archive.fp.tell() + LOCAL_HEADER_BYTES + len(name) if archive.fp else 0
    # An extra field has a header of 4 bytes. Those of a size beyond 4 GiB come on top and cost the alignment alone.
    padding = -(begin + 4) % ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=len(data) >= zipfile.ZIP64_LIMIT) as entry:
        entry.write(data)


def _pickled(value: Any, tensors: list[LazyTensor]) -> bytes:
    """A value as opcodes of protocol 2. tensors: to which its tensors are added, in order."""
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
            call = b"\x81" if kind == NAMESPACE else b"R"
            made = _pickled(Name(kind), tensors) + _pickled(arguments, tensors) + call
            return made + (_pickled(fields, tensors) + b"b" if fields else b"")
        case tuple():
            return b"(" + b"".join(_pickled(one, tensors) for one in value) + b"t"
        case list():
            return b"](" + b"".join(_pickled(one, tensors) for one in value) + b"e"
        case Mapping():
            pairs = (_pickled(key, tensors) + _pickled(one, tensors) for key, one in value.items())
            return b"}(" + b"".join(pairs) + b"u"
        case LazyTensor():
            return _tensor(value, tensors)
        case np.ndarray():
            return _tensor(LazyTensor(value.shape, value.dtype, lambda: value), tensors)
    raise TypeError(f"a {type(value).__name__} can't be written")


NAMESPACE = "argparse.Namespace"
HOST = b"X\x03\x00\x00\x00cpu"
"""The text that stands for host memory, where tensors are loaded, as an opcode."""


def _tensor(tensor: LazyTensor, tensors: list[LazyTensor]) -> bytes:
    """The call that makes a contiguous tensor of a storage of its own."""
    if tensor.dtype not in STORAGES:
        raise TypeError(f"torch has no storage of {tensor.dtype.name}")
    place, strides = ("storage", Name(STORAGES[tensor.dtype]), str(len(tensors))), [1]
    tensors.append(tensor)
    for size in tensor.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    size = _pickled(prod(tensor.shape), [])
    storage = b"(" + b"".join(_pickled(one, []) for one in place) + HOST + size + b"tQ"
    rest = (0, tuple(tensor.shape), tuple(strides[: len(tensor.shape)]), False, Record("collections.OrderedDict"))
    arguments = b"(" + storage + b"".join(_pickled(one, []) for one in rest) + b"t"
    return _pickled(Name("torch._utils._rebuild_tensor_v2"), []) + arguments + b"R"
