"""Texts that are hard for tokenizers, and small SentencePiece models."""

from collections.abc import Iterable
from pathlib import Path

import pytest

TEXTS = (
    "",
    " ",
    "\n",
    "the quick brown fox, 3.5 foxes; don't",
    "  two  spaces   and a tab\t, a line\r\nand\n\nanother one  ",
    "naïve cafe\u0301 and café, Grün, 猫が好き, مرحبا, 👩\u200d👩\u200d👧",
    "zero\u200bwidth, \ufeffmark, \u2028line, \u00a0blank, \u00ad, \ufffd",
    "nul \x00 and \x01\x02\x7f\x1b[0m control",
    "<s> </s> <unk> <mask> <extra_id_0> [MASK] [CLS]<image><|endoftext|>",
    "a" * 300 + " " + "!" * 300 + " " * 300,
    "x \ud83d y \udc00",
)
"""Text, some of it with half surrogates."""
BROKEN = (b"a\xffb", b"\xe7\x8c", b"good \xc3\x28 bad", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80 end")
NOT_UTF8 = (*BROKEN, bytes(range(256)))
"""Bytes that are no UTF-8."""
TEXT = "the quick brown fox jumps over lazy dogs and naïve café Grün 猫 un affable 12 3.5 don't , ; ! <x>"
WORDS = TEXT.split()
"""Texts from which the vocabularies of the tests are made."""


def encoded(text: str) -> bytes:
    """UTF-8 of a text, half surrogates as three bytes."""
    return text.encode("utf-8", errors="surrogatepass")


def safe_to_cut(tokenizer, data: bytes) -> bool:
    """Whether the ids are the same if the data, or any prefix of it, is cut at its split point."""
    for size in range(len(data) + 1):
        place = tokenizer.split_point(data[:size])
        parts = [*tokenizer.encode_bytes(data[:place]), *tokenizer.encode_bytes(data[place:])]
        if parts != tokenizer.encode_bytes(data).tolist():
            return False
    return True


def train_sentencepiece(path: Path, sentences: Iterable[str], **options: object) -> str:
    """The path of a new model."""
    library = pytest.importorskip("sentencepiece", reason="needs the extra `tokenizers`")
    options = {"hard_vocab_limit": False, "minloglevel": 3, **options}
    with path.open("wb") as file:
        library.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=file, **options)
    return str(path)
