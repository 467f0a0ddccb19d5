"""Confusion of classes at the end of a run: counts, the table, and the picture."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megajax.inference.sample_outputs import PICTURE, SAMPLERS, confused_pairs, confusion, sample_confusion
from megajax.models.presets.vit import vit
from megajax.models.vit.config import SegmenterConfig


class Rows:
    """Images whose first pixel decides what `Model` predicts."""

    def __init__(self, labels: np.ndarray, predictions: np.ndarray):
        self.labels, self.taken = labels, predictions
        self.items = SimpleNamespace(classes=("cat", "dog", "cow"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        predictions = np.asarray(self.taken[row], np.uint8)
        images = np.broadcast_to(predictions.reshape(*(predictions.shape or (1, 1)), 1), (2, 2, 3))
        return {"images": images, "labels": self.labels[row]}


def run_of(rows: Rows, pixels: bool = False, **splits: Any) -> Any:
    def model(*, images: np.ndarray) -> np.ndarray:
        predictions = images[..., 0] if pixels else images[:, 0, 0, 0]
        return np.eye(3, dtype=np.float32)[predictions]

    parts = SimpleNamespace(splits=SimpleNamespace(**{"test": rows, "valid": None, **splits}))
    config = vit("debug", image=8)
    config = replace(config, head=SegmenterConfig(classes=3)) if pixels else config
    return SimpleNamespace(cfg=SimpleNamespace(model=config), parts=parts, model=model)


def test_counts_equal_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 3, (2, 150))
    expected = np.zeros((3, 3), int)
    for label, prediction in zip(labels, predictions, strict=True):
        expected[label, prediction] += 1
    rows = Rows(labels, predictions)
    np.testing.assert_array_equal(confusion(run_of(rows), rows), expected)


def test_pixels_without_a_class_do_not_count() -> None:
    labels = np.array([[[0, 1], [255, 2]]])
    rows = Rows(labels, np.array([[[0, 2], [1, 2]]]))
    np.testing.assert_array_equal(confusion(run_of(rows, pixels=True), rows), [[1, 0, 0], [0, 0, 1], [0, 0, 1]])


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = sample_confusion(run_of(Rows(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]))), tmp_path)
    assert text is not None
    title, header, cat, dog, *_ = text.splitlines()
    assert title == "test: 75.00% of 4 right"
    assert header.split() == ["cat", "dog", "cow", "right"]
    assert (cat.split(), dog.split()) == (["cat", "1", ".", ".", "100.0%"], ["dog", ".", "1", "1", "50.0%"])
    assert (tmp_path / PICTURE).stat().st_size > 5000


def test_without_matplotlib_the_table_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("matplotlib is not installed", name="matplotlib")

    monkeypatch.setattr("megajax.inference.sample_outputs.save_png", missing)
    rows = Rows(np.array([0, 1]), np.array([0, 0]))
    text = sample_confusion(run_of(None, valid=rows), tmp_path)
    assert text is not None and text.startswith("validation: 50.00% of 2 right") and "not drawn" in text
    assert sample_confusion(run_of(None), tmp_path) is None


def test_with_many_classes_the_pairs_are_listed() -> None:
    counts = np.array([[5, 2, 0], [0, 7, 0], [3, 0, 1]])
    assert confused_pairs(counts, ["a", "b", "c"]) == "c taken for a: 3\na taken for b: 2"


def test_vit_names_it() -> None:
    assert vit("debug", image=8).sampler() in SAMPLERS
