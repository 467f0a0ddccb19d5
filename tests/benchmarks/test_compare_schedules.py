"""The train step by each schedule, as gpu_check runs it, on CPU devices."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.gpu.comparison import measured_figures
from megajax.mesh.mesh import find_devices

SIZES = ("--model.stack.repeats=1", "--model.hidden=32", "--model.sequence_length=32", "--batch.global_size=4")


@pytest.mark.slow
def test_every_schedule_runs_and_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setattr("megajax.training.resolved.find_devices", lambda: find_devices()[:2])
    out = tmp_path / "schedules.json"
    main(["schedules", "--config=llama3.py:debug", *SIZES, "--steps=1", f"--json={out}"])
    figures = json.loads(out.read_text())["figures"]
    assert list(figures) == ["costs", "default", "measured"]
    assert figures["costs"]["by"] == "costs" and figures["costs"]["matched"] == 1
    assert len({tuple(variant["losses"]) for variant in figures.values()}) == 1
    assert "100.0% of the names, taken: costs" in capsys.readouterr().out
    compared = measured_figures("schedules", figures)
    assert set(compared) == {"default over costs", "measured over costs", "share of names"}
