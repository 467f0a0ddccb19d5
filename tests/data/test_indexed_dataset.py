"""Token files: writing and reading, and errors for every kind of damage."""

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.data.text import indexed_dataset
from megajax.data.text.indexed_dataset import (
    CODES,
    IndexedTokens,
    IndexedWriter,
    has_modes,
    index_path,
    token_dtype,
    tokens_path,
)

DTYPES = [np.dtype(name) for name in CODES if name]

SEQUENCES = st.lists(st.integers(0, 99), max_size=4)
DOCUMENTS = st.lists(st.lists(SEQUENCES, max_size=3), max_size=5)


def write_documents(prefix: Path, documents: list[list[list[int]]], dtype: np.dtype, modes: bool) -> None:
    """modes: each sequence has one, its number in the document."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(
                [np.array(part, dtype) for part in document], [*range(len(document))] if modes else None
            )


@settings(max_examples=30, deadline=None)
@given(first=DOCUMENTS, second=DOCUMENTS, dtype=st.sampled_from(DTYPES), modes=st.booleans())
def test_files_are_read_as_written_and_merging_equals_writing_at_once(
    first: list[list[list[int]]], second: list[list[list[int]]], dtype: np.dtype, modes: bool
) -> None:
    documents = [*first, *second]
    modes = modes and any(first) and any(second)  # Without sequences a file does not show whether it has modes.
    with TemporaryDirectory() as name:
        folder = Path(name)
        for prefix, some in (("first", first), ("second", second), ("a.b", documents)):
            write_documents(folder / prefix, some, dtype, modes)
        with IndexedWriter(folder / "merged", dtype) as writer:
            writer.append_index(folder / "first")
            writer.append_index(folder / "second")
        for path in (index_path, tokens_path):
            assert path(folder / "merged").read_bytes() == path(folder / "a.b").read_bytes()
        assert sorted(path.name for path in folder.glob("a.b*")) == ["a.b.bin", "a.b.idx"]
        assert has_modes(folder / "a.b") == modes
        file = IndexedTokens(folder / "a.b", multimodal=modes)
    sequences = [part for document in documents for part in document]
    owners = [number for number, document in enumerate(documents) for _ in document]
    assert file.dtype == dtype and (len(file), file.documents) == (len(sequences), len(documents))
    assert [file.sequence(number).tolist() for number in range(len(file))] == sequences
    assert [file.sequence(number, 1, 99).tolist() for number in range(len(file))] == [part[1:] for part in sequences]
    assert [file.document_of(number) for number in range(len(file))] == owners
    assert file.document_table.tolist() == [0, *np.cumsum([len(document) for document in documents]).tolist()]
    assert file.read_all().tolist() == [token for part in sequences for token in part]
    of_modes = [place for document in documents for place in range(len(document))]
    assert (None if file.modes is None else file.modes.tolist()) == (of_modes if modes else None)


def test_the_header_equals_the_published_one(tmp_path: Path) -> None:
    """Byte for byte, by hand: magic, version 1, code 8, 2 sequences, 3 entries, lengths, offsets, documents."""
    write(tmp_path / "a", [[1, 2], [3]])
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 2, 1, 0, 4, 0, 1, 2)
    assert index_path(tmp_path / "a").read_bytes() == expected
    assert tokens_path(tmp_path / "a").read_bytes() == struct.pack("<3H", 1, 2, 3)


def test_files_of_other_kinds_are_not_mixed(tmp_path: Path) -> None:
    write_documents(tmp_path / "m", [[[1, 2], [3]]], np.dtype(np.int32), modes=True)
    with user_error():
        IndexedTokens(tmp_path / "m")
    with IndexedWriter(tmp_path / "mm", np.dtype(np.int32)) as writer:
        writer.append_index(tmp_path / "m")
        with user_error():
            writer.add_document([np.array([1])])
    write(tmp_path / "wide", [[4, 5, 6]], np.int32)
    narrow = IndexedWriter(tmp_path / "x", np.dtype("u2"))
    with user_error(), narrow as writer:
        writer.append_index(tmp_path / "wide")


def test_a_failure_leaves_the_old_files(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])
    with user_error():
        write(tmp_path / "a", [[5], [70000, -1]])
    assert IndexedTokens(tmp_path / "a").read_all().tolist() == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_dtype_for_vocabulary() -> None:
    assert [token_dtype(size).name for size in (256, 65499, 65500, None)] == ["uint16", "uint16", "int32", "int32"]


def damage(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


# Two sequences [1, 2], [3] of uint16: lengths at 34, offsets at 42, document table (3 entries) at 58, 82 bytes.
FAULTS = {
    "magic": (0, b"X", r"magic at byte 0: expected b'MMIDIDX"),
    "version": (9, b"\x02", "version at byte 9: expected 1, found 2"),
    "code": (17, b"\x09", "dtype code at byte 17: expected 1 to 8, found 9"),
    "code 0": (17, b"\x00", "dtype code at byte 17: expected 1 to 8, found 0"),
    "sequences": (18, b"\x03", "file size .* expected 94 bytes for 3 sequences .* found 82 bytes"),
    "entries": (26, b"\x00", "entries of the document table at byte 26: expected at least 1, found 0"),
    "absurd count": (25, b"\xff", "expected .* found 82 bytes"),
    "2^62 sequences": (18, struct.pack("<Q", 1 << 62), "for 4611686018427387904 sequences .* found 82 bytes"),
    "2^62 documents": (26, struct.pack("<Q", 1 << 62), "4611686018427387904 entries .* found 82 bytes"),
    "beyond the file": (50, struct.pack("<q", 2**40), f"offset of sequence 1 at byte 50: expected 4, found {2**40}"),
    "a length of 2^31 - 1": (34, struct.pack("<i", 2**31 - 1), "offset of sequence 1 at byte 50: expected 4294967294"),
    "length": (38, struct.pack("<i", -1), "length of sequence 1 at byte 38: expected 0 or more, found -1"),
    "offset": (50, struct.pack("<q", 6), "offset of sequence 1 at byte 50: expected 4, found 6"),
    "first document": (58, b"\x01", "first entry of the document table at byte 58: expected 0, found 1"),
    "decreasing": (66, struct.pack("<q", -1), "entry 1 of the document table at byte 66: expected 0 or more, found -1"),
    "last document": (74, b"\x03", "last entry of the document table at byte 74: expected 2, found 3"),
    "longer": (38, struct.pack("<i", 2), r"a.bin: expected 8 bytes .* found 6 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named(tmp_path: Path, fault: str) -> None:
    at, data, message = FAULTS[fault]
    write(tmp_path / "a", [[1, 2], [3]])
    damage(index_path(tmp_path / "a"), at, data)
    with pytest.raises(UserError, match=message) as error:
        IndexedTokens(tmp_path / "a")
    assert str(tmp_path / "a") in str(error.value)


def test_a_large_index_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not checked at each start, since with 10^9 sequences it has 20 GB."""
    write(tmp_path / "a", [[1, 2], [3], [4]])
    damage(index_path(tmp_path / "a"), 38, struct.pack("<i", 3))  # the length of a sequence in the middle
    monkeypatch.setattr(indexed_dataset, "CHECK_ROWS", 2)
    large = IndexedTokens(tmp_path / "a")
    for check in (large.check_tables, lambda: large.identity(tmp_path / "cache")):
        with user_error():
            check()
    write(tmp_path / "a", [[1, 2], [3], [4]])
    hashed, file_digest = [], hashlib.file_digest
    paths = (str(index_path(tmp_path / "a")),)

    def count(file: Any, name: str) -> Any:
        hashed.extend(path for path in paths if str(file.name) == path)
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", count)
    identities = {IndexedTokens(tmp_path / "a").identity(tmp_path / "cache") for _ in range(3)}
    assert len(hashed) == 1
    os.utime(index_path(tmp_path / "a"))
    identities.add(IndexedTokens(tmp_path / "a").identity(tmp_path / "cache"))
    assert len(hashed) == 2 and len(identities) == 1


def test_damage_is_named_by_an_optimised_python_too(tmp_path: Path) -> None:
    """python -O removes every assert."""
    write(tmp_path / "a", [[1, 2], [3]])
    damage(index_path(tmp_path / "a"), *FAULTS["last document"][:2])
    code = f"from megajax.data.text.indexed_dataset import IndexedTokens; IndexedTokens({str(tmp_path / 'a')!r})"
    process = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert "last entry of the document table at byte 74: expected 2, found 3" in process.stderr


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("change", ["missing", "empty", "short", "long"])
def test_sizes_are_checked(tmp_path: Path, suffix: str, change: str) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    path = tmp_path / f"a.{suffix}"
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "short": content[:-1], "long": content + b"\0\0\0", "missing": b""}[change])
    if change == "missing":
        path.unlink()
    with user_error():
        IndexedTokens(tmp_path / "a")
