"""Calibration, and what is compiled for virtual GPUs: figures, their files, and the tables of docs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu import calibrate
from benchmarks.outcome import ROOT
from benchmarks.planning import accuracy as planner_accuracy
from benchmarks.planning import compiled_peaks, shipped
from benchmarks.planning.compiled_peaks import CONFIGS, FIGURES, PAGES, PLANS, differences, stored_figures, with_table
from megajax.planning.compiled.devices import GPUS, read_device
from megajax.planning.ranking import SIMPLER


def test_the_fit_recovers_rate_and_half_size() -> None:
    def rate(sizes: tuple[int, ...]) -> float:
        share = 7e14
        for n in sizes:
            share *= n / (n + 96)
        return share

    readings = [(sizes, rate(sizes)) for sizes in calibrate.SIZES]
    assert calibrate.fit(readings) == (pytest.approx(7e14), 96)


def test_the_planner_reads_the_file_of_a_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    words = ["calibrate", "--tiny", "--seconds=0.01", "--devices=cpu:2", f"--json={file}"]
    command = [sys.executable, "-m", "benchmarks", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    constants = yaml.safe_load(file.read_text())["figures"]["constants"]
    calibration = tmp_path / "whole.yaml"
    calibration.write_text(yaml.safe_dump(constants | {"network": 1e9, "memory_gib": 16}))
    actual = read_device(calibration)
    assert actual.name == "cpu" and actual.peak > 0 and actual.bandwidth > 0 and actual.nvlink > 0


def test_published_speeds_are_predicted() -> None:
    actual = planner_accuracy.lines()
    sizes = sorted(abs(line["error"]) for line in actual)
    assert sizes[len(sizes) // 2] <= 0.06 and sizes[-1] <= 0.2
    devices = {run.device for run in planner_accuracy.RUNS}
    assert devices == {"a100-80gb", "h100", "h200", "b200", "gb200"}
    table = planner_accuracy.table(actual)
    assert all(run.name in table for run in planner_accuracy.RUNS)


def test_the_file_has_exactly_the_plans() -> None:
    figures = stored_figures()
    assert list(figures) == [plan.key for plan in PLANS]
    assert CONFIGS.keys() == {plan.config for plan in PLANS}
    for plan in PLANS:
        actual = figures[plan.key]
        assert (actual["config"], actual["gpus"]) == (CONFIGS[plan.config], plan.gpus)
        assert actual["settings"] == list(plan.settings) and actual["commit"]
        assert actual["arguments_gib"] + actual["temporary_gib"] == pytest.approx(actual["peak_gib"], rel=0.01)


def test_shipped_layouts_leave_room_on_their_gpus() -> None:
    """5 % of what a run reserves, by the compiled program."""
    peaks = {plan: figures["peak_gib"] for plan, figures in zip(PLANS, stored_figures().values(), strict=True)}
    shares = {plan.key: peak / GPUS[plan.gpu].usable_gib(0.92) for plan, peak in peaks.items() if not plan.change}
    assert max(shares.values()) <= 0.95, shares


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_a_page_matches_the_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    expected_page = with_table(text, PAGES[page], stored_figures())
    assert text == expected_page, f"{page} is not as {FIGURES.name} says: python -m benchmarks compiled_peaks --pages"


def test_a_changed_figure_changes_the_table() -> None:
    figures = stored_figures()
    figures[PLANS[0].key] |= {"peak_gib": 12.34}
    text = (ROOT / "docs/layouts.md").read_text(encoding="utf-8")
    assert " | 12.3 of 72.9 GiB |" in with_table(text, "configs", figures)
    with pytest.raises(ValueError, match=r"the marks .* are missing"):
        with_table("a page without marks", "configs", figures)


def test_config_files_state_no_memory_figures() -> None:
    for file in {ROOT / "configs" / name.partition(":")[0] for name in CONFIGS.values()}:
        sizes = re.findall(r"\d GiB", file.read_text(encoding="utf-8"))
        assert not sizes, f"{file.name} has a figure of its own: docs/layouts.md has it"


def test_check_reports_changed_figures_and_writes_nothing(monkeypatch, capsys, tmp_path) -> None:
    before = {"peak_gib": 20.0, "ring_slots": 8, "commit": "old"}
    assert list(differences(before, {"peak_gib": 20.1, "ring_slots": 8, "commit": "new"})) == []
    assert list(differences(before, {"peak_gib": 20.3, "ring_slots": 9})) == [
        "peak_gib: 20.0 on file, 20.3 compiled", "ring_slots: 8 on file, 9 compiled",
    ]  # fmt: skip
    plans = {plan.key: stored_figures()[plan.key] for plan in PLANS}

    def larger(plan: compiled_peaks.Plan) -> dict[str, Any]:
        return plans[plan.key] | {"peak_gib": 2 * plans[plan.key]["peak_gib"]}

    monkeypatch.setattr(compiled_peaks, "compiled", larger)
    monkeypatch.setattr(compiled_peaks, "prepare", lambda: None)
    stored = json.dumps(stored_figures())
    assert compiled_peaks.compiled_peaks(only=("gpt3_6_7b",), check=True) == {"wrong": 1}
    assert "peak_gib" in capsys.readouterr().out and json.dumps(stored_figures()) == stored


@pytest.mark.slow
@pytest.mark.parametrize("key", ["llama3_8b, 8"])
def test_the_compiler_reproduces_a_stored_figure(key: str) -> None:
    pytest.importorskip("jax_cuda12_plugin")
    plan = next(plan for plan in PLANS if plan.key == key)
    assert list(differences(stored_figures()[plan.key], compiled_peaks.compiled(plan))) == []


@pytest.mark.parametrize("row", shipped.ROWS, ids=lambda row: row.key)
def test_a_shipped_layout_is_no_slower_than_the_published_one(row: shipped.Published) -> None:
    """The same formulas say so, and it is at most as much slower than the fastest as a simpler layout may be."""
    settings = json.loads(shipped.FIGURES.read_text(encoding="utf-8"))[row.key]
    own, fastest = shipped.case_of(row), shipped.case_of(row, *settings)
    published = shipped.published(row)
    assert published is not None and own.estimate.step_seconds <= published.step_seconds
    assert own.estimate.step_seconds <= (1 + SIMPLER) * fastest.estimate.step_seconds
    larger = shipped.case_of(row, gpu="h200").estimate
    assert larger.step_seconds < own.estimate.step_seconds and larger.fits


def test_the_table_of_shipped_layouts_is_of_the_present_formulas() -> None:
    found = json.loads(shipped.FIGURES.read_text(encoding="utf-8"))
    page = shipped.PAGE.read_text(encoding="utf-8")
    assert "\n".join([shipped.BEGIN, *shipped.lines(found), shipped.END]) in page
