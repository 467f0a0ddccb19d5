"""The samples that finished runs show, by models with certain predictions."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megajax.config import load
from megajax.models.presets.encoders import bert, t5
from megajax.models.presets.vit import vit
from megajax.models.vit.config import SegmenterConfig
from megajax.tasks.end_of_run_samples import (
    PICTURE,
    SAMPLERS,
    confused_pairs,
    confusion,
    greedy,
    sample,
    sample_blanks,
    sample_confusion,
    sample_spans,
    split_spans,
    text_sample,
)
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
    cfg = SimpleNamespace(model=config, logging=SimpleNamespace(prompt=prompt))
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
    for name in ("bert.py", "gpt3.py", "llava.py", "t5.py", "vit.py"):
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

    text = text_sample(model, tokenizer.build(), np.asarray(row), length=LENGTH, seed=0)
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
    """Those of a prompt; those of a validation row beside the true words."""

    def model(*, tokens: np.ndarray, segment_ids: np.ndarray, token_types: np.ndarray) -> np.ndarray:
        assert tokens.shape == segment_ids.shape == token_types.shape == (1, LENGTH)
        assert ((tokens != tokenizer.pad) == segment_ids).all()
        return logits_of(np.full(tokens.shape, 6), tokenizer.vocabulary_size)

    lines = sample_blanks(run_of(BERT, tokenizer, model, "the [MASK] sat on the [MASK]."), tmp_path).splitlines()
    assert lines[1] == "the __1__ sat on the __2__ . [SEP]"
    assert [line.split(",")[0].split() for line in lines[2:]] == [["1", "cat", "100%"], ["2", "cat", "100%"]]
    row = {name: np.zeros(LENGTH, np.int32) for name in ("tokens", "labels", "segment_ids", "token_types")}
    specials = tokenizer.specials
    row["tokens"][:6] = [specials["cls"], 5, specials["mask"], 10, 7, specials["sep"]]
    row["segment_ids"][:6], row["labels"][2] = 1, 9
    lines = sample_blanks(run_of(BERT, tokenizer, model, valid=[row]), tmp_path).splitlines()
    assert lines[1] == "the __1__ ##s sat [SEP]"
    assert lines[2].split()[:3] == ["1", "cat", "100%,"] and lines[2].split()[-1] == "mat"


def test_problems_are_reported(tokenizer: Any, tmp_path: Path) -> None:
    assert sample_blanks(run_of(BERT, tokenizer, None), tmp_path) is None
    assert sample_spans(run_of(T5, tokenizer, None), tmp_path) is None
    assert "has no [MASK]" in sample_blanks(run_of(BERT, tokenizer, None, "the cat"), tmp_path)
    none = SimpleNamespace(specials={}, sentinels=())
    assert "no mask token" in sample_blanks(run_of(BERT, none, None), tmp_path)
    assert "no sentinels" in sample_spans(run_of(T5, none, None, "the <extra_id_0>"), tmp_path)


def t5_of(tokenizer: Any, answer: list[int]) -> Any:
    """A T5 that writes a fixed answer and [EOS]."""

    def model(*, tokens: np.ndarray, segment_ids: np.ndarray, **encoder: np.ndarray) -> np.ndarray:
        assert tokens[0, 0] == tokenizer.specials["bos"] and tokens.shape == segment_ids.shape == (1, 8)
        assert [encoder[name].shape for name in ENCODER] == [(1, LENGTH)] * 2
        following = np.full((1, 8), tokenizer.specials["eos"])
        following[0, : len(answer)] = answer
        return logits_of(following, tokenizer.vocabulary_size)

    return model


def encoder_row(tokens: list[int]) -> dict[str, np.ndarray]:
    row = {name: np.zeros(LENGTH, np.int32) for name in ENCODER}
    row["encoder_tokens"][: len(tokens)], row["encoder_segment_ids"][: len(tokens)] = tokens, 1
    return row


def decoder_row(tokenizer: Any, labels: list[int]) -> dict[str, np.ndarray]:
    labels = [*labels, tokenizer.specials["eos"]]
    padding = [0] * (8 - len(labels))
    return {"labels": np.array([*labels, *padding]), "loss_mask": np.array([1.0] * len(labels) + padding)}


def test_spans_of_t5_are_written(tokenizer: Any, tmp_path: Path) -> None:
    """Those of a prompt; those of a validation row beside the true words; texts without blanks as a whole."""
    first, second, _ = tokenizer.sentinels

    def lines(answer: list[int], prompt: str | None = None, **splits: Any) -> list[str]:
        return sample_spans(run_of(T5, tokenizer, t5_of(tokenizer, answer), prompt, **splits), tmp_path).splitlines()

    _, text, *spans = lines([first, 6, 7, second, 9], "the <extra_id_0> on the <extra_id_1>.")
    assert text == "the __1__ on the __2__ ." and [line.split() for line in spans] == [
        ["1", "cat", "sat"],
        ["2", "mat"],
    ]
    row = encoder_row([5, first, 8, second]) | decoder_row(tokenizer, [first, 6, second, 5, 9])
    without = row | {"encoder_tokens": row["encoder_segment_ids"]}
    _, text, *spans = lines([first, 9, 9], valid=[without, row])
    assert text == "the __1__ on __2__"
    assert [line.split() for line in spans] == [["1", "mat", "mat", "cat"], ["2", "-", "the", "mat"]]
    row = encoder_row([5, 6]) | decoder_row(tokenizer, [9, 10])
    title = "sample (a text; what the model writes, then the true text):"
    assert lines([8, 9], valid=[row]) == [title, "the cat", "  on mat", "  mats"]
    assert lines([8], "the cat") == ["sample (a text; what the model writes):", "the cat", "  on"]


def test_writing_ends_with_the_row_and_with_the_time_limit(tokenizer: Any) -> None:
    leaves = {name: np.zeros((1, LENGTH), np.int32) for name in ENCODER}
    model = t5_of(tokenizer, [6] * 8)
    assert greedy(model, tokenizer, leaves, length=8) == [6] * 7
    assert greedy(model, tokenizer, leaves, length=8, seconds=0.0) == []
    assert split_spans([4, 90, 5, 6, 91, 90, 7], [90, 91]) == {90: [5, 6], 91: []}


class Rows:
    """Images whose first pixel decides what the model of `images_run` predicts."""

    def __init__(self, labels: Any, predictions: Any):
        self.labels, self.taken = np.asarray(labels), np.asarray(predictions, np.uint8)
        self.items = SimpleNamespace(classes=("cat", "dog", "cow"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        predictions = self.taken[row]
        images = np.broadcast_to(predictions.reshape(*(predictions.shape or (1, 1)), 1), (2, 2, 3))
        return {"images": images, "labels": self.labels[row]}


def images_run(*, pixels: bool = False, **splits: Any) -> Any:
    def model(*, images: np.ndarray) -> np.ndarray:
        return np.eye(3, dtype=np.float32)[images[..., 0] if pixels else images[:, 0, 0, 0]]

    config = vit("debug", image=8)
    return run_of(replace(config, head=SegmenterConfig(classes=3)) if pixels else config, None, model, **splits)


def test_counts_of_classes() -> None:
    """More images than a forward pass takes; pixels without a class do not count."""
    labels, predictions = np.random.default_rng(0).integers(0, 3, (2, 150))
    expected = np.zeros((3, 3), int)
    for label, prediction in zip(labels, predictions, strict=True):
        expected[label, prediction] += 1
    np.testing.assert_array_equal(confusion(images_run(), Rows(labels, predictions)), expected)
    rows = Rows([[[0, 1], [255, 2]]], [[[0, 2], [1, 2]]])
    np.testing.assert_array_equal(confusion(images_run(pixels=True), rows), [[1, 0, 0], [0, 0, 1], [0, 0, 1]])


def test_confusion_is_a_table_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    text = sample_confusion(images_run(test=Rows([0, 1, 1, 2], [0, 1, 2, 2])), tmp_path)
    assert text is not None
    title, header, cat, dog, *_ = text.splitlines()
    assert title == "test: 75.00% of 4 right"
    assert header.split() == ["cat", "dog", "cow", "right"]
    assert (cat.split(), dog.split()) == (["cat", "1", ".", ".", "100.0%"], ["dog", ".", "1", "1", "50.0%"])
    assert (tmp_path / PICTURE).stat().st_size > 5000

    def missing(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("matplotlib is not installed", name="matplotlib")

    monkeypatch.setattr("megajax.tasks.end_of_run_samples.save_png", missing)
    text = sample_confusion(images_run(valid=Rows([0, 1], [0, 0])), tmp_path)
    assert text is not None and text.startswith("validation: 50.00% of 2 right") and "not drawn" in text
    assert sample_confusion(images_run(), tmp_path) is None
    counts = np.array([[5, 2, 0], [0, 7, 0], [3, 0, 1]])
    assert confused_pairs(counts, ["a", "b", "c"]) == "c taken for a: 3\na taken for b: 2"
