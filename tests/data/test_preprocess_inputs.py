"""python -m megajax.preprocess: Parquet, pairs of texts, partitions, and skipped rows."""

import codecs
import gzip
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.config.read_limits import Limits, OverBudget
from megajax.data.chat import tokenized_conversations as chats
from megajax.data.language_benchmarks import features
from megajax.data.preprocessing import text_formats
from megajax.data.preprocessing.options import parse
from megajax.data.preprocessing.preprocessing import preprocess
from megajax.data.preprocessing.text_files import EachLine, EachParagraph, MarkedLines, WholeFile, find_files
from megajax.data.preprocessing.text_formats import format_of, partitions
from megajax.inference.prompt_and_answer_files import read_prompts
from megajax.storage.local_copies import read_text
from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.config import NullTokenizerConfig
from tests.data.text_jobs import EOD, content, job, lines, only_output, read, texts

RULES = {
    "line": EachLine(),
    "paragraph": EachParagraph(),
    "marked": MarkedLines(re.compile("^= ")),
    "file": WholeFile(),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[Path]:
    """Plain text, JSON lines and compressed ones, of lines of different lengths, some blank."""
    folder, draw = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    lines = ["= one", "béta", "猫", "", " ", "x" * 70, "two\r"]
    text = "\n".join(" ".join(draw.choice(lines, n)) for n in draw.integers(0, 5, 200))
    (folder / "a.txt").write_text(text)
    (folder / "b.txt.gz").write_bytes(gzip.compress(text[:500].encode()))
    (folder / "c.txt").write_text("no end of line")
    (folder / "d.txt").write_text("")
    (folder / "e.txt").write_text(text[::-1])
    return sorted(folder.iterdir())


@pytest.mark.parametrize("rule", RULES)
def test_partitions_write_the_same_as_one(corpus, tmp_path, rule):
    expected = content(preprocess(job(tmp_path, *corpus, rule=RULES[rule])).prefixes[0])
    partitioned = job(tmp_path, *corpus, rule=RULES[rule], partitions=17, overwrite=True, chunk_bytes=3000)
    assert content(preprocess(partitioned).prefixes[0]) == expected
    assert only_output(tmp_path) == ["corpus_text_document.bin", "corpus_text_document.idx"]


MARK = "\ufeff".encode()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 8}, {"partitions": 3}])
def test_a_byte_order_mark_is_not_text(tmp_path, rule, options):
    """It is removed at the beginning of a file alone, in pairs of files too."""
    text = "first\n\n= second\n\ufeffthird\n".encode()
    for name, data in (("a", text), ("b", MARK + text), ("c", MARK + b"one\ntwo\n")):
        (tmp_path / f"{name}.txt").write_bytes(data)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(MARK + text))
    options |= {"rule": RULES[rule], "overwrite": True}
    expected = content(preprocess(job(tmp_path, tmp_path / "a.txt", **options)).prefixes[0])
    for name in ("b.txt", "b.txt.gz"):
        assert content(preprocess(job(tmp_path, tmp_path / name, **options)).prefixes[0]) == expected
    pairs = replace(sides(tmp_path, "\ufeffeins\nzwei\n", "\ufeffone\ntwo\n"), **options)
    assert [[bytes(ids) for (ids,) in read(prefix)] for prefix in preprocess(pairs).prefixes] == [
        [b"eins", b"zwei"], [b"one", b"two"]
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_wide_encodings_are_refused(tmp_path, encoding, name):
    plain = '{"text": "a"}\n'.encode(encoding)
    marked = codecs.BOM_UTF32_BE + plain if encoding == "utf-32-be" else plain
    for data, rule in itertools.product((plain, "\n\n".encode(encoding) + plain, marked), (EachLine(), WholeFile())):
        (tmp_path / name).write_bytes(data)
        with user_error():
            preprocess(job(tmp_path, tmp_path / name, rule=rule, on_error="skip"))
    assert not list(tmp_path.glob("out/*"))


READERS = {
    "evaluation": read_text,
    "prompts": lambda path: [prompt.content for prompt in read_prompts(path)],
    "benchmarks": lambda path: [line for _, line in features.read_lines(path)],
    "template": lambda path: ChatTemplate(str(path)).render([]),
    "conversations": lambda path: [line.rstrip() for _, line in chats._lines(str(path))],
}
"""Readers of text files beside those of preprocessing."""


@pytest.mark.parametrize("reader", READERS.values(), ids=[*READERS])
def test_every_reader_drops_the_mark_and_refuses_wide_encodings(tmp_path, reader):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(MARK + b"text")
    (tmp_path / "c.txt").write_bytes("text".encode("utf-16"))
    assert reader(tmp_path / "a.txt") == reader(tmp_path / "b.txt")
    with user_error():
        reader(tmp_path / "c.txt")


def test_partitions_have_about_the_same_size(tmp_path):
    for name, count in (("a", 900), ("b", 100), ("c", 500)):
        lines(tmp_path / f"{name}.jsonl", [{"text": "x" * 80}] * count)
    files = find_files([str(tmp_path)])
    base_job = partitions(files, 4, lambda file: format_of(file.format, WholeFile(), ("text",)))
    sizes = [sum(file.size for file in part) for part in base_job]
    assert len(sizes) == 4 and sum(sizes) == sum(file.size for file in files)
    assert max(sizes) - min(sizes) < 5 * 93  # a line has 93 bytes
    assert [Path(file.path).stem for part in base_job for file in part] == ["a", "a", "a", "b", "c", "c"]


BAD = ['{"text": "a"', "[]", '{"text": 5}', '{"other": "x"}', '{"text": "\\ud83d"}']


@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 40}, {"partitions": 3, "workers": 2}])
def test_invalid_rows_are_skipped_and_counted(tmp_path, options):
    records = [json.dumps({"text": f"line {number}"}) for number in range(40)]
    rows = [*records[:11], *BAD, *records[11:], BAD[0]]
    (tmp_path / "a.jsonl").write_text("".join(f"{row}\n" for row in rows))
    result = preprocess(job(tmp_path, tmp_path / "a.jsonl", on_error="skip", append_eod=True, **options))
    tokens = [bytes(ids[:-1]) for (ids,) in read(result.prefixes[0])]
    assert tokens == [*(f"line {n}".encode() for n in range(11)), b"\xed\xa0\xbd",
                      *(f"line {n}".encode() for n in range(11, 40))]  # fmt: skip
    assert (result.counts.documents, result.counts.skipped) == (41, 5)
    assert result.fault.startswith(f"{tmp_path}/a.jsonl, line 12: not valid JSON")
    assert f"5 skipped (--on-error=skip); the first: {result.fault}" in result.summary()


def test_only_invalid_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("[]\n[]\n")
    with user_error():
        preprocess(job(tmp_path, tmp_path / "a.jsonl", on_error="skip"))


def test_text_that_the_tokenizer_refuses_is_skipped_under_every_key(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"a": "1", "b": "2"}, {"a": "3", "b": "x"}, {"a": "4", "b": "5"}])
    numbers = NullTokenizerConfig(vocabulary_size=9)
    result = preprocess(job(tmp_path, source, keys=("a", "b"), tokenizer=numbers, on_error="skip", append_eod=False))
    assert [read(prefix) for prefix in result.prefixes] == [[[[1]], [[4]]], [[[2]], [[5]]]]
    assert "line 2: The null tokenizer reads numbers" in result.fault


def test_a_document_without_sentences(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "One. Two."}, {"text": " \n"}, {"text": ""}, {"text": "Three."}])
    sentences = job(tmp_path, source, split_sentences=True, append_eod=False)
    message = r"a\.jsonl, line 2: the document has no sentence: there is no text under 'text'. .* --on-error=skip"
    with pytest.raises(UserError, match=message):
        preprocess(sentences)
    result = preprocess(replace(sentences, on_error="skip"))
    assert read(result.prefixes[0]) == [[[*b"One."], [*b"Two."]], [[*b"Three."]]] and result.counts.skipped == 2


def table(path, columns, rows_per_group=None):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_per_group)
    return path


@pytest.mark.parametrize("options", [{}, {"partitions": 3}])
def test_parquet_equals_json_lines(tmp_path, options):
    records = [{"text": f"猫 {number}" * (number % 4), "title": str(number), "n": number} for number in range(90)]
    source = lines(tmp_path / "a.jsonl", records)
    expected = preprocess(job(tmp_path, source, keys=("title", "text")))
    files = [content(prefix) for prefix in expected.prefixes]
    columns = {key: [record[key] for record in records] for key in records[0]}
    grouped = table(tmp_path / "b.parquet", columns, rows_per_group=13)
    result = preprocess(job(tmp_path, grouped, keys=("title", "text"), overwrite=True, **options))
    assert [content(prefix) for prefix in result.prefixes] == files
    assert result.counts == replace(expected.counts, stored=grouped.stat().st_size)


def test_kinds_of_text_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        source = table(tmp_path / "a.parquet", {"text": pyarrow.array(["a", "猫", "a"], pyarrow.string()).cast(kind)})
        result = preprocess(job(tmp_path, source, overwrite=True))
        assert texts(result.prefixes[0]) == ["a", "猫", "a"]


def test_invalid_parquet(tmp_path):
    def message(columns, **options):
        source = table(tmp_path / "a.parquet", columns, rows_per_group=2)
        with pytest.raises(UserError) as caught:
            preprocess(job(tmp_path, source, **options))
        return str(caught.value).removeprefix(f"{tmp_path}/")

    missing = message({"body": ["x"], "id": [1]})
    assert missing == "a.parquet, row 1: no column 'text'; the file has body, id. Choose columns with --json-keys."
    assert message({"text": [1, 2]}) == "a.parquet, row 1: column 'text' holds int64, not strings."
    assert message({"text": ["a", "b", "c", None, "d"]}) == "a.parquet, row 4: column 'text' is empty (null)."
    assert message({"text": [None, None]}) == "a.parquet, row 1: column 'text' is empty (null)."
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    with user_error():
        preprocess(job(tmp_path, tmp_path / "a.parquet"))
    source = table(tmp_path / "a.parquet", {"text": ["a", None, "c"]}, rows_per_group=2)
    result = preprocess(job(tmp_path, source, on_error="skip"))
    assert texts(result.prefixes[0]) == ["a", "c"] and "row 2: column 'text' is empty" in result.fault


@pytest.mark.parametrize(("file", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_the_error_for_a_missing_package_names_the_extra(tmp_path, monkeypatch, file, package):
    for name in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / file).write_bytes(b"x")
    with user_error():
        preprocess(job(tmp_path, tmp_path / file))


def sides(tmp_path, sources: str, targets: str):
    (tmp_path / "de.txt").write_text(sources)
    (tmp_path / "en.txt").write_text(targets)
    arguments = ["--input", f"{tmp_path}/de.txt", "--target", f"{tmp_path}/en.txt", "--tokenizer=byte", "--workers=1"]
    return parse([*arguments, "--output-prefix", f"{tmp_path}/out/corpus"])[0]


@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 8}, {"partitions": 4}])
def test_lines_of_two_files_form_pairs(tmp_path, options):
    base_job = sides(tmp_path, "eins\nzwei\r\ndrei vier", "one\ntwo\nthree four\n")
    result = preprocess(replace(base_job, **options))
    assert [Path(prefix).name for prefix in result.prefixes] == ["corpus_source_document", "corpus_target_document"]
    german, english = [b"eins", b"zwei", b"drei vier"], [b"one", b"two", b"three four"]
    assert [[bytes(ids) for (ids,) in read(prefix)] for prefix in result.prefixes] == [german, english]
    stored = sum((tmp_path / name).stat().st_size for name in ("de.txt", "en.txt"))
    assert result.counts.documents == 3 and result.counts.stored == stored


def test_invalid_pairs(tmp_path):
    for sources, targets, longer, shorter in (("a\nb\nc\n", "1\n2\n", "de", "en"), ("a\n", "1\n2\n", "en", "de")):
        line = min(sources.count("\n"), targets.count("\n")) + 1
        with pytest.raises(UserError, match=rf"{shorter}\.txt has no line {line}, but .*{longer}\.txt has"):
            preprocess(replace(sides(tmp_path, sources, targets), chunk_bytes=1))
    base_job = sides(tmp_path, "a\n\nc\n", "1\n2\n3\n")
    with user_error():
        preprocess(base_job)
    result = preprocess(replace(base_job, on_error="skip"))
    assert [len(read(prefix)) for prefix in result.prefixes] == [2, 2] and result.counts.skipped == 1
    with user_error():
        preprocess(replace(base_job, inputs=(str(lines(tmp_path / "a.jsonl", [])),)))
    with user_error():
        (tmp_path / "x.txt").touch()
        preprocess(replace(base_job, inputs=(*base_job.inputs, f"{tmp_path}/x.txt")))
    with user_error("--target"):
        preprocess(replace(base_job, targets=(f"{tmp_path}/gone.txt",)))
    with user_error("--json-keys"):
        preprocess(replace(base_job, keys=("a",)))
    with user_error("--split-sentences"):
        preprocess(replace(base_job, split_sentences=True))


def test_pairs_of_keys(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"de": "a", "en": "1"}, {"de": "b", "en": ""}])
    base_job = job(tmp_path, source, keys=("de", "en"), append_eod=True, overwrite=True)
    assert [texts(prefix) for prefix in preprocess(base_job).prefixes] == [["a", "b"], ["1", None]]
    with user_error():
        preprocess(replace(base_job, pairs=True))
    result = preprocess(replace(base_job, pairs=True, on_error="skip"))
    assert [read(prefix) for prefix in result.prefixes] == [[[[97, EOD]]], [[[49, EOD]]]]


def test_a_line_that_would_exhaust_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few kilobytes may have a line of gigabytes."""
    monkeypatch.setattr(text_formats, "LIMITS", Limits(bytes=2**20))
    monkeypatch.setattr(text_formats, "PIECE_BYTES", 2**16)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"text": "a"}\n' * 3 + b"[" * 2**23)
    (text,) = find_files([str(path)])
    with pytest.raises(OverBudget, match=r"a\.jsonl\.gz: refused: .* bytes, at most 1,048,576"):
        list(text_formats.JsonLines(("text",)).chunks(text, 10, lambda data: 0))
    lines = b'{"text": "%s"}\n' % (b"a" * 2**17) * 3
    path.write_bytes(gzip.compress(lines))
    (text,) = find_files([str(path)])
    chunks = list(text_formats.JsonLines(("text",)).chunks(text, 10, lambda data: 0))
    assert b"".join(chunk.data for chunk in chunks) == lines
