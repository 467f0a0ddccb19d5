"""English of the standard library as rows for BERT and T5, and the vocabulary trained on it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megajax.config.errors import UserError
from megajax.data.masked.config import LibrarySentencesConfig, LibrarySpansConfig, LibraryWordPieceConfig
from megajax.data.masked.library_text import corpus, sentences
from megajax.data.rows.splits import Rows
from megajax.data.text.indexed_dataset import IndexedTokens
from megajax.models.presets.bert import bert
from megajax.models.presets.t5 import t5
from megajax.tokenizers.byte import ByteTokenizer
from megajax.tokenizers.config import ByteTokenizerConfig

SOURCE = '''
def f(x):
    """Return the sum of all items. The result is
    a new list.

    >>> f([1, 2])
    3
    """
    # This comment has two lines and says
    # what happens next.
    y = z

    # x = y + z. No
    # sentence ends in it
    return x  # no sentence at all here.
'''


def test_sentences_are_english_and_code_is_omitted():
    expected = [
        "Return the sum of all items.",
        "The result is a new list.",
        "This comment has two lines and says what happens next.",
    ]
    assert list(sentences(SOURCE)) == expected


def build_corpus(folder: Path) -> tuple[str, int, bytes]:
    """The files of a first start in an empty folder: the tokenizer, its size, and the token file."""
    tokenizer = LibraryWordPieceConfig(size=400, megabytes=0.5, cache_dir=str(folder)).build()
    file = corpus(LibrarySentencesConfig(megabytes=0.5, cache_dir=str(folder)), tokenizer, seed=1)
    return tokenizer.identity, tokenizer.vocabulary_size, file.read_all().tobytes()


def test_two_simultaneous_starts_write_the_same_files(tmp_path: Path):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build_corpus, [tmp_path / "same"] * 2)
    assert first == second == build_corpus(tmp_path / "other")
    assert first[1] == 402 and len(first[2]) > 5_000
    names = [path.name for path in (tmp_path / "same").iterdir()]
    assert len(names) == 3 and not [name for name in names if name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LibrarySentencesConfig, bert("debug", sequence_length=64, vocabulary_size=402)),
        (LibrarySpansConfig, t5("debug", encoder_length=64, sequence_length=32, vocabulary_size=502)),
    ],
)
def test_rows_are_masked_text_of_both_kinds(config: Any, model: Any, tmp_path: Path):
    data = config(megabytes=0.5, cache_dir=str(tmp_path))
    tokenizer = LibraryWordPieceConfig(size=400, extra_ids=100, megabytes=0.5, cache_dir=str(tmp_path)).build()
    schema = model.schema()
    splits = data.build(tokenizer=tokenizer, schema=schema, rows=Rows(50, 5, 0), seed=1)
    assert len(splits.train) >= 50 and len(splits.valid) >= 5 and splits.test is None
    row = splits.train[3]
    assert {name: str(row[name].dtype) for name in data.leaves()} == data.leaves()
    assert all(row[name].shape == leaf.shape for name, leaf in schema.items())
    repeated = data.build(tokenizer=tokenizer, schema=schema, rows=Rows(50, 5, 0), seed=1).train[3]
    assert all(np.array_equal(row[name], repeated[name]) for name in row)


def test_other_tokenizers_are_refused(tmp_path: Path):
    data = LibrarySentencesConfig(megabytes=0.5, cache_dir=str(tmp_path))
    with pytest.raises(UserError, match="Choose the WordPiece tokenizer"):
        data.build(tokenizer=ByteTokenizer(ByteTokenizerConfig()), schema=bert("debug").schema(), rows=Rows(1), seed=1)


def test_a_damaged_file_is_written_again(tmp_path: Path):
    config = LibraryWordPieceConfig(size=400, megabytes=0.5, cache_dir=str(tmp_path))
    identity = config.build().identity
    (path,) = tmp_path.iterdir()
    path.write_text("[PAD]\n")
    assert config.build().identity == identity
    data = LibrarySpansConfig(megabytes=0.5, cache_dir=str(tmp_path))
    prefix = corpus(data, config.build(), seed=1).prefix
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(whole[:-2])
    assert corpus(data, config.build(), seed=1).read_all().tobytes() == whole
    assert IndexedTokens(prefix).read_all().tobytes() == whole
