"""Constants measured on hardware: the fit, and a tiny run whose file the planner reads."""

import subprocess
import sys
from pathlib import Path

import calibrate
import pytest
import yaml

from megajax.planning.virtual_devices import read_device

ROOT = Path(__file__).parents[2]


def test_a_fit_finds_rate_and_half() -> None:
    def rate(sizes: tuple[int, ...]) -> float:
        share = 7e14
        for n in sizes:
            share *= n / (n + 96)
        return share

    readings = [(sizes, rate(sizes)) for sizes in calibrate.SIZES]
    assert calibrate.fit(readings) == (pytest.approx(7e14), 96)


def test_a_tiny_run_writes_what_the_planner_reads(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    command = [
        sys.executable,
        "benchmarks/calibrate.py",
        "--tiny",
        "--seconds=0.01",
        "--devices=cpu:2",
        f"--out={file}",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    constants = yaml.safe_load(file.read_text())["figures"]["constants"]
    calibration = tmp_path / "whole.yaml"
    calibration.write_text(yaml.safe_dump(constants | {"network": 1e9, "memory_gib": 16}))
    actual = read_device(calibration)
    assert actual.name == "cpu" and actual.peak > 0 and actual.bandwidth > 0 and actual.nvlink > 0
