"""Calibration: the fit of constants, and a tiny run whose file the planner reads."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.gpu import calibrate
from megajax.planning.virtual_devices import read_device

ROOT = Path(__file__).parents[2]


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
