"""Streamed text: each format, the whole text once a pass, mixtures by weight, and resumes that see the same rows."""

import gzip
import io
import json
import os
import re
import shutil
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from user_errors import user_error

from megajax.batch import Leaf
from megajax.config import read_limits
from megajax.config.errors import UserError
from megajax.config.read_limits import Limits
from megajax.data.chat.tokenized_conversations import BadLine, json_object
from megajax.data.configs import StreamConfig
from megajax.data.preprocessing import text_formats
from megajax.data.rows.splits import Rows
from megajax.data.streams import files
from megajax.data.streams import rows as streams
from megajax.data.streams.rows import StreamRows
from megajax.storage.index_cache import checked_line
from megajax.tokenizers.config import ByteTokenizerConfig

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
COMPRESSED = pyarrow.ipc.IpcWriteOptions(compression="lz4")
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
            contents = {}
            for number, text in enumerate(texts):
                name, data = (f"{number}.txt", text) if number % 2 else (f"{number}.json", json.dumps({"text": text}))
                contents[name] = data.encode("utf-8-sig" if number % 4 else "utf-8")  # a byte order mark is not text
            write_tar(path, contents)
        case _:
            write_objects(path, [json.dumps({"text": text}) for text in texts])


def write_tar(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


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
    read, texts = [], files.StreamDocuments.texts
    monkeypatch.setattr(files.StreamDocuments, "texts", lambda self, place: read.append(place) or texts(self, place))
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
    rows, texts, encoded = (
        rows_of(tmp_path / "a.jsonl", lanes=1, cache=tmp_path / "two"),
        files.StreamDocuments.texts,
        [],
    )
    rows._sources[0]._tokenizer.encode_bytes = lambda text: encoded.append(text) or np.frombuffer(text, np.uint8)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(files.StreamDocuments, "texts", lambda self, place: texts(self, place) and os.stat("/nowhere"))
        rows[0]
    np.testing.assert_array_equal(rows[3]["tokens"], expected)
    assert len(encoded) < len(TEXTS) / 4


def test_documents_are_isolated(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["abc", "de", "f" * 40])
    row = rows_of(tmp_path / "a.jsonl", lanes=1, cache=tmp_path, shuffle=False, isolate_documents=True)[0]
    assert row["segment_ids"].tolist() == [0] * 4 + [1] * 3 + [2] * 9
    assert row["positions"].tolist() == [*range(4), *range(3), *range(9)]


def write_columns(path: Path, column: object) -> None:
    """A column in row groups, or record batches, of two rows."""
    table = pyarrow.table({"text": column, "id": list(range(len(column)))})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_that_are_not_texts_are_refused_at_the_start(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    nulls = r"rows 3 to 4: column 'text' is empty \(null\) in 1 of them"
    for column, message in (
        ([["a"], ["b"]], r"row 1: column 'text' holds list<\w+: string>, not strings"),
        ([1, 2], r"row 1: column 'text' holds int64, not strings"),
        ([b"a"], r"row 1: column 'text' holds binary, not strings"),
        (["a", "b", "c", None], nulls),
        (pyarrow.array(["a", "b", "c", None]).dictionary_encode(), nulls),
    ):
        write_columns(path, column)
        with pytest.raises(UserError, match=rf"a\.{suffix}, {message}"):
            rows_of(path, cache=tmp_path)
    parquet.write_table(pyarrow.table({"text": ["a", "b", None]}), tmp_path / "b.parquet", write_statistics=False)
    rows = rows_of(tmp_path / "b.parquet", cache=tmp_path)  # nothing tells before they are read
    with user_error():
        rows[0]
    if suffix == "parquet":
        twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
        parquet.write_table(twice, path)
        with user_error():
            rows_of(path, cache=tmp_path)
    write_columns(path, pyarrow.array(["ab", "ab", "c"], pyarrow.string()).dictionary_encode())
    assert len(set(rows_of(path, lanes=1, cache=tmp_path)[0]["tokens"].tolist())) == 4


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "tar", "array_record"])
def test_objects_that_are_not_texts_are_refused_with_their_place(suffix: str, tmp_path: Path, monkeypatch) -> None:
    """This happens at the start if it is one of the first documents, or else when it is read."""
    monkeypatch.setattr(files, "LINES_BYTES", 300)
    for line, message in (
        ('{"text": 5}', "key 'text' holds a number, not a string"),
        ('{"text": null}', "key 'text' holds a null, not a string"),
        ('{"body": "a"}', "no key 'text'; the object has 'body'. Choose keys with data.text"),
        ('["a"]', "a JSON list, but it must be an object with the keys text"),
        ('{"text": x', "not valid JSON (Expecting value at character 10)"),
    ):
        for before in (1, 99):
            lines = [*['{"text": "abc"}'] * before, line]
            place = {"tar": f"{before}.json", "array_record": f"record {before + 1}"}.get(suffix, f"line {before + 1}")
            with pytest.raises(UserError, match=re.escape(f"a.{suffix}, {place}: {message}")):
                rows = rows_of(write_objects(tmp_path / f"a.{suffix}", lines), lanes=1, cache=tmp_path, shuffle=False)
                assert before == 99
                rows[before * 4 // LENGTH]


def write_objects(path: Path, lines: list[str]) -> Path:
    """Objects, one in each line, file or record."""
    data = "".join(f"{line}\n" for line in lines).encode()
    match path.name.partition(".")[2]:
        case "tar":
            write_tar(path, {f"{number}.json": line.encode() for number, line in enumerate(lines)})
        case "array_record":
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for line in lines:
                writer.write(line.encode())
            writer.close()
        case "jsonl.zst":
            path.write_bytes(pytest.importorskip("zstandard").compress(data))
        case name:
            path.write_bytes(gzip.compress(data) if name == "jsonl.gz" else data)
    return path


def test_a_line_of_many_values_is_refused_and_a_long_text_is_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(read_limits, "VALUES", 1000)
    path = write_objects(tmp_path / "a.jsonl", ['{"text": "%s"}' % ("one, two, three and four words, " * 100)])
    assert rows_of(path, lanes=1, cache=tmp_path)[0]["tokens"].size == LENGTH
    for values in ("{}," * 2000, "1," * 2000):
        write_objects(path, [f'{{"more": [{values}0], "text": "a"}}'])
        with user_error():
            rows_of(path, lanes=1, cache=tmp_path)
        with pytest.raises(BadLine, match="holds more than 1,000 values"):
            json_object(path.read_bytes())


def test_small_files_with_large_contents_are_refused(tmp_path: Path, monkeypatch) -> None:
    """A text in many rows, one long one, and files with holes: none is in memory whole before it is refused."""
    monkeypatch.setattr(files, "CHUNK", Limits(bytes=20_000, entries=1000))
    monkeypatch.setattr(files, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(text_formats, "PIECE_BYTES", 1000)

    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=rf"{path.name}: refused: [\d,]+ {message}, at most .*MEGAJAX_READ_LIMITS"):
            rows_of(path, lanes=1, cache=tmp_path)[0]

    table = pyarrow.table({"text": ["a"] * 1001})
    parquet.write_table(table, tmp_path / "many.parquet")
    refused(tmp_path / "many.parquet", "entries")
    parquet.write_table(pyarrow.table({"text": ["a" * 30_000]}), tmp_path / "long.parquet")
    refused(tmp_path / "long.parquet", "bytes")
    parquet.write_table(pyarrow.table({"text": ["a" * 100] * 999}), tmp_path / "same.parquet")
    refused(tmp_path / "same.parquet", "bytes")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema, options=COMPRESSED) as writer:
        writer.write_table(pyarrow.table({"text": ["a" * 999] * 30}))
    refused(tmp_path / "a.arrow", "bytes")
    write_objects(tmp_path / "a.jsonl.gz", ['{"text": "%s"}' % ("a" * 30_000)])
    refused(tmp_path / "a.jsonl.gz", "bytes")
    (tmp_path / "a.jsonl").write_bytes(b"")
    os.truncate(tmp_path / "a.jsonl", 2**40)  # a hole
    refused(tmp_path / "a.jsonl", "bytes")
    (tmp_path / "blank.jsonl").write_bytes(b"\n" * 1001)
    refused(tmp_path / "blank.jsonl", "entries")
    info = tarfile.TarInfo("a.txt")
    info.size = 2**32
    (tmp_path / "a.tar").write_bytes(info.tobuf())
    os.truncate(tmp_path / "a.tar", 2**32 + 2048)
    refused(tmp_path / "a.tar", "bytes")
    (tmp_path / "b.tar").write_bytes(info.tobuf()[:156] + b"S" + info.tobuf()[157:] + bytes(1024))
    with user_error():
        rows_of(tmp_path / "b.tar", lanes=1, cache=tmp_path)


def test_damaged_counts_are_counted_again(tmp_path: Path, capsys) -> None:
    """Bits of the file of counts, and counts that no file has: a resume has the same rows."""
    write(tmp_path / "a.parquet", TEXTS)
    cache, path = tmp_path / "cache", tmp_path / "a.parquet"
    whole = rows_of(path, lanes=1, cache=cache)
    expected = [whole[row]["tokens"] for row in range(300)]
    (counts,) = (cache / "streams").glob("*/*.jsonl")
    content, known = counts.read_bytes(), rows_of(path, lanes=1, cache=cache)._sources[0].counts._counts
    assert len(known) == 10 and capsys.readouterr().err == ""
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        counts.write_bytes(damaged)
        kept = streams.TokenCounts(counts.parent)._counts
        assert len(kept) < len(known) and kept.items() <= known.items()
    assert "damaged or differ; their chunks are counted again" in capsys.readouterr().err
    unlikely = [[3, -90], [3, 9.5], [3, "9"], [True, 9], [3], [3, 9, 9], [-1, 9], [[3], 9]]
    lines = [checked_line(values) + b"\n" for values in unlikely] + [content + checked_line([3, known[3] + 1])]
    for line in (b"[3, -90]\n", b"[3, 90]\n", b"[3, 90, 0]\n", b"\xff\n", content[:-5], *lines):
        counts.write_bytes(line)
        assert streams.TokenCounts(counts.parent)._counts.items() <= known.items()
        np.testing.assert_array_equal(rows_of(path, lanes=1, cache=cache)[299]["tokens"], expected[299])
    source = rows_of(path, lanes=1, cache=cache)
    source._sources[0].counts._counts = known | {0: known[0] + 1}  # of a file that has changed since
    with user_error():
        [source[row] for row in range(300)]


def test_errors_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    with user_error("data"):
        rows_of(tmp_path / "*.parquet", cache=tmp_path)
    (tmp_path / "a.csv").write_text("x")
    with user_error():
        rows_of(tmp_path / "a.csv", cache=tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with user_error():
        rows_of(tmp_path / "a.parquet", cache=tmp_path)
    write(tmp_path / "b.parquet", TEXTS)
    with user_error():
        rows_of(tmp_path / "b.parquet", cache=tmp_path, text="content")[0]
    write(tmp_path / "c.jsonl", [""])
    with user_error("data"):
        rows_of(tmp_path / "c.jsonl", cache=tmp_path)[0]
