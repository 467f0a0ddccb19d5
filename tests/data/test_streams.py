"""Streamed text: each format, the whole text once a pass, mixtures by weight, and resumes that see the same rows."""

import io
import json
import os
import shutil
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from megajax.batch import Leaf
from megajax.config.errors import UserError
from megajax.data.configs import StreamConfig
from megajax.data.rows.splits import Rows
from megajax.data.streams import files
from megajax.data.streams.rows import StreamRows
from megajax.tokenizers.config import ByteTokenizerConfig

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
LENGTH = 16
TEXTS = [f"{'abcdefgh'[number % 8] * (3 + 7 * number % 50)}{number}" for number in range(120)]


def write(path: Path, texts: list[str]) -> None:
    """The texts in several chunks of a file of the format of its suffix."""
    table = pyarrow.table({"text": texts})
    match path.name.partition(".")[2]:
        case "parquet":
            parquet.write_table(table, path, row_group_size=13)
        case "arrow":
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=17)
        case "tar":
            with tarfile.open(path, "w") as tar:
                for number, text in enumerate(texts):
                    name, data = (
                        (f"{number}.txt", text) if number % 2 else (f"{number}.json", json.dumps({"text": text}))
                    )
                    stored = data.encode("utf-8-sig" if number % 4 else "utf-8")  # a byte order mark is not text
                    info = tarfile.TarInfo(name)
                    info.size = len(stored)
                    tar.addfile(info, io.BytesIO(stored))
        case "array_record":
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for text in texts:
                writer.write(json.dumps({"text": text}).encode())
            writer.close()
        case "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def rows_of(*paths: object, rows: int = 400, lanes: int = 4, cache: Path, **settings) -> StreamRows:
    config = StreamConfig(paths=tuple(map(str, paths)), lanes=lanes, cache_dir=str(cache), **settings)
    schema = {"tokens": Leaf("int32", (LENGTH,), ("seq",))}
    return config.build(tokenizer=ByteTokenizerConfig().build(), schema=schema, rows=Rows(rows), seed=5).train


@pytest.fixture(params=["parquet", "arrow", "tar", "array_record", "jsonl"])
def file(request, tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(files, "LINES_BYTES", 300)
    monkeypatch.setattr(files, "RECORDS", 11)
    write(tmp_path / f"a.{request.param}", TEXTS)
    return tmp_path / f"a.{request.param}"


def test_each_document_is_read_once_in_a_pass(file: Path, tmp_path: Path) -> None:
    source = rows_of(file, lanes=1, cache=tmp_path / "cache")
    total = sum(len(text) + 1 for text in TEXTS)
    rows = [source[row] for row in range(total // LENGTH)]
    for before, after in pairwise(rows):
        assert before["labels"][-1] == after["tokens"][0] and (before["tokens"][1:] == before["labels"][:-1]).all()
    tokens = np.concatenate([row["tokens"] for row in rows] + [rows[-1]["labels"][-1:]])
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    documents = [bytes(part[:-1].tolist()).decode() for part in parts]
    assert not Counter(documents) - Counter(TEXTS) and len(documents) >= len(TEXTS) - 2
    assert documents != [text for text in TEXTS if text in documents]  # shuffled
    again = rows_of(file, lanes=1, cache=tmp_path / "cache", shuffle=False)
    assert bytes(again[0]["tokens"].astype(np.uint8).tolist()).decode("latin-1")[: len(TEXTS[0])] == TEXTS[0]


def test_a_mixture_has_its_weights_and_resumes_anywhere(file: Path, tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "b.jsonl", [text.upper() for text in TEXTS])
    mixture = ("0.25", file, "0.75", tmp_path / "b.jsonl")
    cache = tmp_path / "cache"
    whole = rows_of(*mixture, cache=cache)
    expected = [whole[row]["tokens"] for row in range(200)]
    counts = Counter(whole.place(row)[0] for row in range(4000))
    assert abs(counts[0] - 1000) <= 4  # a row of each lane
    places = {whole.place(row) for row in range(4000)}
    assert len(places) == 4000  # no row is read twice
    read, texts = [], files.Documents.texts
    monkeypatch.setattr(files.Documents, "texts", lambda self, place: read.append(place) or texts(self, place))
    for processes, keep in ((1, True), (2, True), (3, False)):
        if not keep:
            shutil.rmtree(cache)
        parts = [rows_of(*mixture, cache=cache) for _ in range(processes)]  # each process has its own
        read.clear()
        for row in range(100, 200):
            np.testing.assert_array_equal(parts[row % processes][row]["tokens"], expected[row])
        reads = len(read)
        assert (reads < 60 * processes) == keep or not keep, reads  # with the counts, what came before is not read
    assert rows_of(*mixture, cache=cache).order() != rows_of(*mixture, cache=cache, lanes=8).order()


def test_a_read_that_fails_is_repeated_and_long_units_are_read_as_needed(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "a.jsonl", TEXTS)
    expected = rows_of(tmp_path / "a.jsonl", lanes=1, cache=tmp_path / "one")[3]["tokens"]
    rows, texts, encoded = rows_of(tmp_path / "a.jsonl", lanes=1, cache=tmp_path / "two"), files.Documents.texts, []
    rows._sources[0]._tokenizer.encode = lambda text: encoded.append(text) or np.frombuffer(text.encode(), np.uint8)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(files.Documents, "texts", lambda self, place: texts(self, place) and os.stat("/nowhere"))
        rows[0]
    np.testing.assert_array_equal(rows[3]["tokens"], expected)
    assert len(encoded) < len(TEXTS) / 4


def test_documents_are_isolated(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["abc", "de", "f" * 40])
    row = rows_of(tmp_path / "a.jsonl", lanes=1, cache=tmp_path, shuffle=False, isolate_documents=True)[0]
    assert row["segment_ids"].tolist() == [0] * 4 + [1] * 3 + [2] * 9
    assert row["positions"].tolist() == [*range(4), *range(3), *range(9)]


def test_errors_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no files match"):
        rows_of(tmp_path / "*.parquet", cache=tmp_path)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"a\.csv: the suffix is none of \.parquet"):
        rows_of(tmp_path / "a.csv", cache=tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"a\.parquet can't be read"):
        rows_of(tmp_path / "a.parquet", cache=tmp_path)
    write(tmp_path / "b.parquet", TEXTS)
    with pytest.raises(UserError, match=r"b\.parquet.*content"):
        rows_of(tmp_path / "b.parquet", cache=tmp_path, text="content")[0]
    write(tmp_path / "c.jsonl", [""])
    with pytest.raises(UserError, match="have no text"):
        rows_of(tmp_path / "c.jsonl", cache=tmp_path)[0]
