"""Disks that are full or fail: retried, then one message and exit code 1; a crash shows its stack."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gangs
import pytest
from run_folder import events, saved

FAULT = Path(__file__).with_name("train_on_a_failing_disk.py")
QUICK = ("--evaluation.batches=0", "--logging.report=false", "--logging.plot=false", "--logging.sample=false")


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
def test_a_full_disk_ends_a_run_with_one_message(start, small_disk, tmp_path):
    settings = (f"--config={gangs.CONFIG}", "--devices=cpu:1", f"--run_dir={small_disk}", *QUICK)
    more = ("--steps=40", "--checkpoint.every=4", "--checkpoint.retry_seconds=0.01")
    run = start(*gangs.TRAIN, *settings, *more)
    assert run.wait() == 1
    free = r"needs 103.\d KiB, \d+.0 KiB are free \(No space left on device\)"
    message = rf"\n\ncheckpoint step \d+ not saved: {re.escape(str(small_disk))}/checkpoints {free}\n"
    assert re.search(message, run.text), run.text
    assert "Traceback" not in run.text and "warning: " in run.text
    kept = saved(small_disk)
    assert kept and all(path.is_dir() or path.name == "lock" for path in (small_disk / "checkpoints").iterdir())
    # With space again, the same command resumes, and its saves work.
    subprocess.run(["mount", "-o", "remount,size=4m", tmp_path / "disk"], check=True)
    assert start(*gangs.TRAIN, *settings, *more).wait() == 0
    assert saved(small_disk)[-1] == 40
    assert "end" in [line["event"] for line in events(small_disk)[-3:]]


@pytest.mark.slow
def test_a_disk_that_fails_for_one_process_ends_the_gang_with_one_message(start, tmp_path):
    settings = (*gangs.TINY[:-1], f"--run_dir={tmp_path / 'run'}", *QUICK)
    more = ("--steps=100000", "--checkpoint.every=6", "--checkpoint.retry_seconds=0.05", "--logging.every=1")
    run = start(*gangs.launcher(), sys.executable, FAULT, *settings, *more)
    assert run.wait() == 1
    assert "Traceback" not in run.text and "F1" not in run.text, run.text
    message = r"checkpoint step \d+ not saved: process 1: /.*File too large.*"
    assert re.search(message + r"\n2 failed saves in a row", run.text.replace("[0] ", "")), run.text
    assert names(tmp_path / "run") == [
        *["begun", "committed", "begun", "retried", "begun", "retried", "begun", "failed"],
        *["begun", "retried", "begun", "retried", "begun", "failed"],
    ]
    assert saved(tmp_path / "run") == [6]


FAILING_ROW = """
import errno
from dataclasses import dataclass, field

from megajax.config.class_references import Builds
from megajax.data.rows.config import LoaderConfig
from megajax.data.text.config import MockConfig
from small_jobs import DOCUMENTS, run_config

class Failing:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        if row == 10:
            raise OSError(errno.EIO, "Input/output error", "/data/tokens.bin")
        return self.rows[row]

@dataclass(frozen=True, kw_only=True, slots=True)
class FailingConfig(Builds):
    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def leaves(self):
        return MockConfig().leaves()

    def build(self, **given):
        splits = MockConfig(documents=DOCUMENTS).build(**given)
        return splits._replace(train=Failing(splits.train))

def get():
    return run_config(data=FailingConfig(loader=LoaderConfig(retries=2)))
"""


@pytest.mark.slow
def test_a_row_that_can_never_be_read_ends_the_run_with_one_message(start, tmp_path):
    """Retries that succeed are in tests/data/test_failing_reads.py."""
    (tmp_path / "failing.py").write_text(FAILING_ROW)
    command = (*gangs.TRAIN, f"--config={tmp_path / 'failing.py'}:get", "--devices=cpu:1", "--evaluation.at_end=false")
    path = os.pathsep.join(map(str, (gangs.REPOSITORY, gangs.REPOSITORY / "tests")))
    training = start(*command, f"--run_dir={tmp_path / 'run'}", PYTHONPATH=path)
    assert training.wait() == 1, training.text
    assert "Traceback" not in training.text
    message = "row 10 of the data cannot be read in 3 tries: /data/tokens.bin: Input/output error"
    assert training.text.count(message) == 1


def test_a_crash_in_compiled_code_shows_the_python_stack():
    code = "import os, signal\nfrom megajax.command_line.parser import front_door\n"
    code += "def reads(argv):\n    os.kill(os.getpid(), signal.SIGBUS)\nfront_door(reads)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=gangs.REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == -7 and "Bus error" in done.stderr and "in reads" in done.stderr
