"""kill -9 at any moment never leaves a damaged step that looks committed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run_trials(folder, trials, mode, seed):
    folder.mkdir()
    script = Path(__file__).with_name("kill_trials.py")
    process = subprocess.run(
        [sys.executable, script, folder, str(trials), mode, str(seed)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == trials + 1
    assert all(result["ok"] for result in results), process.stderr
    assert not any(result["damaged"] for result in results)
    starts = [result["started_from"] for result in results]
    assert starts == sorted(starts) and starts[-1] > trials // (
        10 if mode == "failing" else 4
    )  # what was committed is never lost
    assert sum(bool(result["in_the_middle"]) for result in results) >= trials // 3  # the kills did hit saves
    return results


def test_three_kills(tmp_path):
    run_trials(tmp_path / "checkpoints", 3, "asynchronous", 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", "failing", "retention"])
def test_eight_kills(tmp_path, mode):
    results = run_trials(tmp_path / "checkpoints", 8, mode, 3)
    half_deleted = [names for result in results if (names := result["in_the_middle"]) and names[0].endswith("deleting")]
    assert len(half_deleted) >= (2 if mode == "retention" else 0)
