"""Spans of characters of tokens."""

import numpy as np
import pytest
from hard_texts import TEXT, TEXTS, train_sentencepiece

from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    WordPieceTokenizerConfig,
)


def parts(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text of each token's span; ids equal those of `encode`."""
    ids, spans = tokenizer.encode_spans(text)
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert ids.dtype == np.int32 and spans.shape == (len(ids), 2)
    assert all(0 <= first <= end <= len(text) for first, end in spans.tolist())
    assert np.all(np.diff(spans[:, 0]) >= 0)
    return [text[first:end] for first, end in spans.tolist()]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_have_the_span_of_their_character(text):
    tokenizer = ByteTokenizerConfig().build()
    expected = [letter for letter in text for _ in letter.encode("utf-8", errors="surrogatepass")]
    assert parts(tokenizer, text) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_byte_pairs_cover_the_text(text, small_bpe):
    tokenizer = GPT2TokenizerConfig(vocabulary=small_bpe[0], merges=small_bpe[1]).build()
    ids, spans = tokenizer.encode_spans(text)
    for number, part in zip(ids.tolist(), parts(tokenizer, text), strict=True):
        if "\ufffd" not in (piece := tokenizer.decode([number])):
            assert part == piece
    covered = {place for first, end in spans.tolist() for place in range(first, end)}
    assert covered == set(range(len(text)))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_have_spans_in_the_original_text(text, tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "cafe", ","]))
    tokenizer = WordPieceTokenizerConfig(vocabulary=str(path)).build()
    assert not any(part.isspace() for part in parts(tokenizer, text))
    assert parts(tokenizer, "  Unaffable, CAFÉ") == ["Un", "aff", "able", ",", "CAFÉ"]


def test_special_tokens_have_the_span_of_their_name(tmp_path):
    """SentencePiece's blank between two of them has no token."""
    path = train_sentencepiece(tmp_path / "a.model", [TEXT] * 20, vocab_size=90)
    config = SentencePieceTokenizerConfig(path=path, special_tokens=("<u>", "<a>"), prepend_bos=True)
    spans = parts(config.build(), "Grün<u> <a>猫 \ud800fox<u>")
    assert spans[0] == "" and "".join(spans).replace(" ", "") == "Grün<u><a>猫\ud800fox<u>"
    multimodal = MultimodalTokenizerConfig(base=ByteTokenizerConfig()).build()
    assert parts(multimodal, "ü<image><image>\ud800b") == ["ü", "ü", "<image>", "<image>", *["\ud800"] * 3, "b"]


def test_lone_surrogates_have_spans(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate("ab\ufffd")}, []))
    engine.add_special_tokens(["</s>"])
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizerConfig(path=str(tmp_path)).build()
    assert parts(tokenizer, "a\ud800</s>b") == ["a", *["\ud800"] * 3, "</s>", "b"]


def test_other_tokenizers_have_spans_of_words():
    tokenizer = NullTokenizerConfig(vocabulary_size=50).build()
    assert parts(tokenizer, " 12  7\n3 ") == ["12", "7", "3"]
    assert parts(tokenizer, "") == []
