"""The corpus from Python's standard library: bytes for language models, lines for BERT and T5; and sentences."""

import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import token_files
from hypothesis import given
from hypothesis import strategies as st
from user_errors import user_error

from megajax.data import standard_library
from megajax.data.masked.config import LibrarySentencesConfig, LibrarySpansConfig, LibraryWordPieceConfig
from megajax.data.preprocessing.text_formats import split_sentences
from megajax.data.rows.loader import read_rows
from megajax.data.rows.splits import Rows
from megajax.data.standard_library import choose, source_files, text_lines
from megajax.data.text.config import StandardLibraryConfig
from megajax.data.text.indexed_dataset import tokens_path
from megajax.models.decoder.config import text_schema
from megajax.models.presets.encoders import bert, t5
from megajax.tokenizers.config import ByteTokenizerConfig


def test_lines_have_several_words():
    source = b'def f(x):\n    """Return the sum of items.\n\n    y = x + \xff1\n    return x\n'
    assert text_lines(source) == ['"""Return the sum of items.', "y = x + \N{REPLACEMENT CHARACTER}1"]


def build_corpus(folder: Path) -> tuple[str, int, bytes]:
    """The files of a first start in an empty folder: the tokenizer, its size, and the token file."""
    tokenizer = LibraryWordPieceConfig(size=400, megabytes=0.1, cache_dir=str(folder)).build()
    file = standard_library.corpus(LibrarySentencesConfig(megabytes=0.1, cache_dir=str(folder)), 1, tokenizer)
    return tokenizer.identity, tokenizer.vocabulary_size, file.read_all().tobytes()


def test_two_simultaneous_starts_write_the_same_files(tmp_path: Path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build_corpus, [tmp_path / "same"] * 2)
    assert first == second == build_corpus(tmp_path / "other")
    assert first[1] == 402 and len(first[2]) > 1_000
    names = [path.name for path in (tmp_path / "same").iterdir()]
    assert len(names) == 3 and not [name for name in names if name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LibrarySentencesConfig(), bert("debug", sequence_length=64, vocabulary_size=502)),
        (LibrarySpansConfig(), t5("debug", encoder_length=64, sequence_length=32, vocabulary_size=502)),
    ],
)
def test_bert_and_t5_read_the_rows_of_their_data(config: Any, model: Any, tmp_path: Path):
    data = replace(config, megabytes=0.1, cache_dir=str(tmp_path))
    tokenizer = LibraryWordPieceConfig(size=400, extra_ids=100, megabytes=0.1, cache_dir=str(tmp_path)).build()
    schema = model.schema()
    splits = data.build(tokenizer=tokenizer, schema=schema, rows=Rows(50, 5, 0), seed=1)
    assert len(splits.train) >= 50 and len(splits.valid) >= 5 and splits.test is None
    row = splits.train[3]
    leaves = data.leaves()
    assert {name: str(row[name].dtype) for name in leaves} == leaves and schema.keys() == leaves.keys()
    assert all(row[name].shape == leaf.shape for name, leaf in schema.items())
    block = read_rows(splits.train, schema, 10, np.arange(40))
    assert block["tokens"].shape == (40, *schema["tokens"].shape) and block["loss_mask"].sum() > 40
    repeated = data.build(tokenizer=tokenizer, schema=schema, rows=Rows(50, 5, 0), seed=1).train[3]
    assert all(np.array_equal(row[name], repeated[name]) for name in row)


@pytest.mark.parametrize(
    ("data", "tokenizer", "schema"),
    [
        (LibrarySentencesConfig, ByteTokenizerConfig().build(), bert("debug").schema()),
        (StandardLibraryConfig, token_files.tokenizer(), text_schema(8, 2**31)),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, data: Any, tokenizer: Any, schema: Any) -> None:
    config = data(megabytes=0.1, cache_dir=str(tmp_path))
    with user_error():
        config.build(tokenizer=tokenizer, schema=schema, rows=Rows(1), seed=1)


def test_an_intact_file_is_reused_and_a_damaged_one_written_again(tmp_path: Path) -> None:
    config = LibraryWordPieceConfig(size=400, megabytes=0.1, cache_dir=str(tmp_path))
    identity = config.build().identity
    (path,) = tmp_path.iterdir()
    path.write_text("[PAD]\n")
    assert config.build().identity == identity
    for build in (
        lambda: standard_library.corpus(StandardLibraryConfig(megabytes=0.1, cache_dir=str(tmp_path)), seed=1),
        lambda: standard_library.corpus(LibrarySpansConfig(megabytes=0.1, cache_dir=str(tmp_path)), 1, config.build()),
    ):
        file = tokens_path(build().prefix)
        before, content = file.stat().st_ino, file.read_bytes()
        assert tokens_path(build().prefix).stat().st_ino == before
        file.write_bytes(content[:-2])
        assert build().read_all().tobytes() == content == file.read_bytes()


def build(folder: Path, seed: int = 1) -> Any:
    config, tokenizer = StandardLibraryConfig(megabytes=0.3, cache_dir=str(folder)), ByteTokenizerConfig().build()
    return config.build(tokenizer=tokenizer, schema=text_schema(64, 2**31), rows=Rows(100, 10, 0), seed=seed)


def test_documents_are_source_files(tmp_path: Path) -> None:
    file = standard_library.corpus(StandardLibraryConfig(megabytes=0.5, cache_dir=str(tmp_path)), seed=1)
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name, _ in choose(source_files(root), 500_000, seed=1)]
    assert file.documents == len(names) > 5 and 250_000 < len(file.read_all()) < 510_000
    for number, name in enumerate(names):
        assert file.sequence(number)[-1] == 256
        assert file.sequence(number)[:-1].astype(np.uint8).tobytes() == (root / name).read_bytes()


def test_the_corpus_is_deterministic(tmp_path: Path) -> None:
    first, second = build(tmp_path / "a"), build(tmp_path / "b")
    assert all((first.train[row]["tokens"] == second.train[row]["tokens"]).all() for row in range(100))
    assert first.test is None and len(first.train) >= 100 and len(first.valid) >= 10
    reseeded = build(tmp_path / "a", seed=2)
    assert any((first.train[row]["tokens"] != reseeded.train[row]["tokens"]).any() for row in range(5))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = standard_library.corpus(StandardLibraryConfig(megabytes=0.2, cache_dir=str(tmp_path / "file" / "x")), seed=1)
    assert tmp_path / "cache" in file.prefix.parents


@pytest.mark.parametrize(
    "sentences",
    [
        ["One ends.", "Two ends!", "Is this three?", "Yes…", "12 is a number."],
        ["Dr. Smith met J. S. Bach at No. 5 in the U.S. Army.", "They talked."],
        ['He said "stop."', '"Why?"', "(Nobody knew.)", "It went on, e.g. here."],
        ["It costs 3.50 or so. and more.", "Versions 1.2 and 3."],
        ["これは文です。", "これも文です！", "終わり"],
        ["No.", "Er kam.", "Überall war es still."],
    ],
)
def test_ends_of_sentences(sentences):
    gap = "" if sentences[0].startswith("これ") else " "
    assert [text.decode() for text in split_sentences(gap.join(sentences).encode())] == sentences


def test_blank_lines_end_sentences_and_line_ends_do_not():
    text = b" = Title = \n \n First line\nsecond line . Next one.\n\n\nlast"
    expected = [b"= Title =", b"First line\nsecond line .", b"Next one.", b"last"]
    assert list(split_sentences(text)) == expected


def test_no_sentence_without_text():
    assert list(split_sentences(b"")) == list(split_sentences(b" \n\n ")) == []
    assert list(split_sentences(b"a\xff. B\xfe")) == [b"a\xff.", b"B\xfe"]


@given(st.text(st.sampled_from("aB. !?\n。\"'")))
def test_only_space_is_dropped(text):
    joined = b"".join(split_sentences(text.encode())).decode()
    assert "".join(joined.split()) == "".join(text.split())
