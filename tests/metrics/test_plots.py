"""Per-layer metrics in files, dashboards, terminals and heat maps, and the loss curve."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from megajax.mesh.layer_metrics import Measure, Measured
from megajax.metrics.lines import Summary, short_fields, step_line
from megajax.metrics.plots import LayerColumns, plot_layers, plot_loss, running_mean
from megajax.metrics.record import EvaluationRecord, StepRecord
from megajax.metrics.writer import Writers
from megajax.metrics.writers import JsonlWriter, LayersWriter, scalars

LOAD = Measure(name="load", of=lambda state: state, over_layers="max", label="load", format="{:.2f}x")
DROPPED = Measure(name="dropped", of=lambda state: state, label="dropped", format="{:.1%}", above=0.0)
TOKENS = Measure(name="expert_tokens", of=lambda state: state)


def reports(load: list[float], dropped: float = 0.0, tokens: list[list[float]] | None = None) -> dict[str, Measured]:
    """Reports of layers 1 and 3, and of a layer with a name."""
    layers = (1, 3, "predictions.0")
    reports = {"load": Measured(LOAD, layers, np.array(load)), "dropped": Measured(DROPPED, (3,), np.array([dropped]))}
    return reports | ({} if tokens is None else {"expert_tokens": Measured(TOKENS, (1, 3), np.array(tokens))})


def test_a_line_has_the_reduced_metric_and_the_metric_of_each_layer(step: Callable[..., StepRecord]) -> None:
    line = step(1, measured=reports([1.5, 2.123456789, np.nan], tokens=[[3, 1], [2, 2]])).line()
    assert np.isnan(line["load"]) and line["dropped"] == 0
    assert "expert_tokens" not in line
    by_layer = line["by_layer"]
    assert by_layer["layers"] == [1, 3, "predictions.0"] and by_layer["dropped"] == [None, 0, None]
    assert by_layer["load"][:2] == [1.5, 2.1235] and np.isnan(by_layer["load"][2])
    assert "by_layer" not in step(1).line()
    with pytest.raises(ValueError, match="both report \\['load'\\]"):
        step(1, measured=reports([1, 1, 1]), metrics={"load": 1.0}).line()


def test_terminals_show_metrics_above_their_thresholds(step: Callable[..., StepRecord]) -> None:
    calm, busy = (Summary.of([step(1, measured=reports([1, 2, 1.5], dropped))]) for dropped in (0.0, 0.003))
    assert ("load", "2.00x") in short_fields(calm) and "dropped" not in dict(short_fields(calm))
    assert ("dropped", "0.3%") in short_fields(busy)
    line = step_line(busy, total_steps=2, now=datetime(2026, 1, 1), eta=None)
    assert " | load: 2.00x | dropped: 0.3% | " in line


def test_dashboards_get_layers_in_detailed_steps_only(step: Callable[..., StepRecord]) -> None:
    plain, detailed = (scalars(step(1, measured=reports([1, 2, 1.5]), detailed=flag)) for flag in (False, True))
    assert plain["train/load"] == 2 and "train/load/layer_1" not in plain
    assert detailed["train/load/layer_3"] == 2 and detailed["train/load/layer_predictions.0"] == 1.5


def test_lists_of_layers_are_in_a_separate_file_that_is_rewound(
    tmp_path: Path, step: Callable[..., StepRecord]
) -> None:
    path = tmp_path / "layers.jsonl"
    with LayersWriter(path) as writer:
        writer.log(step(1, detailed=True))
        assert not path.exists()
        for number in range(1, 5):
            layer_reports = reports([1, 1, 1], tokens=[[number, 1], [2, 2.5]])
            writer.log(step(number, measured=layer_reports, detailed=number % 2 == 0))
    with LayersWriter(path, start_step=3) as writer:
        writer.log(step(4, measured=reports([1, 1, 1], tokens=[[7, 1], [2, 2]]), detailed=True))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0] == {"step": 2, "layers": [1, 3], "expert_tokens": [[2, 1], [2, 2.5]]}
    assert lines[1]["expert_tokens"] == [[7, 1], [2, 2]]


def test_files_become_heat_maps(tmp_path: Path, step: Callable[..., StepRecord]) -> None:
    metrics, layers = tmp_path / "metrics.jsonl", tmp_path / "layers.jsonl"
    with Writers([JsonlWriter(metrics), LayersWriter(layers)]) as writers:
        for number in range(1, 501):
            load = [1.0, 2 + (number == 250), np.nan]
            writers.log(step(number, measured=reports(load, tokens=[[3, 1], [2, 2]]), detailed=number == 500))
    columns = LayerColumns()
    for line in map(json.loads, metrics.read_text().splitlines()):
        columns.add(line)
    load, tokens = columns.history(layers).heat_maps()  # No map of `dropped`, which is always 0.
    assert (load.title, load.rows, load.first, load.last) == ("load", ("1", "3", "predictions.0"), 0.5, 500.5)
    assert len(load.values[0]) == 400 and max(load.values[1]) == 3 and np.isnan(load.values[2]).all()
    assert tokens.rows == ("1", "3") and tokens.values == [[1.5, 0.5], [1, 1]]
    assert plot_layers(metrics, layers, tmp_path / "layers.png") == f"layers: {tmp_path / 'layers.png'}"
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    assert plot_layers(tmp_path / "layers.jsonl", tmp_path / "none", tmp_path / "other.png") == ""


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
    monkeypatch.setattr("megajax.metrics.plots.save_png", lambda draw, *_, **__: charts.append(draw.__self__))
    with JsonlWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(step(1, 2.0))
        writer.log(step(2, 1.9))
        writer.log(EvaluationRecord(step=1, split="race", loss=None, metrics={"accuracy": 0.5}))
        writer.log(EvaluationRecord(step=1, split="test", loss=2.5))
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny")
    assert [series.name for series in charts[0].series] == ["train loss", "test loss"]


def test_the_reward_is_drawn_if_there_is_one(tmp_path, step, monkeypatch):
    charts = []
    monkeypatch.setattr("megajax.metrics.plots.save_png", lambda draw, *_, **__: charts.append(draw.__self__))
    with JsonlWriter(tmp_path / "metrics.jsonl") as writer:
        for number in range(1, 5):
            writer.log(replace(step(number, 0.0), metrics={"reward": number / 4} if number % 2 else {}))
    assert (
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny", vocabulary=9)[:12] == "reward curve"
    )
    (series,) = charts[0].series
    assert (series.name, [*series.x], [*series.y]) == ("train reward", [1, 3], [0.25, 0.75])


def test_a_note_without_matplotlib_or_steps(tmp_path, monkeypatch, step):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "has no steps" in plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny")
    write_run(tmp_path / "metrics.jsonl", 1, step)
    assert "has one step" in plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", title="tiny")
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
