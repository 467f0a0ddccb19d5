"""Figures of compiled plans stand in one file; the pages' tables are made of it."""

import json
import re
from typing import Any

import compiled_peaks
import pytest
from compiled_peaks import CONFIGS, FIGURES, HARDWARE, PAGES, PLANS, ROOT, differences, stored_figures, with_table


def test_the_file_has_every_plan_and_nothing_else() -> None:
    figures = stored_figures()
    assert list(figures) == [plan.key for plan in PLANS]
    assert CONFIGS.keys() == HARDWARE.keys() == {plan.config for plan in PLANS}
    for plan in PLANS:
        actual = figures[plan.key]
        assert (actual["config"], actual["gpus"]) == (CONFIGS[plan.config], plan.gpus)
        assert actual["settings"] == list(plan.settings) and actual["commit"]
        assert actual["arguments_gib"] + actual["temporary_gib"] == pytest.approx(actual["peak_gib"], rel=0.01)


def test_large_models_leave_room_on_their_gpus() -> None:
    """Limits that were set before the programs were written."""
    peaks = [(plan.config, actual["peak_gib"]) for plan, actual in zip(PLANS, stored_figures().values(), strict=True)]
    assert all(min(peak for name, peak in peaks if name == config) <= 40 for config in ("gpt3_175b", "llama3_70b"))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_figures_of_the_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    expected_page = with_table(text, PAGES[page], stored_figures())
    assert text == expected_page, f"{page} is not as {FIGURES.name} says: python benchmarks/compiled_peaks.py --pages"


def test_another_figure_makes_another_page() -> None:
    figures = stored_figures()
    figures[PLANS[0].key] |= {"peak_gib": 12.34}
    text = (ROOT / "docs/layouts.md").read_text(encoding="utf-8")
    assert " | 12.3 GiB |" in with_table(text, "configs", figures)
    with pytest.raises(ValueError, match=r"the marks .* are missing"):
        with_table("a page without marks", "configs", figures)


def test_configs_leave_figures_to_the_tables() -> None:
    for file in {ROOT / "configs" / name.partition(":")[0] for name in CONFIGS.values()}:
        sizes = re.findall(r"\d GiB", file.read_text(encoding="utf-8"))
        assert not sizes, f"{file.name} has a figure of its own: docs/layouts.md has it"


def test_a_check_tells_what_is_no_longer_so(monkeypatch, capsys, tmp_path) -> None:
    before = {"peak_gib": 20.0, "ring_slots": 8, "commit": "old"}
    assert list(differences(before, {"peak_gib": 20.1, "ring_slots": 8, "commit": "new"})) == []
    assert list(differences(before, {"peak_gib": 20.3, "ring_slots": 9})) == [
        "peak_gib: 20.0 on file, 20.3 compiled", "ring_slots: 8 on file, 9 compiled",
    ]  # fmt: skip
    plans = {plan.key: stored_figures()[plan.key] for plan in PLANS}

    def larger(plan: compiled_peaks.Plan) -> dict[str, Any]:
        return plans[plan.key] | {"peak_gib": 2 * plans[plan.key]["peak_gib"]}

    monkeypatch.setattr(compiled_peaks, "compiled", larger)
    monkeypatch.setattr(compiled_peaks, "resolve", lambda name: lambda: None)
    stored = json.dumps(stored_figures())
    assert compiled_peaks.main(["--check", "gpt3_1_3b"]) == 1
    assert "peak_gib" in capsys.readouterr().out and json.dumps(stored_figures()) == stored


@pytest.mark.slow
def test_the_file_is_what_the_compiler_says() -> None:
    pytest.importorskip("jax_cuda12_plugin")
    plan = next(plan for plan in PLANS if plan.key == "llama3_8b, 8")
    assert list(differences(stored_figures()[plan.key], compiled_peaks.compiled(plan))) == []
