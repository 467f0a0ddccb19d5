"""Bytes and numbers as tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from user_errors import user_error

from megajax.tokenizers.base import join_tokens
from megajax.tokenizers.byte import TABLE
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig

pytestmark = pytest.mark.smoke


@given(st.binary(max_size=300))
def test_any_bytes_round_trip(data):
    tokenizer = ByteTokenizerConfig().build()
    ids = tokenizer.encode_bytes(data)
    assert ids.dtype == np.int32 and ids.tolist() == list(data)
    assert join_tokens(ids, TABLE) == data


def test_byte_vocabulary():
    tokenizer = ByteTokenizerConfig().build()
    assert (tokenizer.vocabulary_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert tokenizer.encode("\ud800").tolist() == [0xED, 0xA0, 0x80]
    assert tokenizer.decode([104, 105, 256]) == "hi"
    assert tokenizer.decode([0xFF]) == "�"
    with user_error():
        tokenizer.decode([257])
    with user_error():
        tokenizer.decode([-1])


@given(st.lists(st.integers(0, 511), max_size=50), st.sampled_from([" ", "\n", "  "]))
def test_numbers_round_trip(ids, blank):
    tokenizer = NullTokenizerConfig(vocabulary_size=512).build()
    encoded = tokenizer.encode(blank.join(map(str, ids)))
    assert encoded.dtype == np.int32 and encoded.tolist() == ids
    assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids


def test_null_vocabulary_ends_with_the_end_of_documents():
    tokenizer = NullTokenizerConfig(vocabulary_size=512).build()
    assert (tokenizer.vocabulary_size, tokenizer.eod) == (512, 511)
    assert tokenizer.identity != NullTokenizerConfig(vocabulary_size=513).build().identity


@pytest.mark.parametrize("text", ["1 two", "1 -2", "512", "1.5"])
def test_null_names_invalid_ids(text):
    with user_error():
        NullTokenizerConfig(vocabulary_size=512).build().encode(text)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30).map(lambda ids: " ".join(map(str, ids)).encode()))
def test_null_split_point_is_safe(data):
    tokenizer = NullTokenizerConfig(vocabulary_size=100).build()
    place = tokenizer.split_point(data)
    parts = [*tokenizer.encode_bytes(data[:place]), *tokenizer.encode_bytes(data[place:])]
    assert parts == tokenizer.encode_bytes(data).tolist()
