"""Full and failing disks of one process: one message, exit code 1, all processes alike, and no traceback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gangs
import pytest

FAULT = Path(__file__).with_name("train_on_a_failing_disk.py")
QUICK = ("--evaluation.batches=0", "--logging.report=false", "--logging.plot=false", "--logging.sample=false")


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def names(folder: Path) -> list[str]:
    """The events of saves."""
    names = [line["event"] for line in events(folder)]
    return [name.removeprefix("save_") for name in names if name.startswith("save_")]


@pytest.fixture
def small_disk(tmp_path):
    """A run folder whose checkpoints are on a disk of 400 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").symlink_to(disk)
        yield tmp_path / "run"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_one_message(small_disk, tmp_path):
    settings = (f"--config={gangs.CONFIG}", "--devices=cpu:1", f"--run_dir={small_disk}", *QUICK)
    more = ("--steps=40", "--checkpoint.every=4", "--checkpoint.retry_seconds=0.01")
    with gangs.started(tmp_path) as start:
        run = start(*gangs.TRAIN, *settings, *more)
        assert run.wait() == 1
        free = r"needs 103.\d KiB, \d+.0 KiB are free \(No space left on device\)"
        message = rf"\n\ncheckpoint step \d+ not saved: {re.escape(str(small_disk))}/checkpoints {free}\n"
        assert re.search(message, run.text), run.text
        assert "Traceback" not in run.text and "warning: " in run.text
        kept = gangs.saved(small_disk)
        assert kept and all(path.is_dir() or path.name == "lock" for path in (small_disk / "checkpoints").iterdir())
        # With space again, the same command resumes, and its saves work.
        subprocess.run(["mount", "-o", "remount,size=4m", tmp_path / "disk"], check=True)
        assert start(*gangs.TRAIN, *settings, *more).wait() == 0
    assert gangs.saved(small_disk)[-1] == 40
    assert "end" in [line["event"] for line in events(small_disk)[-3:]]


def gang(start, tmp_path, failing: str, **environment: str) -> gangs.Started:
    settings = (*gangs.TINY[:-1], f"--run_dir={tmp_path / 'run'}", *QUICK)
    more = ("--steps=60", "--checkpoint.every=6", "--checkpoint.retry_seconds=0.05", "--logging.every=1")
    return start(*gangs.launcher(), sys.executable, FAULT, *settings, *more, FAILING_SAVES=failing, FAILING_PROCESS="1")


@pytest.mark.slow
def test_a_disk_that_fails_for_one_process_ends_the_gang_with_one_message(tmp_path):
    with gangs.started(tmp_path) as start:
        run = gang(start, tmp_path, "2-1000")
        assert run.wait() == 1
    assert "Traceback" not in run.text and "F1" not in run.text, run.text
    message = r"checkpoint step \d+ not saved: process 1: /.*File too large"
    assert re.search(message + r"\n2 failed saves in a row", run.text.replace("[0] ", "")), run.text
    assert names(tmp_path / "run") == [
        *["begun", "committed", "begun", "retried", "begun", "retried", "begun", "failed"],
        *["begun", "retried", "begun", "retried", "begun", "failed"],
    ]
    assert gangs.saved(tmp_path / "run") == [6]


@pytest.mark.slow
def test_a_gang_retries_together_when_the_disk_of_one_process_failed(tmp_path):
    with gangs.started(tmp_path) as start:
        run = gang(start, tmp_path, "2-3")
        assert run.wait() == 0, run.text
    assert names(tmp_path / "run")[:8] == ["begun", "committed", *2 * ["begun", "retried"], "begun", "committed"]
    assert gangs.saved(tmp_path / "run")[-1] == 60
    assert not list((tmp_path / "run" / "checkpoints").glob("*.saving"))
