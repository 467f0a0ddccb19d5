"""The blanks that a finished BERT or T5 fills: what is displayed, by models with certain predictions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megajax.inference.sample_outputs import greedy, sample_blanks, sample_spans, split_spans
from megajax.models.presets.bert import bert
from megajax.models.presets.t5 import t5
from megajax.tokenizers.config import WordPieceTokenizerConfig

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s", "."]
LENGTH = 16


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    return WordPieceTokenizerConfig(vocabulary=str(tmp_path / "vocab.txt"), extra_ids=3).build()


def run_of(config: Any, tokenizer: Any, model: Any, valid: Any = None, prompt: str | None = None) -> Any:
    cfg = SimpleNamespace(model=config, logging=SimpleNamespace(prompt=prompt))
    return SimpleNamespace(cfg=cfg, parts=SimpleNamespace(tokenizer=tokenizer, splits=SimpleNamespace(valid=valid)),
                           model=model)  # fmt: skip


def logits_of(tokens: np.ndarray, size: int) -> np.ndarray:
    """Logits [1, S, size + 20] of a nearly certain model; ids beyond the tokenizer's are even likelier."""
    logits = np.full((*tokens.shape, size + 20), -50.0, np.float32)
    np.put_along_axis(logits, tokens[..., None], 50.0, 2)
    logits[..., size:] = 99.0
    return logits


def bert_of(tokenizer: Any, token: int) -> Any:
    """A BERT that predicts one token everywhere, if its rows are complete."""

    def model(*, tokens: np.ndarray, segment_ids: np.ndarray, token_types: np.ndarray) -> np.ndarray:
        assert tokens.shape == segment_ids.shape == token_types.shape == (1, LENGTH)
        assert ((tokens != tokenizer.pad) == segment_ids).all()
        return logits_of(np.full(tokens.shape, token), tokenizer.vocabulary_size)

    return model


BERT = bert("debug", sequence_length=LENGTH, vocabulary_size=32)
T5 = t5("debug", encoder_length=LENGTH, sequence_length=8, vocabulary_size=32)


def test_blanks_of_a_prompt_are_filled(tokenizer: Any, tmp_path: Path) -> None:
    run = run_of(BERT, tokenizer, bert_of(tokenizer, 6), prompt="the [MASK] sat on the [MASK].")
    lines = sample_blanks(run, tmp_path).splitlines()
    assert lines[1] == "the __1__ sat on the __2__ . [SEP]"
    assert [line.split(",")[0].split() for line in lines[2:]] == [["1", "cat", "100%"], ["2", "cat", "100%"]]


def test_blanks_of_a_validation_row_are_shown_beside_the_true_words(tokenizer: Any, tmp_path: Path) -> None:
    row = {name: np.zeros(LENGTH, np.int32) for name in ("tokens", "labels", "segment_ids", "token_types")}
    specials = tokenizer.specials
    row["tokens"][:6] = [specials["cls"], 5, specials["mask"], 10, 7, specials["sep"]]
    row["segment_ids"][:6], row["labels"][2] = 1, 9
    lines = sample_blanks(run_of(BERT, tokenizer, bert_of(tokenizer, 6), valid=[row]), tmp_path).splitlines()
    assert lines[1] == "the __1__ ##s sat [SEP]"
    assert lines[2].split()[:3] == ["1", "cat", "100%,"] and lines[2].split()[-1] == "mat"


def test_problems_are_reported(tokenizer: Any, tmp_path: Path) -> None:
    assert sample_blanks(run_of(BERT, tokenizer, None), tmp_path) is None
    assert sample_spans(run_of(T5, tokenizer, None), tmp_path) is None
    assert "has no [MASK]" in sample_blanks(run_of(BERT, tokenizer, None, prompt="the cat"), tmp_path)
    assert "no mask token" in sample_blanks(run_of(BERT, SimpleNamespace(specials={}, sentinels=()), None), tmp_path)
    none = SimpleNamespace(specials={}, sentinels=())
    assert "no sentinels" in sample_spans(run_of(T5, none, None, prompt="the <extra_id_0>"), tmp_path)


def t5_of(tokenizer: Any, answer: list[int]) -> Any:
    """A T5 that writes a fixed answer and [EOS]."""
    size = tokenizer.vocabulary_size

    def model(*, tokens: np.ndarray, segment_ids: np.ndarray, encoder_tokens: np.ndarray,
              encoder_segment_ids: np.ndarray) -> np.ndarray:  # fmt: skip
        assert tokens[0, 0] == tokenizer.specials["bos"] and tokens.shape == segment_ids.shape == (1, 8)
        assert encoder_tokens.shape == encoder_segment_ids.shape == (1, LENGTH)
        following = np.full((1, 8), tokenizer.specials["eos"])
        following[0, : len(answer)] = answer
        return logits_of(following, size)

    return model


def test_spans_of_a_prompt_are_written(tokenizer: Any, tmp_path: Path) -> None:
    first, second, _ = tokenizer.sentinels
    run = run_of(T5, tokenizer, t5_of(tokenizer, [first, 6, 7, second, 9]),
                 prompt="the <extra_id_0> on the <extra_id_1>.")  # fmt: skip
    lines = sample_spans(run, tmp_path).splitlines()
    assert lines[1] == "the __1__ on the __2__ ."
    assert [line.split() for line in lines[2:]] == [["1", "cat", "sat"], ["2", "mat"]]


def test_spans_of_a_validation_row_are_shown_beside_the_true_words(tokenizer: Any, tmp_path: Path) -> None:
    first, second, _ = tokenizer.sentinels
    row = {name: np.zeros(LENGTH, np.int32) for name in ("encoder_tokens", "encoder_segment_ids")}
    row["encoder_tokens"][:4] = [5, first, 8, second]
    row["encoder_segment_ids"][:4] = 1
    row["labels"] = np.array([first, 6, second, 5, 9, tokenizer.specials["eos"], 0, 0], np.int32)
    row["loss_mask"] = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
    run = run_of(
        T5,
        tokenizer,
        t5_of(tokenizer, [first, 9, 9]),
        valid=[row | {"encoder_tokens": row["encoder_segment_ids"]}, row],
    )
    lines = sample_spans(run, tmp_path).splitlines()
    assert lines[1] == "the __1__ on __2__"
    assert [line.split() for line in lines[2:]] == [["1", "mat", "mat", "cat"], ["2", "-", "the", "mat"]]


def test_a_text_without_blanks_is_answered_as_a_whole(tokenizer: Any, tmp_path: Path) -> None:
    """A row of a pair: the output has no sentinels either."""
    row = {name: np.zeros(LENGTH, np.int32) for name in ("encoder_tokens", "encoder_segment_ids")}
    row["encoder_tokens"][:2], row["encoder_segment_ids"][:2] = [5, 6], 1
    row["labels"] = np.array([9, 10, tokenizer.specials["eos"], 0, 0, 0, 0, 0], np.int32)
    row["loss_mask"] = np.array([1, 1, 1, 0, 0, 0, 0, 0], np.float32)
    lines = sample_spans(run_of(T5, tokenizer, t5_of(tokenizer, [8, 9]), valid=[row]), tmp_path).splitlines()
    assert lines == ["sample (a text; what the model writes, then the true text):", "the cat", "  on mat", "  mats"]
    lines = sample_spans(run_of(T5, tokenizer, t5_of(tokenizer, [8]), prompt="the cat"), tmp_path).splitlines()
    assert lines == ["sample (a text; what the model writes):", "the cat", "  on"]


def test_writing_ends_with_the_row_and_with_the_time_limit(tokenizer: Any) -> None:
    leaves = {name: np.zeros((1, LENGTH), np.int32) for name in ("encoder_tokens", "encoder_segment_ids")}
    model = t5_of(tokenizer, [6] * 8)
    assert greedy(model, tokenizer, leaves, length=8) == [6] * 7
    assert greedy(model, tokenizer, leaves, length=8, seconds=0.0) == []


def test_spans_of_what_was_written() -> None:
    assert split_spans([4, 90, 5, 6, 91, 90, 7], [90, 91]) == {90: [5, 6], 91: []}
