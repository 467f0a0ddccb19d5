"""Comparisons, sweeps, and changes that make a plan fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from descriptions import STAGES_70B

from megajax.config import load
from megajax.plan import main
from megajax.planning.choice import changes, settings
from megajax.planning.compiled.audit import largest_arrays
from megajax.planning.compiled.devices import GIB, GPUS, Cluster
from megajax.planning.cost.description import describe
from megajax.planning.cost.estimate import Case, estimate
from megajax.planning.ranking import advice, cheapest
from megajax.planning.train_step import scheduler_memory

ROOT = Path(__file__).parents[2]
ASKED = ("--config=llama3.py:llama3_70b", "--devices=h100:64", *(f"--{setting}" for setting in STAGES_70B))


def case_of(*overrides: str) -> Case:
    return Case(load("llama3.py:llama3_70b", *STAGES_70B, *overrides), Cluster(GPUS["h100"], 64, 8))


def plan_json(folder: Path, *arguments: str) -> Any:
    file = folder / "plan.json"
    assert main([*ASKED, f"--json={file}", *arguments]) == 0
    return json.loads(file.read_text())


def test_compare_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan_json(tmp_path, "--compare=h200:128")
    assert figures["first"]["device"] == "h100" and figures["second"]["device"] == "h200"
    assert figures["second"]["devices"] == 128 and 0.45 < figures["ratios"]["step_seconds"] < 0.55
    assert "ratio" in capsys.readouterr().out


def test_compare_configs_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan_json(tmp_path, "--compare=llama3.py --parallel.tensor=8")
    assert figures["second"]["mesh"]["tensor"] == 8 and figures["ratios"]["step_seconds"] < 0.3
    figures = plan_json(tmp_path, "--compare=--parallel.tensor=4")
    assert figures["second"]["mesh"]["tensor"] == 4
    assert "parallel.tensor: 8 -> 4" in capsys.readouterr().out


def test_weak_and_strong_scaling(tmp_path: Path) -> None:
    points = plan_json(tmp_path, "--sweep=devices:64,128,...,16384")
    weak, strong = ([point for point in points if point["mode"] == mode] for mode in ("weak", "strong"))
    assert [point["devices"] for point in weak] == [64 * 2**n for n in range(9)]
    assert [point["global_size"] for point in weak] == [512 * 2**n for n in range(9)]
    assert weak[-1]["mesh"] == {"pipeline": 4, "replica": 1, "data": 512, "expert": 1, "context": 1, "tensor": 8}
    # Devices wait for the slowest of 2048 nodes instead of 8.
    waited = (1 + 11 * GPUS["h100"].straggling) / (1 + 3 * GPUS["h100"].straggling)
    assert weak[-1]["step_seconds"] == pytest.approx(waited * weak[0]["step_seconds"], rel=0.01)
    assert strong[-1]["refusal"].startswith("parallel.virtual_stages") and strong[3]["global_size"] == 512
    speeds = [point["tokens_per_second_per_device"] for point in strong if "refusal" not in point]
    assert speeds == sorted(speeds, reverse=True)
    assert strong[0] | {"mode": "weak"} == weak[0] | {"days": strong[0]["days"]}


@pytest.mark.parametrize("sweep", ["devices:64,128", "batch.micro_size:1,2"])
def test_the_picture_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: str) -> None:
    """Its title and axis say that the figures are predictions; its legend names the curves."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda figure, *a, **k: [drawn.append(figure), save(figure, *a, **k)]
    )
    plan_json(tmp_path, f"--sweep={sweep}", f"--png={tmp_path}/sweep.png")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    (axes,) = drawn[0].axes
    assert "on h100: tokens per second, predicted" in axes.get_title() and "predicted" in axes.get_ylabel()
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names[-1] == ("in proportion to the devices" if "devices" in sweep else "one setting at several values")


def test_the_cheapest_changes_fit() -> None:
    base = case_of("parallel.tensor=2")
    assert not base.estimate.fits
    cases = cheapest(base, 0.95 * base.usable_gib)
    flags = [settings(changes(base.cfg, case.cfg)) for case in cases]
    assert len(flags) == 3 and len(set(map(str, flags))) == 3
    for case, changed in zip(cases, flags, strict=True):
        cfg: Any = load("llama3.py:llama3_70b", *STAGES_70B, "parallel.tensor=2", *changed, devices=64)
        repeated = estimate(describe(cfg, *base.cluster))
        assert repeated.memory.peak_gib == pytest.approx(case.estimate.memory.peak_gib)
        # A compiled plan may be 3 % larger.
        assert repeated.memory.peak_gib <= 0.95 * base.usable_gib
        assert repeated.step_seconds == pytest.approx(case.estimate.step_seconds)


def test_changes_of_a_compiled_plan_start_from_its_peak() -> None:
    base = case_of()
    peaks = [[float(row[1]) for row in advice(base, excess_gib=excess).rows] for excess in (0.0, 32.0)]
    assert peaks[1] and max(peaks[1]) <= 0.95 * base.usable_gib and min(peaks[1]) > 32 and peaks[0] != peaks[1]


def test_advice_is_printed_if_a_plan_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--formula", "--parallel.tensor=2"]) == 0
    printed = capsys.readouterr().out
    for text in ("cheapest changes that make it fit", "--parallel.tensor=8", "--model.recompute="):
        assert text in printed
    assert main([*ASKED, "--formula"]) == 0
    assert "cheapest changes" not in capsys.readouterr().out


PROGRAM = """HloModule step
%fused_add (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %big = f32[4096,4096]{1,0} add(%p, %p), metadata={op_name="inside"}
}
ENTRY %main (a: bf16[8,16]) -> bf16[8,16] {
  %a = bf16[8,16]{1,0} parameter(0)
  %w = bf16[512,512]{1,0} parameter(1)
  %dot = f32[240,5,819200]{2,1,0} custom-call(%a), metadata={op_name="jit(step)/while/body/layer/ring/dot_general"}
  %other = f32[240,5,819200]{2,1,0} copy(%dot)
  ROOT %out = bf16[8,16]{1,0} convert(%other)
}
"""


def test_largest_arrays_of_a_program() -> None:
    assert largest_arrays(PROGRAM).rows == [
        ("f32[240,5,819200]", "3.66", "2", "layer/ring/dot_general"),
        ("bf16[8,16]", "0.00", "1", "convert"),
    ]


def test_the_scheduler_has_the_memory_of_a_GPU() -> None:
    cfg: Any = load("llama3.py:llama3_70b")
    argument_bytes = 12 * GIB
    name, factor, _ = scheduler_memory(cfg.xla.memory_fraction, GPUS["h100"], argument_bytes)
    assert name == "xla_gpu_memory_limit_slop_factor" and isinstance(factor, int)
    usable = GPUS["h100"].usable_gib(0.92) * GIB
    assert (0.8 * 80 * GIB - argument_bytes) * factor / 100 == pytest.approx((usable - argument_bytes) * 0.95, rel=0.01)


@pytest.mark.slow
@pytest.mark.aot
def test_the_best_layout_is_compiled(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    cluster = ("--config=gpt3.py:gpt3_1_3b", "--devices=h100:8", "--model.recompute=selective")
    asked = [*cluster, "--search", "--compile=1", f"--json={file}"]
    assert main(asked) == 0
    best = json.loads(file.read_text())["best"][0]
    assert best["compiled"] and best["peak_gib"] == pytest.approx(best["formula_peak_gib"], rel=0.1)
