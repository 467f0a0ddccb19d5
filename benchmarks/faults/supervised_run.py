"""A supervised group of training processes on this machine, with injected faults."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

SMALL = (
    *("--config=quickstart.py", "--model.hidden=64", "--model.stack.pattern.0.mlp.ffn=128", "--batch.micro_size=4"),
    *("--evaluation.every=none", "--evaluation.at_end=false", "--logging.sample=false", "--logging.plot=false"),
)
"""A model of 0.1M parameters, whose steps take little time beside the work around them."""


class SupervisedRun:
    """A training run under `megajax.launch`. At the end of the block it is killed with all its processes."""

    def __init__(self, run_dir: Path, processes: int, settings: Sequence[str], launcher: Sequence[str] = ()):
        self.run_dir, self.processes = run_dir, processes
        self.log = run_dir.with_suffix(".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        train = ("python", "-m", "megajax.train", *settings, f"--run_dir={run_dir}", "--devices=cpu:1")
        self.command = (*(sys.executable, "-m", "megajax.launch", f"--processes={processes}", *launcher, "--"), *train)
        self.began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in (*self.ranks().values(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """Process number -> pid of the live training processes."""
        ranks = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
                pid = int(folder.name)
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) != self.process.pid or state == "Z":
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
                environment = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
                ranks[int(environment[b"MEGAJAX_PROCESS_ID"])] = pid
        return ranks

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The events so far; all, or those of one name."""
        return [event for event in _lines(self.run_dir / "events.jsonl") if name in (None, event["event"])]

    def losses(self) -> dict[int, str]:
        """Step -> loss as hexadecimal float."""
        lines = _lines(self.run_dir / "metrics.jsonl")
        return {line["step"]: line["loss_hex"] for line in lines if "split" not in line}

    def step(self) -> int:
        """The last logged step."""
        return max(self.losses(), default=0)

    def until(self, condition: Callable[[], Any], description: str, seconds: float = 600.0) -> Any:
        """The first true value of `condition`. Raises RuntimeError if the run ends before, or at the deadline."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"waiting for {description}: the run ended with {self.process.returncode}\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {seconds:g} s for {description}\n{self.tail()}")
            time.sleep(0.02)
        return value

    def wait(self, seconds: float = 1800.0) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def tail(self, lines: int = 30) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a JSONL file."""
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("}\n"):
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(run: SupervisedRun, rank: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a rank."""
    os.kill(run.ranks()[rank], number)
