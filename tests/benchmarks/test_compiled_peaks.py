"""The file of figures of compiled plans, and the tables of docs made from it."""

import json
import re
from typing import Any

import pytest

from benchmarks.outcome import ROOT
from benchmarks.planning import compiled_peaks
from benchmarks.planning.compiled_peaks import (
    CONFIGS,
    FIGURES,
    HARDWARE,
    PAGES,
    PLANS,
    differences,
    stored_figures,
    with_table,
)


def test_the_file_has_exactly_the_plans() -> None:
    figures = stored_figures()
    assert list(figures) == [plan.key for plan in PLANS]
    assert CONFIGS.keys() == HARDWARE.keys() == {plan.config for plan in PLANS}
    for plan in PLANS:
        actual = figures[plan.key]
        assert (actual["config"], actual["gpus"]) == (CONFIGS[plan.config], plan.gpus)
        assert actual["settings"] == list(plan.settings) and actual["commit"]
        assert actual["arguments_gib"] + actual["temporary_gib"] == pytest.approx(actual["peak_gib"], rel=0.01)


def test_large_models_leave_room_on_their_gpus() -> None:
    """Limits set in advance."""
    peaks = [(plan.config, actual["peak_gib"]) for plan, actual in zip(PLANS, stored_figures().values(), strict=True)]
    assert all(min(peak for name, peak in peaks if name == config) <= 40 for config in ("gpt3_175b", "llama3_70b"))


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_a_page_matches_the_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    expected_page = with_table(text, PAGES[page], stored_figures())
    assert text == expected_page, f"{page} is not as {FIGURES.name} says: python -m benchmarks compiled_peaks --pages"


def test_a_changed_figure_changes_the_table() -> None:
    figures = stored_figures()
    figures[PLANS[0].key] |= {"peak_gib": 12.34}
    text = (ROOT / "docs/layouts.md").read_text(encoding="utf-8")
    assert " | 12.3 GiB |" in with_table(text, "configs", figures)
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
    assert compiled_peaks.compiled_peaks(only=("gpt3_1_3b",), check=True) == {"wrong": 1}
    assert "peak_gib" in capsys.readouterr().out and json.dumps(stored_figures()) == stored


@pytest.mark.slow
def test_the_compiler_reproduces_a_stored_figure() -> None:
    pytest.importorskip("jax_cuda12_plugin")
    plan = next(plan for plan in PLANS if plan.key == "llama3_8b, 8")
    assert list(differences(stored_figures()[plan.key], compiled_peaks.compiled(plan))) == []
