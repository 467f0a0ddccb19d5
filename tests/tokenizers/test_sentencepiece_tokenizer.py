"""SentencePiece models, trained here, against the library."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.tokenizers.config import SentencePieceTokenizerConfig
from tests.tokenizers.hard_texts import NOT_UTF8, TEXTS, WORDS, safe_to_cut, train_sentencepiece

sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra `tokenizers`")

LIKE_LLAMA = {"byte_fallback": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
MODELS = {
    "unigram": {"model_type": "unigram", "vocab_size": 90},
    "llama": {"model_type": "bpe", "vocab_size": 340, **LIKE_LLAMA},
    "with pad": {"model_type": "bpe", "vocab_size": 90, "pad_id": 3, "user_defined_symbols": ["<mask>", "<image>"]},
    "without ends": {"model_type": "unigram", "vocab_size": 90, "bos_id": -1, "eos_id": -1},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Name -> path of a small model."""
    folder, draw = tmp_path_factory.mktemp("models"), np.random.default_rng(0)
    text = [" ".join(draw.choice(WORDS, 8)) for _ in range(200)]
    return {
        name: train_sentencepiece(folder / f"{name}.model", text, character_coverage=1.0, **options)
        for name, options in MODELS.items()
    }


def library(path):
    return sentencepiece.SentencePieceProcessor(model_file=path)


@pytest.mark.parametrize("name", ["unigram", "llama", "with pad"])
def test_same_ids_and_text_as_the_library(paths, name):
    tokenizer, theirs = SentencePieceTokenizerConfig(path=paths[name]).build(), library(paths[name])
    for text in TEXTS:
        data = text.encode("utf-8", errors="surrogatepass")
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.tolist() == theirs.encode(data), text
        assert tokenizer.decode(ids) == theirs.decode(ids.tolist())
    for data in NOT_UTF8:
        assert tokenizer.encode_bytes(data).tolist() == theirs.encode(data)
    assert tokenizer.vocabulary_size == theirs.get_piece_size()
    assert safe_to_cut(tokenizer, b"the quick  brown\n fox")


def test_special_tokens_of_the_model(paths):
    tokenizer = SentencePieceTokenizerConfig(path=paths["with pad"]).build()
    assert (tokenizer.pad, tokenizer.eod) == (3, 2)
    assert tokenizer.specials == {"bos": 1, "eos": 2, "mask": 4, "image": 5}
    assert tokenizer.token_id("<image>") == 5 and tokenizer.token_id("<other>") is None and tokenizer.sentinels == ()
    llama = SentencePieceTokenizerConfig(path=paths["llama"]).build()
    assert llama.pad is None and llama.specials == {"bos": 1, "eos": 2}
    with_bos = SentencePieceTokenizerConfig(path=paths["llama"], prepend_bos=True).build()
    assert with_bos.encode("the fox").tolist() == [1, *llama.encode("the fox")]
    assert with_bos.identity != llama.identity


def test_words_begin_at_the_mark_of_a_space(paths):
    tokenizer, theirs = SentencePieceTokenizerConfig(path=paths["unigram"]).build(), library(paths["unigram"])
    ids = tokenizer.encode("the affable fox").tolist()
    assert [bool(tokenizer.continues[number]) for number in ids] == [
        not theirs.id_to_piece(number).startswith("▁") for number in ids
    ]
    assert len(tokenizer.continues) == tokenizer.vocabulary_size and not tokenizer.continues[:3].any()


def by_the_rules(theirs, added, text):
    """Megatron-LM's legacy encoding: it searches repeatedly for the earliest token."""
    ids, place, was_token = [], 0, False
    while match := re.search("|".join(map(re.escape, added)), text[place:]):
        part = theirs.encode(text[place : place + match.start()])
        if was_token and part and part[0] == theirs.piece_to_id("▁"):
            part.pop(0)
        ids += [*part, added[match[0]]]
        place, was_token = place + match.end(), True
    return ids + theirs.encode(text[place:])


@pytest.mark.parametrize("name", ["unigram", "llama", "with pad"])
def test_added_tokens(paths, name):
    names = ("<CLS>", "<SEP>", "<EOD>", "<mask>", "<s>")
    tokenizer = SentencePieceTokenizerConfig(path=paths[name], special_tokens=names, extra_ids=2, eod="<EOD>").build()
    theirs = library(paths[name])
    size = theirs.get_piece_size()
    fresh = [token for token in (*names, "<extra_id_0>", "<extra_id_1>") if theirs.piece_to_id(token) == 0]
    added = {token: size + fresh.index(token) if token in fresh else theirs.piece_to_id(token)
             for token in (*names, "<extra_id_0>", "<extra_id_1>")}  # fmt: skip
    assert tokenizer.vocabulary_size == size + len(fresh) and tokenizer.eod == added["<EOD>"]
    assert tokenizer.specials["cls"] == added["<CLS>"]
    assert tokenizer.sentinels == (added["<extra_id_0>"], added["<extra_id_1>"])
    cases = ["<CLS>the fox<SEP>", "<CLS> the <SEP> <EOD> <mask>x <extra_id_1>", "a <extra_id_0>  b", "<CL<CLS>S>", ""]
    for text in cases:
        assert tokenizer.encode(text).tolist() == by_the_rules(theirs, added, text), text
    assert tokenizer.decode(tokenizer.encode("the<CLS>fox<SEP>")) == "the <CLS> fox <SEP>"
    assert len(tokenizer.continues) == tokenizer.vocabulary_size and not tokenizer.continues[size:].any()


def test_end_of_a_document(paths):
    with user_error():
        SentencePieceTokenizerConfig(path=paths["without ends"]).build()
    assert SentencePieceTokenizerConfig(path=paths["without ends"], eod="▁the").build().eod > 0
    with user_error():
        SentencePieceTokenizerConfig(path=paths["unigram"], eod="<gone>").build()
    with user_error():
        SentencePieceTokenizerConfig(path=paths["without ends"], eod="▁the", prepend_bos=True).build()


@pytest.mark.parametrize("content", [None, b"", b"no model", b"\x0a\x05junk"])
def test_damaged_files(paths, tmp_path, content):
    (tmp_path / "a.model").write_bytes(Path(paths["llama"]).read_bytes()[:200] if content is None else content)
    with user_error():
        SentencePieceTokenizerConfig(path=str(tmp_path / "a.model")).build()
    with user_error():
        SentencePieceTokenizerConfig(path=str(tmp_path / "gone.model")).build()


def test_settings_and_a_missing_package(paths, monkeypatch):
    config = SentencePieceTokenizerConfig(path="x", special_tokens=("a", "a", "b c"), extra_ids=-1)
    assert [problem.setting for problem in problems_of(config)] == ["extra_ids", "special_tokens", "special_tokens"]
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with user_error():
        SentencePieceTokenizerConfig(path=paths["llama"]).build()
