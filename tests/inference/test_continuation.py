"""The text that a finished run displays."""

import numpy as np
import pytest

from megajax.inference.sample_outputs import text_sample
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig

LENGTH = 16


def likes(token: int, size: int):
    """A model that is nearly certain of one token."""

    def model(tokens: np.ndarray) -> np.ndarray:
        logits = np.zeros((*tokens.shape, size), np.float32)
        logits[..., token] = 50.0
        return logits

    return model


@pytest.mark.smoke
def test_the_prompt_is_continued_by_the_model() -> None:
    row = np.frombuffer(b"some bytes of text", np.uint8)[:LENGTH]
    text = text_sample(likes(ord("x"), 384), ByteTokenizerConfig().build(), row, length=LENGTH, seed=0)
    assert text.splitlines()[1].startswith("some byt\u2502xxxxxxxx")


def test_an_end_of_document_ends_it() -> None:
    tokenizer = ByteTokenizerConfig().build()
    text = text_sample(likes(tokenizer.eod, 384), tokenizer, np.full(LENGTH, ord("a")), length=LENGTH, seed=0)
    assert text.splitlines()[1] == "aaaaaaaa\u2502"


def test_ids_outside_the_tokenizer_are_never_sampled() -> None:
    tokenizer = NullTokenizerConfig(vocabulary_size=10).build()
    text = text_sample(likes(11, 128), tokenizer, np.arange(8), length=LENGTH, seed=0)
    assert all(int(word) < 10 for word in text.splitlines()[1].replace("\u2502", " ").split())


def test_control_bytes_do_not_reach_the_terminal() -> None:
    row = np.frombuffer(b"some\x1b[2J", np.uint8)
    text = text_sample(likes(7, 384), ByteTokenizerConfig().build(), row, length=LENGTH, seed=0)
    assert text.splitlines()[1].startswith("some\\x1b[2J\u2502\\x07\\x07")
