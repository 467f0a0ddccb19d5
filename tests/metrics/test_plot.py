"""The loss curve."""

import math
import sys

import numpy as np
import pytest

from megajax.metrics.plot import plot_loss, running_mean
from megajax.metrics.record import EvaluationRecord
from megajax.metrics.writers import JsonlWriter


class WithoutMatplotlib:
    """An import hook that hides matplotlib."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def write_run(path, steps: int, step) -> None:
    writer = JsonlWriter(path)
    noise = np.random.default_rng(0).normal(0, 0.15, steps + 1)
    for number in range(1, steps + 1):
        loss = 3 + 7.8 * math.exp(-number / 40) + noise[number]
        writer.log(step(number, math.nan if number == steps // 2 else loss))
        if number % 25 == 0:
            writer.log(EvaluationRecord(step=number, split="validation", loss=loss + 0.1))
    writer.close()


def test_a_picture_of_the_curve(tmp_path, step):
    image = pytest.importorskip("matplotlib.image")
    write_run(tmp_path / "metrics.jsonl", 300, step)
    note = plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny", vocabulary=50257)
    assert note == f"loss curve: {tmp_path / 'loss.png'}"
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.shape[:2] == (900, 1600)
    colours = {tuple(colour) for colour in (pixels[..., :3].reshape(-1, 3) * 255).round().astype(int)}
    assert {(31, 119, 180), (255, 127, 14), (128, 128, 128)} <= colours  # the mean, the validation points, ln V
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_evaluations_without_a_loss_are_not_drawn(tmp_path, step, monkeypatch):
    charts = []
    monkeypatch.setattr("megajax.metrics.plot.save_png", lambda draw, *_, **__: charts.append(draw.__self__))
    with JsonlWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(step(1, 2.0))
        writer.log(EvaluationRecord(step=1, split="race", loss=None, metrics={"accuracy": 0.5}))
        writer.log(EvaluationRecord(step=1, split="test", loss=2.5))
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny")
    assert [series.name for series in charts[0].series] == ["train loss", "test loss"]


def test_one_step_is_enough_for_a_picture(tmp_path, step):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "metrics.jsonl", 1, step)
    assert plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny").startswith("loss curve")


def test_a_note_without_matplotlib_or_steps(tmp_path, monkeypatch, step):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "has no steps" in plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny")
    write_run(tmp_path / "metrics.jsonl", 2, step)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutMatplotlib, *sys.meta_path])
    note = plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny")
    assert "megajax[plot]" in note
    assert "\n" not in note
    assert not (tmp_path / "loss.png").exists()


def test_running_mean_skips_non_finite_values():
    values = np.array([1.0, 3.0, np.nan, 5.0, np.inf, np.nan, np.nan])
    assert running_mean(values, 3) == pytest.approx([1, 2, 2, 4, 5, 5, np.nan], nan_ok=True)
