"""Failing reads: truncated files are reported; disk errors are retried, then reported."""

import errno
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_files import tokenizer, write
from user_errors import user_error

from megajax.data.images.decoding import read_at, read_bounded
from megajax.data.rows.loader import read_rows
from megajax.data.rows.shuffled_items import UnreadableItem
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig
from megajax.data.text.indexed_dataset import IndexedTokens, index_path, tokens_path
from megajax.models.decoder.config import text_schema
from megajax.storage import retried_reads
from megajax.storage.retried_reads import ChangedFile, ReadError, ReadFile, with_retries

DOCUMENTS = [list(range(1, 40)) for _ in range(20)]


@pytest.fixture
def source(tmp_path: Path) -> Any:
    config = BlendConfig(paths=(str(write(tmp_path / "text", DOCUMENTS)),), split="1", cache_dir=str(tmp_path / "c"))
    return config.build(tokenizer=tokenizer(), schema=text_schema(16, 2**31), rows=Rows(20), seed=1).train


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept before each retry."""
    seconds: list[float] = []
    monkeypatch.setattr(retried_reads.time, "sleep", seconds.append)
    return seconds


def read(source: Any, **options: Any) -> Any:
    return read_rows(source, {"tokens": text_schema(16, 2**31)["tokens"]}, 3, np.arange(2), **options)


@pytest.mark.parametrize("remaining", [0, 1, 700])
def test_a_file_truncated_while_it_is_read_is_named(source: Any, tmp_path: Path, remaining: int) -> None:
    """Read through a memory map, this ends the process with SIGBUS."""
    size = os.path.getsize(tokens_path(tmp_path / "text"))
    os.truncate(tokens_path(tmp_path / "text"), remaining)
    with pytest.raises(
        ChangedFile, match=rf"row \d+ of the data: .*text.bin: {size:,} bytes .*, {remaining} now: seq"
    ) as e:
        read_rows(source, {"tokens": text_schema(16, 2**31)["tokens"]}, 0, np.arange(20))
    assert e.value.code == 2


def test_truncated_documents_and_files_are_named(tmp_path: Path) -> None:
    side = IndexedTokens(write(tmp_path / "side", DOCUMENTS))
    os.truncate(tokens_path(side.prefix), 100)
    for read_item in (lambda: side.document(19), side.read_all, lambda: side.sequence(7, 30)):
        with user_error(kind=ChangedFile):
            read_item()
    assert side.sequence(0).tolist() == DOCUMENTS[0]
    os.truncate(index_path(side.prefix), 0)
    with user_error(kind=ChangedFile):
        side.document(19)


def failing(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> list[int]:
    """Reads by position fail with `code`, then succeed. -> the descriptors that were read."""
    requests: list[int] = []
    original: Callable[..., bytes] = os.pread

    def pread(descriptor: int, *more: Any) -> bytes:
        requests.append(descriptor)
        if len(requests) <= times:
            raise OSError(code, os.strerror(code))
        return original(descriptor, *more)

    monkeypatch.setattr(retried_reads.os, "pread", pread)
    return requests


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_transient_errors_are_retried(
    source: Any, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    expected = read(source)
    failing(monkeypatch, code, times=3)
    np.testing.assert_array_equal(read(source)["tokens"], expected["tokens"])
    assert waits == [0.25, 0.5, 1.0]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all("row 3 of the data" in line and "text.bin" in line for line in lines)
    assert f"({errno.errorcode[code]})" in lines[0] and lines[0].endswith("try 2 of 7 in 0.25 s")


def test_a_stale_handle_is_opened_again(source: Any, tmp_path: Path, waits: list[float], monkeypatch: Any) -> None:
    expected = read(source)
    # The server has another file under the name now, as after a failover: the old handle would fail.
    content = tokens_path(tmp_path / "text").read_bytes()
    tokens_path(tmp_path / "text").unlink()
    tokens_path(tmp_path / "text").write_bytes(content)
    requests, before = failing(monkeypatch, errno.ESTALE, times=1), source.tokens.file._open
    np.testing.assert_array_equal(read(source)["tokens"], expected["tokens"])
    assert len(requests) > 1 and source.tokens.file._open is not before


def test_a_stale_handle_stays_open_for_reads_of_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor's number could otherwise be reused for another file, whose bytes the read would return."""
    path = tmp_path / "text"
    path.write_bytes(b"content")
    file, original = ReadFile(path), os.pread
    former = file._descriptor().number

    def stale_elsewhere(descriptor: int, *more: Any) -> bytes:
        """While this thread reads, another one gets ESTALE."""
        file._open = None
        return original(descriptor, *more)

    monkeypatch.setattr(retried_reads.os, "pread", stale_elsewhere)
    assert file.read([(0, 7)], np.dtype(np.uint8), str).tobytes() == b"content"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(former)


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side, original = IndexedTokens(write(tmp_path / "side", DOCUMENTS)), os.pread
    monkeypatch.setattr(
        retried_reads.os, "pread", lambda descriptor, size, offset: original(descriptor, min(size, 7), offset)
    )
    assert side.read_all().tolist() == [token for document in DOCUMENTS for token in document]


def test_the_end_of_a_program_closes_files_without_a_message(tmp_path: Path) -> None:
    prefix = write(tmp_path / "side", DOCUMENTS)
    code = f"""
import os
from megajax.data.text.indexed_dataset import IndexedTokens
os.kept = IndexedTokens({str(prefix)!r})  # lives longer than the functions of the module
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stderr == ""


@pytest.mark.parametrize("retries", [0, 2])
def test_an_error_that_stays_ends_in_one_message(
    source: Any, waits: list[float], monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    requests = failing(monkeypatch, errno.EIO, times=1000)
    with user_error(kind=ReadError) as e:
        read(source, retries=retries)
    assert e.value.code == 1 and len(requests) == retries + 1 and len(waits) == retries


def test_permanent_errors_are_not_retried(source: Any, waits: list[float], monkeypatch: Any) -> None:
    failing(monkeypatch, errno.EMFILE, times=1000)
    with user_error(kind=ReadError):
        read(source)
    assert not waits


def test_opening_is_retried(tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "text", DOCUMENTS)
    calls, opened = [], os.open

    def opens(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle", str(arguments[0]))
        return opened(*arguments)

    monkeypatch.setattr(retried_reads.os, "open", opens)
    assert len(IndexedTokens(tmp_path / "text")) == 20 and waits == [0.25]


def test_a_failing_disk_is_not_the_fault_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.on_error=skip skips an unreadable image, but a failing disk must not skip all images."""
    with pytest.raises(UnreadableItem, match="No such file"):
        read_bounded(tmp_path / "absent.png", 100)

    def fails(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fails)
    for read_item in (lambda: read_bounded(tmp_path / "x.png", 100), lambda: read_at(tmp_path / "x.tar", 0, 10)):
        with pytest.raises(OSError, match="Input/output error"):
            read_item()


def test_waits_double_up_to_a_limit(waits: list[float]) -> None:
    def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with user_error(kind=ReadError):
        with_retries(fails, "it", 10)
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_reading_works_on_systems_without_some_of_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no EREMOTEIO."""
    monkeypatch.delattr(errno, "EREMOTEIO")
    assert retried_reads.TRANSIENT_ERRORS - runpy.run_path(retried_reads.__file__)["TRANSIENT_ERRORS"] == {121}
