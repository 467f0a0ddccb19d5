"""GPT-2's encoding against Hugging Face's byte-level BPE with the same files."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.tokenizers.base import join_tokens
from megajax.tokenizers.config import GPT2TokenizerConfig
from megajax.tokenizers.gpt2 import RUN

pytest.importorskip("tiktoken", reason="needs the extra `tokenizers`")

texts = st.text(
    st.one_of(
        st.sampled_from(list("the said create 've'll 12 \n\t\r \x0b\x1c\x1f\x85\xa0\u2003\u3000猫が好きü'-.�")),
        st.characters(codec="utf-8"),
    ),
    max_size=80,
)
fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def tokenizer(small_bpe):
    return GPT2TokenizerConfig(vocabulary=small_bpe[0], merges=small_bpe[1]).build()


@fixture
@given(texts)
def test_same_ids_as_hugging_face(tokenizer, trained, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == trained._tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


@fixture
@given(st.lists(st.one_of(st.binary(max_size=20), texts.map(str.encode))).map(b"".join))
def test_any_bytes_round_trip(tokenizer, data):
    assert join_tokens(tokenizer.encode_bytes(data), tokenizer.table) == data


@fixture
@given(texts, texts)
def test_a_split_point_is_safe_for_any_continuation(tokenizer, text, following):
    assert tokenizer.split_point(b"one two\n three") == 7
    place = tokenizer.split_point(text.encode())
    data = (text + following).encode()
    parts = [*tokenizer.encode_bytes(data[:place]), *tokenizer.encode_bytes(data[place:])]
    assert parts == tokenizer.encode_bytes(data).tolist()


@pytest.mark.parametrize(("blank", "around"), [(" ", ("", "b")), ("\n", ("a", "b")), ("\u3000", ("a", "\x1cb"))])
def test_long_blank_runs(tokenizer, trained, blank, around):
    shorter = around[0] + blank * (3 * RUN) + around[1]
    assert tokenizer.decode(tokenizer.encode(shorter)) == shorter
    assert tokenizer.encode(shorter).tolist() == trained._tokenizer.encode(shorter, add_special_tokens=False).ids


def test_special_tokens_in_text_are_text(tokenizer):
    ids = tokenizer.encode("<|endoftext|>")
    assert tokenizer.eod not in ids and tokenizer.decode(ids) == "<|endoftext|>"
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_identity_depends_on_the_content_and_not_on_the_path(tokenizer, small_bpe, tmp_path):
    copies = []
    for path in small_bpe:
        copies.append(tmp_path / path.rpartition("/")[2])
        copies[-1].write_bytes(Path(path).read_bytes())
    copy = GPT2TokenizerConfig(vocabulary=str(copies[0]), merges=str(copies[1])).build()
    assert copy.identity == tokenizer.identity
    merges = copies[1].read_text().rstrip("\n").rpartition("\n")[0]
    copies[1].write_text(merges)
    token = GPT2TokenizerConfig(vocabulary=str(copies[0]), merges=str(copies[1])).build()
    assert token.identity != tokenizer.identity


def test_bad_files(small_bpe, tmp_path):
    def message(vocabulary=small_bpe[0], merges=small_bpe[1], **more):
        with pytest.raises(UserError) as caught:
            GPT2TokenizerConfig(vocabulary=str(vocabulary), merges=str(merges), **more).build()
        return str(caught.value)

    def write_file(name, content):
        path = tmp_path / name
        path.write_text(content)
        return path

    assert "gone.json: cannot read this GPT-2 vocabulary: No such file" in message(tmp_path / "gone.json")
    assert "gone.txt: cannot read this list of GPT-2 merges" in message(merges=tmp_path / "gone.txt")
    assert "not JSON" in message(write_file("broken.json", '{"a": 1'))
    assert "maps each token to its id" in message(write_file("list.json", "[1]"))
    vocabulary = json.loads(Path(small_bpe[0]).read_text())
    other_files = next(token for token, number in vocabulary.items() if number == 7)
    assert f"the id 7 of {other_files!r} is also that of 'a'" in message(
        write_file("s.json", json.dumps(vocabulary | {"a": 7}))
    )
    assert "the id -1 of 'a' is negative" in message(write_file("low.json", json.dumps(vocabulary | {"a": -1})))
    assert "a is given twice" in message(write_file("twice.json", '{"a": 1, "a": 2}'))
    del vocabulary["Ġ"]
    assert "no token 'Ġ' for byte 0x20" in message(write_file("hole.json", json.dumps(vocabulary)))
    assert "merges.txt, line 2: 'zz zz' is not two tokens" in message(
        merges=write_file("merges.txt", "#version\nzz zz\n")
    )
    assert "no token '<eod>'" in message(eod="<eod>")


def test_missing_package_names_the_extra(small_bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with user_error():
        GPT2TokenizerConfig(vocabulary=small_bpe[0], merges=small_bpe[1]).build()


def test_real_vocabulary_on_real_text(data_dir):
    tokenizers = pytest.importorskip("tokenizers")
    files = [str(data_dir / "gpt2_bpe" / name) for name in ("vocab.json", "merges.txt")]
    tokenizer = GPT2TokenizerConfig(vocabulary=files[0], merges=files[1]).build()
    theirs = tokenizers.ByteLevelBPETokenizer(*files)
    assert (tokenizer.vocabulary_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    for name, tokens in (("wikitext2/valid.txt", 258659), ("tinyshakespeare/input.txt", 338025)):
        data = (data_dir / name).read_bytes()
        ids = tokenizer.encode_bytes(data)
        assert ids.tolist() == theirs.encode(data.decode()).ids and len(ids) == tokens
        assert join_tokens(ids, tokenizer.table) == data
