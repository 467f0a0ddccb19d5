"""Training of a WordPiece vocabulary: special tokens first, deterministic, and frequent words as single tokens."""

from pathlib import Path

import pytest

from megajax.config.errors import UserError
from megajax.tokenizers.config import WordPieceTokenizerConfig
from megajax.tokenizers.wordpiece import train_vocabulary

TEXT = ["The tower was built of stone.", "Stones of the towers; the builder built.", "A Café — été."] * 5


def trained(**settings) -> list[str]:
    return train_vocabulary(lambda: TEXT, **{"size": 60, **settings})


def test_the_vocabulary_is_the_same_every_time_and_holds_the_words():
    first = trained()
    assert first == trained() and len(first) == len(set(first)) == 60
    assert first[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert {"the", "of", "built", "##s", "."} <= set(first) and not {"The", "##.", "é"} & set(first)


def test_case_and_accents_are_kept_on_request():
    assert {"The", "Café", "é"} <= set(trained(lower=False, size=100))


def test_a_tokenizer_reads_it(tmp_path: Path):
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in trained()), encoding="utf-8")
    tokenizer = WordPieceTokenizerConfig(vocabulary=str(path)).build()
    text = "the builder built a tower"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_size_below_the_alphabet_and_a_text_without_words_are_errors():
    with pytest.raises(UserError, match="its characters and special tokens alone are"):
        trained(size=20)
    with pytest.raises(UserError, match="no word"):
        train_vocabulary(lambda: ["", " \n"], size=100)
