"""Disks that fail during a run, by real commands: retried, then one message; crashes show their position."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gangs import REPOSITORY, TRAIN, Started, started

CONFIG = """
import errno
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from megajax.config.references import Builds
from megajax.data.config import LoaderConfig
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.config import MockConfig
from small_jobs import run_config

FAILURES = {failures}

class Failing:
    def __init__(self, rows):
        self.rows, self.left = rows, FAILURES

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        if row == 10 and self.left:
            self.left -= 1
            raise OSError(errno.EIO, "Input/output error", "/data/tokens.bin")
        return self.rows[row]

@dataclass(frozen=True, kw_only=True, slots=True)
class FailingConfig(Builds):
    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def leaves(self):
        return MockConfig().leaves()

    def build(self, **given):
        splits = MockConfig().build(**given)
        return splits._replace(train=Failing(splits.train))

def get():
    return run_config(data=FailingConfig(loader=LoaderConfig(retries=2)))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[int], Started]]:
    with started(tmp_path) as start:

        def train(failures: int) -> Started:
            file = tmp_path / f"failing{failures}.py"
            file.write_text(CONFIG.replace("{failures}", str(failures)))
            command = (*TRAIN, f"--config={file}:get", "--devices=cpu:1", f"--run_dir={tmp_path / 'run'}")
            path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "training")])
            return start(*command, "--evaluation.at_end=false", name=f"out{failures}", PYTHONPATH=path)

        yield train


@pytest.mark.slow
def test_a_disk_that_fails_temporarily_costs_two_lines(run: Callable[[int], Started]) -> None:
    training = run(2)
    assert training.wait() == 0, training.text
    lines = [line for line in training.text.splitlines() if "row 10 of the data cannot be read" in line]
    assert len(lines) == 2 and all("/data/tokens.bin: Input/output error (EIO); try" in line for line in lines)


@pytest.mark.slow
def test_a_disk_that_fails_permanently_ends_the_run_with_one_message(run: Callable[[int], Started]) -> None:
    training = run(1000)
    assert training.wait() == 1, training.text
    assert "Traceback" not in training.text
    assert (
        training.text.count("row 10 of the data cannot be read in 3 tries: /data/tokens.bin: Input/output error") == 1
    )


def test_a_crash_in_compiled_code_shows_the_python_stack() -> None:
    code = "import os, signal\nfrom megajax.command_line.parser import front_door\n"
    code += "def reads(argv):\n    os.kill(os.getpid(), signal.SIGBUS)\nfront_door(reads)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == -7 and "Bus error" in done.stderr and "in reads" in done.stderr
