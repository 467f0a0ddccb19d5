"""python -m megajax.preprocess: its output, which is the same for any number of workers, and its errors."""

import gzip
import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from user_errors import user_error

from megajax.config import load
from megajax.config.errors import UserError
from megajax.data import progress_line
from megajax.data.preprocessing.options import parse
from megajax.data.preprocessing.preprocessing import preprocess, preprocess_text
from megajax.data.preprocessing.report import DocumentCounts, PreprocessingProgress
from megajax.data.preprocessing.text_files import (
    Chunk,
    EachLine,
    EachParagraph,
    MarkedLines,
    TextFile,
    WholeFile,
    open_text,
)
from megajax.data.preprocessing.text_formats import PlainText
from megajax.data.text.config import BlendConfig
from megajax.preprocess import main
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig
from tests.data.text_jobs import EOD, content, job, lines, only_output, read, texts

ROOT = Path(__file__).parents[2]
PREPROCESS = (sys.executable, "-m", "megajax.preprocess")


def test_an_empty_document_is_only_a_boundary(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": ""}, {"text": "c"}, {"text": ""}])
    result = preprocess(job(tmp_path, source))
    assert read(result.prefixes[0]) == [[[97, 98, EOD]], [], [[99, EOD]], []]
    assert result.counts == DocumentCounts(stored=source.stat().st_size, text=3, documents=4, empty=2, tokens=5)
    preprocess(job(tmp_path, source, append_eod=False, overwrite=True))
    assert read(result.prefixes[0]) == [[[97, 98]], [], [[99]], []]
    assert only_output(tmp_path) == ["corpus_text_document.bin", "corpus_text_document.idx"]


@pytest.mark.parametrize("append_eod", [False, True])
def test_a_sequence_for_each_sentence(tmp_path, append_eod):
    source = lines(tmp_path / "a.jsonl", [{"text": "One. Two!\n\nThree"}, {"text": " A"}])
    result = preprocess(job(tmp_path, source, append_eod=append_eod, split_sentences=True))
    end = [EOD] if append_eod else []
    assert read(result.prefixes[0]) == [[[*b"One."], [*b"Two!"], [*b"Three", *end]], [[*b"A", *end]]]
    assert result.counts.documents == 2 and result.counts.empty == 0
    assert only_output(tmp_path) == ["corpus_text_sentence.bin", "corpus_text_sentence.idx"]


def test_sentences_of_a_whole_file_are_refused(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("One. Two.\n\nThree.")
    with user_error():
        preprocess(job(tmp_path, source, split_sentences=True))
    result = preprocess(job(tmp_path, source, split_sentences=True, rule=EachParagraph(), append_eod=False))
    assert read(result.prefixes[0]) == [[[*b"One."], [*b"Two."]], [[*b"Three."]]]


def test_sentences_by_a_rule_of_your_own(tmp_path):
    tokenizer = ByteTokenizerConfig().build()
    preprocess_text(["a|b"], tmp_path / "x", tokenizer, append_eod=False, sentences=lambda text: text.split(b"|"))
    assert read(tmp_path / "x") == [[[97], [98]]]


def test_several_keys(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"title": "t", "text": "ab", "n": 3}, {"title": "", "text": "猫"}])
    result = preprocess(job(tmp_path, source, keys=("text", "title")))
    assert [Path(prefix).name for prefix in result.prefixes] == ["corpus_text_document", "corpus_title_document"]
    assert [texts(prefix) for prefix in result.prefixes] == [["ab", "猫"], ["t", None]]
    assert result.counts.documents == 2 and result.counts.empty == 0


def test_documents_of_plain_text(tmp_path):
    source = tmp_path / "a.txt"
    text = " \n = One = \n\na b\r\n = = Part = = \nc\n\n \n\n = Two = \nd"
    source.write_bytes(text.encode())

    def documents(rule):
        return texts(preprocess(job(tmp_path, source, rule=rule, overwrite=True)).prefixes[0])

    assert documents(WholeFile()) == [text]
    assert documents(EachLine()) == [" = One = ", "a b", " = = Part = = ", "c", " = Two = ", "d"]
    assert documents(EachParagraph()) == [" = One = ", "a b\r\n = = Part = = \nc", " = Two = \nd"]
    marked = documents(MarkedLines(re.compile("^ = [^=].* = $")))
    assert marked == [" = One = \n\na b\r\n = = Part = = \nc\n\n \n\n", " = Two = \nd"]
    assert " \n" + "".join(marked) == text


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> list[Path]:
    """Files of several kinds whose documents are longer and shorter than a chunk of 300 bytes."""
    folder = tmp_path_factory.mktemp("mixed")
    random = np.random.default_rng(0)
    vocabulary = ["alpha", "béta", "猫", "12", "…"]
    documents = [" ".join(random.choice(vocabulary, n)) for n in random.integers(0, 60, 150)] + ["x" * 2000, ""]
    plain = lines(folder / "a.jsonl", [{"text": document} for document in documents])
    packed = folder / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    path = folder / "c.txt"
    path.write_text("\n".join(documents))
    compressed = folder / "d.txt.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()) + gzip.compress(b"more"))
    (folder / "e.txt").write_bytes(b"")
    return [plain, packed, path, compressed, folder / "e.txt"]


@pytest.fixture(scope="module")
def one_worker(mixed, tmp_path_factory) -> tuple[bytes, bytes]:
    return content(preprocess(job(tmp_path_factory.mktemp("one"), *mixed, chunk_bytes=1 << 20)).prefixes[0])


@pytest.mark.parametrize("workers", [1, 2])
def test_same_bytes_for_any_number_of_workers(mixed, tmp_path, one_worker, workers):
    result = preprocess(job(tmp_path, *mixed, workers=workers, chunk_bytes=1500))
    assert result.workers == workers
    assert content(result.prefixes[0]) == one_worker
    assert only_output(tmp_path) == ["corpus_text_document.bin", "corpus_text_document.idx"]


RULES = (EachLine(), EachParagraph(), MarkedLines(re.compile("^=")), WholeFile())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(
    data=st.lists(st.sampled_from([b"a", b"= b", b" ", b"", b"\r", b"long " * 9])).map(b"\n".join),
    size=st.integers(1, 60),
    rule=st.sampled_from(RULES),
    packed=st.booleans(),
)
@example(data=b"a\na", size=1, rule=EachParagraph(), packed=False)
@example(data=b"a\n\na\na", size=3, rule=EachParagraph(), packed=True)
def test_chunks_consist_of_complete_documents(tmp_path, data, size, rule, packed):
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    file, plain = TextFile(str(path), "text", path.stat().st_size), PlainText(rule)
    chunks = list(plain.chunks(file, size, lambda text: max(0, len(text) - 3)))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert [chunk.start for chunk in chunks] == [sum(len(c.data) for c in chunks[:i]) for i in range(len(chunks))]
    if not isinstance(rule, WholeFile):
        documents = [document for chunk in chunks for _, document in plain.rows(chunk)]
        assert documents == [document for _, document in plain.rows(Chunk(file, 0, data, 0))]
    else:
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="needs the extra `data`")
    text = "".join(f'{{"text": "line {number}"}}\n' for number in range(5000)).encode()
    frames = [zstandard.ZstdCompressor().compress(part) for part in (text[:40_000], text[40_000:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    result = preprocess(job(tmp_path, tmp_path / "a.jsonl.zst", chunk_bytes=3000))
    assert texts(result.prefixes[0]) == [f"line {number}" for number in range(5000)]
    (tmp_path / "short.jsonl.zst").write_bytes(b"".join(frames)[:-9])
    with user_error():
        preprocess(job(tmp_path, tmp_path / "short.jsonl.zst", overwrite=True))
    (tmp_path / "not.txt.zst").write_bytes(b"plain text")
    with user_error():
        preprocess(job(tmp_path, tmp_path / "not.txt.zst", overwrite=True))


def test_folders_and_patterns(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("in/b.txt", "in/a.txt", "in/deep/c.jsonl", "in/ignored.csv", "z.txt"):
        (tmp_path / name).write_text('{"text": "c"}' if name.endswith("jsonl") else Path(name).stem)
    result = preprocess(job(tmp_path, tmp_path / "z.txt", tmp_path / "in"))
    assert texts(result.prefixes[0]) == ["z", "a", "b", "c"]
    result = preprocess(job(tmp_path, tmp_path / "in" / "[ab].txt", overwrite=True))
    assert texts(result.prefixes[0]) == ["a", "b"]
    result = preprocess(job(tmp_path, tmp_path / "in" / "ignored.csv", overwrite=True, format="text"))
    assert texts(result.prefixes[0]) == ["ignored"]


def test_byte_order_mark_blank_lines_and_half_surrogates_in_json(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "\\ud83d"}\r\n')
    result = preprocess(job(tmp_path, tmp_path / "a.jsonl", append_eod=False))
    assert read(result.prefixes[0]) == [[[97]], [[0xED, 0xA0, 0xBD]]]


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a"',
        '{"body": "a", "id": 1}',
        "{}",
        '{"text": 5}',
        '{"text": null}',
        '["a"]',
        '{"text": "\xff"}',
        "[" * 100_000,
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_lines(tmp_path, line, packed):
    data = b'{"text": "first"}\n\n' + line.encode("latin-1") + b'\n{"text": "last"}\n'
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    with user_error():
        preprocess(job(tmp_path, path, chunk_bytes=10))
    assert only_output(tmp_path) == []


@pytest.mark.parametrize("options", [{"workers": 2, "chunk_bytes": 200}, {"partitions": 3}], ids=str)
def test_the_first_bad_line_of_workers_and_partitions_is_named(tmp_path, options):
    records = [{"text": "a" * 50}] * 40
    source = lines(tmp_path / "a.jsonl", [*records, {"text": 1}, *records, {"other": 1}])
    with user_error():
        preprocess(job(tmp_path, source, **options))
    assert only_output(tmp_path) == []


def test_text_that_the_tokenizer_refuses(tmp_path):
    (tmp_path / "a.txt").write_text("1 2\n3 x\n")
    numbers = NullTokenizerConfig(vocabulary_size=9)
    with user_error():
        preprocess(job(tmp_path, tmp_path / "a.txt", tokenizer=numbers, rule=EachLine()))
    with user_error():
        preprocess(job(tmp_path, tmp_path / "a.txt", tokenizer=numbers))


def test_bad_inputs_and_outputs(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.txt.gz").write_bytes(gzip.compress(b"text" * 9999)[:-20])
    (tmp_path / "not.txt.gz").write_bytes(b"text")

    def message(*inputs, **more):
        with pytest.raises(UserError) as caught:
            preprocess(job(tmp_path, *inputs, **more))
        return str(caught.value)

    assert "gone.txt: no such file, folder or match" in message(tmp_path / "gone.txt")
    assert "*.gone: no such file" in message(tmp_path / "*.gone")
    assert "is given twice" in message(source, tmp_path / "*.jsonl")
    assert "a.csv: its name does not tell" in message(tmp_path / "a.csv")
    assert "bad.txt.gz: damaged" in message(tmp_path / "bad.txt.gz")
    assert "not.txt.gz: damaged" in message(tmp_path / "not.txt.gz")
    assert "No tokens in 1 input file(s)" in message(tmp_path / "empty.jsonl")
    assert "a.txt: plain text has no keys body" in message(tmp_path / "a.txt", keys=("body",))
    assert "'a/b' can't be part of a file name" in message(source, keys=("a/b",))
    assert "duplicate key" in message(source, keys=("text", "text"))
    assert "can't write there" in message(source, prefix=str(tmp_path / "a.txt" / "deep" / "x"))
    assert "names a folder" in message(source, prefix=f"{tmp_path}/")
    assert only_output(tmp_path) == []
    preprocess(job(tmp_path, source))
    before = content(tmp_path / "out" / "corpus_text_document")
    assert "corpus_text_document.bin: exists already" in message(source)
    assert "No tokens" in message(tmp_path / "empty.jsonl", overwrite=True)
    assert content(tmp_path / "out" / "corpus_text_document") == before
    assert only_output(tmp_path) == ["corpus_text_document.bin", "corpus_text_document.idx"]


def test_too_little_disk_space_is_an_early_error(tmp_path, monkeypatch):
    source = lines(tmp_path / "a.jsonl", [{"text": "a" * 1000}] * 100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100_000}))
    reports = []
    with user_error():
        preprocess(job(tmp_path, source, chunk_bytes=2000), lambda *report: reports.append(report))
    assert not reports and only_output(tmp_path) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_of_files_that_are_indexed(monkeypatch, stream):
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress_line.sys, "stderr", stream)
    shown = progress_line.FileProgress("images", "listing x")
    for second in range(30):
        now[0] = 100.0 + second
        shown(second * 1000, second / 30)
    shown.clear()
    live = stream.isatty()
    lines = stream.getvalue().replace("\r", "\n").split("\n")
    second = "listing x: 2,000 images, 7 %, 1,000 images/s" + "\x1b[K" * live
    assert [line for line in lines if ": 2,000 images" in line] == [second]
    # Not in the first two seconds; then each time on a terminal, and every ten seconds elsewhere.
    assert sum("images/s" in line for line in lines) == (28 if live else 3)
    assert stream.getvalue().endswith("\r\x1b[K" if live else "\n")


def test_progress_of_preprocessing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    counts = DocumentCounts(stored=25_000_000, text=20_000_000, documents=1200, tokens=1)
    plain, live = io.StringIO(), Terminal()
    reports = PreprocessingProgress(plain, 10.0), PreprocessingProgress(live, 10.0)
    for now[0] in (0.05, 5.0, 10.0, 12.0):
        for report in reports:
            report(counts, 100_000_000)
    for report in reports:
        report.clear()
    assert plain.getvalue() == "1,200 documents  2.0 MB/s  25 %  0:30 left\n"
    assert live.getvalue().count("\r1,200 documents") == 3 and live.getvalue().endswith("\r\x1b[K")


@pytest.fixture
def own_signals():
    """Restore the previous handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_command_line(tmp_path, capsys, own_signals):
    (tmp_path / "a.txt").write_text("= 1\n\nb\n= 2\n")
    arguments = ["--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/x", "--append-eod"]
    main([*arguments, "--tokenizer=byte", "--document-regex=^="])
    out = capsys.readouterr().out
    assert texts(tmp_path / "x_text_document") == ["= 1\n\nb\n", "= 2\n"]
    assert "2 documents from 1 file(s), 13 tokens, 1.1818 tokens per byte" in out
    assert f"{tmp_path}/x_text_document.bin  26 bytes" in out
    settings = f"--data.type=Blend --data.paths={tmp_path}/x_text_document --tokenizer.type=ByteTokenizer"
    assert out.splitlines()[-1] == f"to train on it: {settings} --model.vocabulary_size=257"
    run = load("quickstart.py", *(word.removeprefix("--") for word in out.splitlines()[-1].split()[4:]))
    assert run.data == BlendConfig(paths=(f"{tmp_path}/x_text_document",))


def test_any_tokenizer_by_its_settings(tmp_path, own_signals):
    (tmp_path / "a.txt").write_text("a<image><t>b")
    arguments = ["--tokenizer.type=MultimodalTokenizer", "--tokenizer.base.type", "ByteTokenizer"]
    arguments += ["--tokenizer.added={tile: <t>}", "--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/x"]
    main(arguments)
    assert read(tmp_path / "x_text_document") == [[[97, 257, 258, 98]]]


OWN = """
from dataclasses import dataclass
from megajax.tokenizers.config import ByteTokenizerConfig

@dataclass(frozen=True)
class Mine:
    def build(self):
        return ByteTokenizerConfig().build()
"""


def test_a_tokenizer_of_your_own_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 50)
    arguments = [f"--tokenizer.type={tmp_path}/mine.py:Mine", "--input", f"{tmp_path}/a.jsonl", "--output-prefix"]
    result = replace(parse([*arguments, f"{tmp_path}/x", "--workers=2"])[0], chunk_bytes=20).build()
    assert result.counts.documents == 50 and result.workers == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokeniser=byte"], "unknown option --tokeniser: did you mean --tokenizer?"),
        (["--tokenizer=gpt2"], "--tokenizer=gpt2 needs --vocab-file."),
        (["--tokenizer=byte", "--merge-file=x"], "--tokenizer=byte has no use for --merge-file."),
        (["--tokenizer=null"], "--tokenizer=null needs --vocab-size."),
        (["--tokenizer=byte", "--eod-token=x"], "--tokenizer=byte has no use for --eod-token"),
        (
            ["--tokenizer=bytes"],
            "--tokenizer=bytes: neither one of byte, gpt2, null, wordpiece, wordpiece-cased, sentencepiece, tiktoken "
            "nor a tokenizer.json or .model that exists",
        ),
        (["--tokenizer=gone.model"], "--tokenizer=gone.model: neither one of"),
        (["--tokenizer=tiktoken"], "--tokenizer=tiktoken needs --vocab-file."),
        (["--tokenizer=wordpiece", "--vocab-file=x", "--eod-token=x"], "[EOS] ends a document"),
        ([], "the tokenizer is missing: give --tokenizer=KIND or PATH, one of byte, gpt2"),
        (["--tokenizer=byte", "--tokenizer.extra=3"], "tokenizer.extra: no such setting"),
        (["--tokenizer.type=Multimodal"], "did you mean MultimodalTokenizerConfig?"),
        (["--tokenizer=byte", "--partitions=0"], "--partitions=0: give at least 1"),
        (["--tokenizer=byte", "--target=x", "--document=line"], "--target pairs lines; --document and"),
        (["--tokenizer=byte", "--workers=0"], "--workers=0: give at least 1"),
        (["--tokenizer=byte", "--document-regex=("], "is not a regular expression"),
        (["--tokenizer=byte", "--document-regex=a", "--document=line"], "give one of them"),
        (["--tokenizer=byte"], "gone.jsonl: no such file"),
    ],
)
def test_command_line_mistakes(tmp_path, own_signals, arguments, message):
    with pytest.raises(UserError) as caught:
        main(["--input", f"{tmp_path}/gone.jsonl", "--output-prefix", f"{tmp_path}/x", *arguments])
    assert message in str(caught.value)


def test_mistakes_exit_with_2_and_one_message(tmp_path):
    arguments = ["--input", "gone.txt", "--output-prefix", f"{tmp_path}/x", "--tokenizer=byte"]
    result = subprocess.run([*PREPROCESS, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "\n--input gone.txt: no such file, folder or match. Check the path.\n\n"


def test_workers_do_not_import_jax():
    code = "import sys, megajax.data.preprocessing.preprocessing; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def busy(tmp_path, *options):
    """The arguments of a job that takes long."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words to keep it busy"}\n' * 300_000)
    (tmp_path / "out").mkdir()
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out" / "x")]
    return [*arguments, "--tokenizer=byte", *options]


@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)])
def test_an_interrupt_leaves_no_files(tmp_path, number, code, workers):
    call = [*PREPROCESS, *busy(tmp_path, f"--workers={workers}", "--log-interval=0")]
    with subprocess.Popen(call, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert "documents" in process.stderr.readline()
        os.kill(process.pid, number)
        try:
            assert process.wait(100) == code
        finally:
            process.kill()
        assert "Traceback" not in process.stderr.read()
    assert only_output(tmp_path) == []


INTERRUPTED_IN_A_LOCK = """
import os, signal, sys, threading
from megajax.command_line.parser import front_door
from megajax.preprocess import main

enter, main_thread, calls = threading.Condition.__enter__, threading.main_thread().ident, []

def interrupted(self):
    entered = enter(self)
    if threading.get_ident() == main_thread:
        calls.append(self)
        if len(calls) == 25:
            os.kill(os.getpid(), signal.SIGINT)
    return entered

if __name__ == "__main__":
    threading.Condition.__enter__ = interrupted
    front_door(main)
"""


def test_an_interrupt_inside_a_lock_of_the_pool_ends_the_job(tmp_path):
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED_IN_A_LOCK)
    call = [sys.executable, program, *busy(tmp_path, "--workers=2")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (130, "interrupted; nothing was written\n")
    assert only_output(tmp_path) == []


def test_open_text_names_a_missing_file(tmp_path):
    with user_error(), open_text(str(tmp_path / "gone")):
        pass
