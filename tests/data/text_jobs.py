"""Small jobs of preprocessing, and their output."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np

from megajax.data.preprocessing.options import Preprocessing
from megajax.tokenizers.config import ByteTokenizerConfig

EOD = 256


def read(prefix: Path | str) -> list[list[list[int]]]:
    """Documents of sequences of tokens, straight from the bytes of the format."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    flat = np.frombuffer(tokens, {4: "<i4", 8: "<u2"}[code])
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    table = np.frombuffer(index, "<i8", entries, 34 + 12 * sequences)
    offsets = np.cumsum(lengths)
    rows = [flat[end - length : end].tolist() for end, length in zip(offsets, lengths, strict=True)]
    assert len(flat) == lengths.sum()
    return [rows[first:last] for first, last in pairwise(table)]


def texts(prefix: Path | str) -> list[str | None]:
    """Text of each document written with the byte tokenizer; None for an empty one; its end must be marked."""
    actual = []
    for document in read(prefix):
        assert len(document) <= 1
        assert not document or document[0][-1] == EOD
        actual.append(bytes(document[0][:-1]).decode() if document else None)
    return actual


def content(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def lines(path: Path, records: list) -> Path:
    """A file with a line for each record; strings are lines already."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records))
    return path


def shown(tokens: np.ndarray) -> str:
    """Tokens of the byte tokenizer as text, with | for the end of a document."""
    return "".join("|" if token == EOD else chr(token) for token in tokens.tolist())


def job(tmp_path: Path, *inputs: Path | str, **more) -> Preprocessing:
    defaults = {"prefix": str(tmp_path / "out" / "corpus"), "tokenizer": ByteTokenizerConfig(), "append_eod": True}
    return Preprocessing(inputs=tuple(map(str, inputs)), **defaults | more)


def only_output(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out").iterdir())
