"""A run stopped at any moment and resumed computes bit for bit the same as an uninterrupted run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS, EVERY = 28, 8
PATIENCE = 180.0


def command(run_dir: Path) -> list[str]:
    settings = {
        "steps": STEPS,
        "checkpoint.every": EVERY,
        "evaluation.batches": 0,
        "logging.report": "false",
        "logging.plot": "false",
        "logging.sample": "false",
        "run_dir": run_dir,
        "model.dropout": 0.1,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "megajax.train", "--config=gpt2.py:debug", "--devices=cpu:1", *flags]


def losses(run_dir: Path) -> dict[int, str]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["loss_hex"] for line in lines if "split" not in line}


def committed(run_dir: Path) -> list[Path]:
    return [
        path
        for path in (run_dir / "checkpoints").glob("*")
        if path.is_dir() and path.name.removeprefix("step_").isdigit()
    ]


def finish(run_dir: Path) -> str:
    done = subprocess.run(command(run_dir), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interrupt(run_dir: Path, number: int) -> int:
    """Start a run, send it `number` once a checkpoint is committed and later steps are done, return its exit code."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command(run_dir), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + PATIENCE
    while not (committed(run_dir) and len(losses(run_dir)) > EVERY + 3):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be interrupted"
        time.sleep(0.002)
    process.send_signal(number)
    return process.wait(timeout=PATIENCE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder)
    actual = losses(folder)
    assert sorted(actual) == list(range(1, STEPS + 1))
    return actual


# The default suite has test_job.py, which resumes bit for bit, and test_signals.py with the exit codes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 0)],
    ids=str,
)
def test_losses_are_the_same_after_a_stop(number: int, code: int, undisturbed: dict[int, str], tmp_path: Path) -> None:
    assert interrupt(tmp_path, number) == code
    stopped_at = max(losses(tmp_path))
    assert EVERY < stopped_at < STEPS, f"stopped at step {stopped_at}: nothing left to resume"
    text = finish(tmp_path)
    assert re.search(r"start +step \d+ of", text), text
    assert losses(tmp_path) == undisturbed
