"""The samples that finished runs show, by models with certain predictions."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megajax.config import load
from megajax.models.presets.encoders import bert, t5
from megajax.tasks.end_of_run_samples import SAMPLERS, sample
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig, WordPieceTokenizerConfig

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s", "."]
LENGTH = 16
BERT = bert("debug", sequence_length=LENGTH, vocabulary_size=32)
T5 = t5("debug", encoder_length=LENGTH, sequence_length=8, vocabulary_size=32)
ENCODER = ("encoder_tokens", "encoder_segment_ids")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    return WordPieceTokenizerConfig(vocabulary=str(tmp_path / "vocab.txt"), extra_ids=3).build()


def run_of(config: Any, tokenizer: Any, model: Any, prompt: str | None = None, **splits: Any) -> Any:
    """A run as far as samples read it."""
    cfg = SimpleNamespace(model=config, seed=0, logging=SimpleNamespace(prompt=prompt))
    parts = SimpleNamespace(tokenizer=tokenizer, splits=SimpleNamespace(**{"valid": None, "test": None, **splits}))
    return SimpleNamespace(cfg=cfg, parts=parts, model=model)


@dataclass(frozen=True)
class Named:
    """A model's config that names a function."""

    function: str | None

    def sampler(self) -> str | None:
        return self.function


def shown(run: Any, folder: Path) -> str:
    return f"{run.cfg.model.function.rpartition(':')[2]} in {folder.name}"


@pytest.mark.smoke
def test_the_sample_is_what_the_model_names(tmp_path: Path) -> None:
    own = run_of(Named(f"{__name__}:shown"), None, None)
    assert sample(own, tmp_path) == f"shown in {tmp_path.name}"
    assert sample(run_of(Named(None), None, None), tmp_path) is None
    for name in ("bert.py", "gpt3.py", "llava.py", "t5.py"):
        assert load(f"{name}:debug").model.sampler() in SAMPLERS


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("tokenizer", "row", "token", "line"),
    [
        pytest.param(
            ByteTokenizerConfig(), list(b"some bytes of te"), ord("x"), f"some byt\u2502{'x' * 256}", id="text"
        ),
        pytest.param(ByteTokenizerConfig(), [ord("a")] * LENGTH, 256, "aaaaaaaa\u2502", id="end of document"),
        pytest.param(
            ByteTokenizerConfig(), list(b"some\x1b[2J"), 7, "some\\x1b[2J\u2502" + "\\x07" * 256, id="control bytes"
        ),
        pytest.param(NullTokenizerConfig(vocabulary_size=10), range(8), 11, None, id="ids outside the tokenizer"),
    ],
)
def test_a_prompt_is_continued(tokenizer: Any, row: Any, token: int, line: str | None) -> None:
    def model(tokens: np.ndarray) -> np.ndarray:
        logits = np.zeros((*tokens.shape, 384), np.float32)
        logits[..., token] = 50.0
        return logits

    run = run_of(
        SimpleNamespace(sampler=lambda: "continuation", row_positions=lambda: LENGTH), tokenizer.build(), model
    )
    run.parts.splits.valid = [{"tokens": np.asarray(row)}]
    text = sample(run, Path())
    assert text is not None
    if line is None:
        assert all(int(word) < 10 for word in text.splitlines()[1].replace("\u2502", " ").split())
    else:
        assert text.splitlines()[1] == line


def logits_of(tokens: np.ndarray, size: int) -> np.ndarray:
    """Logits [1, S, size + 20] of a nearly certain model; ids beyond the tokenizer's are even likelier."""
    logits = np.full((*tokens.shape, size + 20), -50.0, np.float32)
    np.put_along_axis(logits, tokens[..., None], 50.0, 2)
    logits[..., size:] = 99.0
    return logits


def test_blanks_of_bert_are_filled(tokenizer: Any, tmp_path: Path) -> None:
    """They are those of the first validation row that has some."""

    def model(*, tokens: np.ndarray, segment_ids: np.ndarray, token_types: np.ndarray) -> np.ndarray:
        assert tokens.shape == segment_ids.shape == token_types.shape == (1, LENGTH)
        return logits_of(np.full(tokens.shape, 6), tokenizer.vocabulary_size)

    row = {name: np.zeros(LENGTH, np.int32) for name in ("tokens", "labels", "segment_ids", "token_types")}
    specials, without = tokenizer.specials, {name: array.copy() for name, array in row.items()}
    row["tokens"][:6] = [specials["cls"], 5, specials["mask"], 10, specials["mask"], specials["sep"]]
    row["segment_ids"][:6], row["labels"][2], row["labels"][4] = 1, 9, 7
    lines = sample(run_of(BERT, tokenizer, model, valid=[without, row]), tmp_path).splitlines()
    assert lines[1:] == ["  the __1__ ##s __2__ [SEP]", "  __1__ cat __2__ cat", "  __1__ mat __2__ sat"]


def test_without_rows_there_is_no_sample(tokenizer: Any, tmp_path: Path) -> None:
    for model in (BERT, T5, load("llava.py:debug").model):
        assert sample(run_of(model, tokenizer, None), tmp_path) is None


def t5_of(tokenizer: Any, answer: list[int]) -> Any:
    """A T5 that writes a fixed answer and [EOS]."""

    def model(*, tokens: np.ndarray, segment_ids: np.ndarray, **encoder: np.ndarray) -> np.ndarray:
        assert tokens[0, 0] == tokenizer.specials["bos"] and tokens.shape == segment_ids.shape == (1, 8)
        assert [encoder[name].shape for name in ENCODER] == [(1, LENGTH)] * 2
        following = np.full((1, 8), tokenizer.specials["eos"])
        following[0, : len(answer)] = answer
        return logits_of(following, tokenizer.vocabulary_size)

    return model


def row_of(tokenizer: Any, tokens: list[int], labels: list[int]) -> dict[str, np.ndarray]:
    row = {name: np.zeros(LENGTH, np.int32) for name in ENCODER}
    row["encoder_tokens"][: len(tokens)], row["encoder_segment_ids"][: len(tokens)] = tokens, 1
    labels = [*labels, tokenizer.specials["eos"]]
    padding = [0] * (8 - len(labels))
    return row | {"labels": np.array([*labels, *padding]), "loss_mask": np.array([1.0] * len(labels) + padding)}


def test_spans_of_t5_are_written(tokenizer: Any, tmp_path: Path) -> None:
    """They are those of the first row that has blanks. A text without any is answered, up to the length of a row."""
    first, second, _ = tokenizer.sentinels

    def lines(answer: list[int], *rows: dict[str, np.ndarray]) -> list[str]:
        run = run_of(T5, tokenizer, t5_of(tokenizer, answer), valid=[*rows])
        return [line.strip() for line in sample(run, tmp_path).splitlines()[1:]]

    without = row_of(tokenizer, [5, 6], [9, 10])
    row = row_of(tokenizer, [5, first, 8, second], [first, 6, second, 5, 9])
    texts = ["the __1__ on __2__", "__1__ mat mat", "__1__ cat __2__ the mat"]
    assert lines([first, 9, 9], without, row) == texts
    assert lines([8, 9], without) == ["the cat", "on mat", "mats"]
    assert lines([6] * 8, without)[1] == " ".join(["cat"] * 7)


def test_captions_are_counted(tmp_path: Path) -> None:
    """Right if every token with a loss is."""
    tokenizer, labels = ByteTokenizerConfig().build(), np.array([*b"a cat", 256, 0, 0])

    def model(*, tokens: np.ndarray) -> np.ndarray:
        return np.concatenate([logits_of(row[None], 257) for row in tokens])

    mask = (np.arange(8) < 6).astype(np.float32)
    rows = [{"tokens": labels, "labels": labels, "loss_mask": mask}] * 40
    rows.append(rows[0] | {"tokens": np.where(np.arange(8) == 2, ord("b"), labels)})
    text = sample(run_of(load("llava.py:debug").model, tokenizer, model, valid=rows), tmp_path)
    assert text.splitlines()[1] == "  a cat   (data: a cat)"
    assert "captions right: 40 of 41 validation rows (97.6%)" in text
