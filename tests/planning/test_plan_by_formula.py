"""python -m megajax.plan --config --devices --formula: flags, output and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from descriptions import STAGES_70B

from megajax.config.errors import UserError
from megajax.plan import main

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]
LAYOUT = tuple(f"--{setting}" for setting in STAGES_70B)
ASKED = (f"--config={ROOT}/configs/llama3.py:llama3_70b", "--devices=h100:128", *LAYOUT, "--formula")


def plan_json(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "plan.json"
    assert main([*ASKED, f"--json={file}", *arguments]) == 0
    return json.loads(file.read_text())


def test_json_and_printed_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan_json(tmp_path)
    assert figures["mesh"] == {"pipeline": 4, "replica": 1, "data": 4, "expert": 1, "context": 1, "tensor": 8}
    assert figures["fits"] is True and figures["ring_slots"] == 24 and figures["devices"] == 128
    for name in ("step_seconds", "mfu_full", "mfu_causal", "tokens_per_second_per_device", "gpu_hours", "days"):
        assert figures[name] > 0, name
    assert {row["axis"] for row in figures["collectives"]} == {"tensor", "pipeline", "pipeline+tensor", "data"}
    printed = capsys.readouterr().out
    for text in ("by formula", "exposed communication", "bubble", "GPU hours", "ring slots"):
        assert text in printed


def test_overrides_and_links_are_applied(tmp_path: Path) -> None:
    base = plan_json(tmp_path)
    assert plan_json(tmp_path, "--network=5")["exposed_seconds"] > base["exposed_seconds"]
    assert plan_json(tmp_path, "--nvlink=100")["exposed_seconds"] > 2 * base["exposed_seconds"]
    assert plan_json(tmp_path, "--gpus-per-node=4")["step_seconds"] > base["step_seconds"]
    assert plan_json(tmp_path, "--model.recompute=full")["activations_gib"] < base["activations_gib"] / 3


def test_a_calibration_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text('{"figures": {"constants": {"name": "h100", "matmul": 0.33}}}')
    assert plan_json(tmp_path, f"--calibration={file}")["matmul_seconds"] > 1.9 * plan_json(tmp_path)["matmul_seconds"]


def test_a_device_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nmemory_gib: 96\nbandwidth: 3e12\npeak: 5e14\nnvlink: 200e9\nnetwork: 25e9\n")
    asked = [ASKED[0], "--devices=mine:128", f"--device-file={file}"]
    assert main([*asked, "--formula"]) == 0
    assert "128 x mine" in capsys.readouterr().out
    with pytest.raises(UserError, match="give --formula"):
        main(asked)
