"""BERT's WordPiece."""

import pytest
from user_errors import user_error

from megajax.tokenizers.config import WordPieceTokenizerConfig
from megajax.tokenizers.wordpiece import train_vocabulary
from tests.tokenizers.hard_texts import NOT_UTF8, TEXTS, encoded, safe_to_cut

pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["un", "##aff", "##able", "The", "the", "cafe", "café", ",", "[", "]", "mask", "##s"]


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(SPECIAL + WORDS) + "\n", encoding="utf-8")
    return str(path)


def pieces(tokenizer, text):
    names = SPECIAL + WORDS + ["[BOS]", "[EOS]"]
    return [names[number] for number in tokenizer.encode(text)]


def test_words_become_the_longest_pieces(vocabulary):
    tokenizer = WordPieceTokenizerConfig(vocabulary=vocabulary).build()
    assert pieces(tokenizer, "UNaffable, Thé cafés\nunknown") == [
        *("un", "##aff", "##able", ",", "the", "cafe", "##s", "[UNK]")
    ]
    assert tokenizer.decode(tokenizer.encode("the unaffable masks")) == "the unaffable masks"
    data = "the unaffable, cafés\nmask  the un".encode()
    assert safe_to_cut(tokenizer, data) and tokenizer.split_point(data) > 20
    # Names of special tokens in the text are text.
    assert pieces(tokenizer, "[MASK]") == ["[", "mask", "]"]
    # Normalisation drops U+FFFD, which bytes that are no UTF-8 become.
    assert tokenizer.encode("").tolist() == [] and tokenizer.encode_bytes(b"the \xff").tolist() == [9]


def test_cased_vocabulary_keeps_case_and_accents(vocabulary):
    tokenizer = WordPieceTokenizerConfig(vocabulary=vocabulary, lower=False).build()
    assert pieces(tokenizer, "The café THE") == ["The", "café", "[UNK]"]
    assert tokenizer.identity != WordPieceTokenizerConfig(vocabulary=vocabulary).build().identity


def test_special_tokens_and_pieces(vocabulary):
    tokenizer = WordPieceTokenizerConfig(vocabulary=vocabulary, extra_ids=2).build()
    assert tokenizer.specials == {"bos": 17, "eos": 18, "cls": 2, "sep": 3, "mask": 4}
    assert (tokenizer.pad, tokenizer.eod) == (0, 18)
    assert tokenizer.sentinels == (19, 20) and tokenizer.vocabulary_size == 21
    assert tokenizer.continues.nonzero()[0].tolist() == [6, 7, 16]


@pytest.mark.parametrize("lower", [True, False])
def test_same_ids_and_text_as_hugging_face(vocabulary, lower):
    """BERT's tokenizer by the library's class that reads vocab.txt."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.BertWordPieceTokenizer(vocabulary, lowercase=lower)
    tokenizer = WordPieceTokenizerConfig(vocabulary=vocabulary, lower=lower).build()
    assert tokenizer.encode("[MASK]").tolist() != library.encode("[MASK]", add_special_tokens=False).ids
    texts = [data.decode("utf-8", errors="replace") for data in (*map(encoded, TEXTS), *NOT_UTF8)]
    # That class reads [MASK] in a text as the mask token.
    for text in (text.replace("[", " ") for text in ("The unaffable, cafés 猫 masked\tthe the", *texts)):
        assert tokenizer.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids
    for text, data in zip(texts, (*map(encoded, TEXTS), *NOT_UTF8), strict=True):
        assert tokenizer.encode_bytes(data).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize(
    "lines",
    [
        [*SPECIAL[:4], *WORDS],
        [*SPECIAL, "a", "b", "a"],
        None,
    ],
)
def test_wrong_vocabularies(lines, tmp_path):
    path = tmp_path / "vocab.txt"
    if lines is not None:
        path.write_text("\n".join(lines))
    with user_error():
        WordPieceTokenizerConfig(vocabulary=str(path)).build()


TEXT = ["The tower was built of stone.", "Stones of the towers; the builder built.", "A Café — été."] * 5


def trained(**settings) -> list[str]:
    return train_vocabulary(lambda: TEXT, **{"size": 60, **settings})


def test_the_vocabulary_is_the_same_every_time_and_holds_the_words(tmp_path):
    first = trained()
    assert first == trained() and len(first) == len(set(first)) == 60
    assert first[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert {"the", "of", "built", "##s", "."} <= set(first) and not {"The", "##.", "é"} & set(first)
    assert {"The", "Café", "é"} <= set(trained(lower=False, size=100))
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in first), encoding="utf-8")
    tokenizer = WordPieceTokenizerConfig(vocabulary=str(tmp_path / "vocab.txt")).build()
    text = "the builder built a tower"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_size_below_the_alphabet_and_a_text_without_words_are_errors():
    with user_error():
        trained(size=20)
    with user_error():
        train_vocabulary(lambda: ["", " \n"], size=100)
