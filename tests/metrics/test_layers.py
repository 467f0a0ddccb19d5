"""Per-layer metrics in files, dashboards, terminals and heat maps."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from megajax.mesh.layer_metrics import Measure, Measured
from megajax.metrics.layer_history import LayerColumns, plot_layers
from megajax.metrics.lines import Summary, short_fields, step_line
from megajax.metrics.record import StepRecord
from megajax.metrics.writers import JsonlWriter, LayersWriter, Writers, scalars

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
        for number in range(1, 1001):
            load = [1.0, 2 + (number == 500), np.nan]
            writers.log(step(number, measured=reports(load, tokens=[[3, 1], [2, 2]]), detailed=number == 1000))
    columns = LayerColumns()
    for line in map(json.loads, metrics.read_text().splitlines()):
        columns.add(line)
    load, tokens = columns.history(layers).heat_maps()  # No map of `dropped`, which is always 0.
    assert (load.title, load.rows, load.first, load.last) == ("load", ("1", "3", "predictions.0"), 0.5, 1000.5)
    assert len(load.values[0]) == 400 and max(load.values[1]) == 3 and np.isnan(load.values[2]).all()
    assert tokens.rows == ("1", "3") and tokens.values == [[1.5, 0.5], [1, 1]]
    assert plot_layers(metrics, layers, tmp_path / "layers.png") == f"layers: {tmp_path / 'layers.png'}"
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    assert plot_layers(tmp_path / "layers.jsonl", tmp_path / "none", tmp_path / "other.png") == ""
