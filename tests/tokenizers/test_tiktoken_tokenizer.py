"""Files of ranks, against the tiktoken library with Megatron-LM's patterns."""

import base64
import json
import sys

import numpy as np
import pytest
from user_errors import user_error

from megajax.config.errors import ConfigError, UserError
from megajax.tokenizers.config import TiktokenTokenizerConfig
from megajax.tokenizers.tiktoken import PATTERNS
from tests.tokenizers.hard_texts import NOT_UTF8, TEXTS, safe_to_cut

tiktoken = pytest.importorskip("tiktoken", reason="needs the extra `tokenizers`")

PAIRS = (b"th", b"the", b" the", b" f", b" fo", b" fox", b"  ", b"ab", b"\n\n", b"!!", b",\n", "猫".encode())
TOKENS = (*(bytes((value,)) for value in range(256)), *PAIRS)
NAMES = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
FIRST = 10


def entries(tokens=TOKENS):
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "ranks.json").write_text(json.dumps(entries()))
    return str(tmp_path / "ranks.json")


def build(path, **settings):
    return TiktokenTokenizerConfig(path=path, **{"special_ids": FIRST, **settings}).build()


def library(pattern):
    special = {name: number for number, name in enumerate([*NAMES, *(f"<SPECIAL_{n}>" for n in range(7, FIRST))])}
    ranks = {token: rank + FIRST for rank, token in enumerate(TOKENS)}
    return tiktoken.Encoding("theirs", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("pattern", ["v1", "v2", r"\w+|\W"])
def test_same_ids_and_text_as_the_library(path, pattern):
    tokenizer, theirs = build(path, pattern=pattern), library(PATTERNS.get(pattern, pattern))
    for text in (*TEXTS[:-1], "a<SPECIAL_8>b<SPECIAL_11>", "the,\n\nfox ABc//\n"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.tolist() == theirs.encode(text, allowed_special="all"), text
        assert tokenizer.decode(ids) == theirs.decode(ids.tolist()) == text
    for data in (*NOT_UTF8, TEXTS[-1].encode("utf-8", errors="surrogatepass")):
        assert b"".join(tokenizer.table[number] for number in tokenizer.encode_bytes(data)) == data
    assert tokenizer.vocabulary_size == theirs.n_vocab
    assert safe_to_cut(tokenizer, b"the fox,\n\n the  end <s> <pad>\xff x!\n the")


def test_special_tokens(path):
    tokenizer = build(path)
    assert tokenizer.specials == {"bos": 1, "eos": 2, "mask": 3, "cls": 5, "sep": 6}
    assert (tokenizer.eod, tokenizer.pad) == (2, 4)
    assert [tokenizer.token_id(name) for name in ("<SPECIAL_9>", "the")] == [9, None]
    plain = build(path, special_tokens_in_text=False)
    assert tokenizer.encode("a</s>").tolist()[-1] == 2 and 2 not in plain.encode("a</s>")
    assert plain.identity != tokenizer.identity != build(path, pattern="v1").identity
    with user_error():
        build(path, eod="<end>")
    with_names = build(path, special_tokens=("<end>", "<extra_id_0>", "<extra_id_1>"), eod="<end>")
    assert (with_names.eod, with_names.pad, with_names.specials, with_names.sentinels) == (0, None, {}, (1, 2))


def test_vocabulary_is_truncated(path):
    tokenizer = build(path, vocabulary_size=FIRST + 258)
    assert tokenizer.vocabulary_size == FIRST + 258 and tokenizer.encode("the").tolist() == [FIRST + 257]
    assert tokenizer.encode(" fox").tolist() == [FIRST + value for value in b" fox"]
    with user_error():
        build(path, vocabulary_size=300)


def test_lines_of_ranks(path, tmp_path):
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(TOKENS)]
    (tmp_path / "x.tiktoken").write_text("\n".join(lines) + "\n")
    tokenizer = build(str(tmp_path / "x.tiktoken"))
    assert tokenizer.encode("the fox").tolist() == build(path).encode("the fox").tolist()


def test_damaged_files(tmp_path):
    file = tmp_path / "a.json"
    gap, twice = [*entries()[:-1], {**entries()[-1], "rank": 999}], (*TOKENS[:-1], b"th")
    for content, message in (
        ("[1]", "not a file of ranks.*TypeError"),
        ('[{"rank": 0}]', "not a file of ranks.*KeyError"),
        ("[", "not a file of ranks"),
        ("not base64", "not a file of ranks"),
        (json.dumps(gap), "entry 267 has rank 999: the ranks go from 0 on"),
        (json.dumps(entries(twice)), "duplicate tokens"),
        (json.dumps(entries(TOKENS[1:])), "byte 0x00 is not among the first 256"),
        ("", "byte 0x00 is not among the first 256"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"a\.json: {message}"):
            build(str(file))
    with user_error():
        build(str(tmp_path / "gone.json"))


def test_invalid_settings(path, monkeypatch):
    with user_error("tokenizer.pattern"):
        build(path, pattern="v(")
    with user_error("special_ids", kind=ConfigError):
        build(path, special_ids=3)
    with user_error("vocabulary_size", kind=ConfigError):
        build(path, vocabulary_size=100)
    with user_error():
        build(path).encode(" " * 1_100_000 + "x")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with user_error():
        build(path)
