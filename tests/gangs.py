"""Real gangs of tiny training runs, none of which outlives its test."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_folder import steps

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = f"{REPOSITORY / 'tests/small_jobs.py'}:run_config"
PATIENCE = 300.0
"""Seconds: on a busy machine a gang takes many times what it takes on an idle one."""

TRAIN = (sys.executable, "-m", "megajax.train")
TINY = (f"--config={CONFIG}", "--batch.micro_size=2", "--parallel.data=2", "--devices=cpu:1")
"""Settings of a run of six steps on two devices; see small_jobs."""
LONG = ("--steps=200000", "--checkpoint.every=none", "--evaluation.at_end=false", "--model.dropout=0")
"""Settings of a run that is to be interrupted."""


class Started:
    """A process with its output in a file; killed with everything it started when the test is over."""

    def __init__(self, command: tuple[str, ...], output: Path, environment: dict[str, str]):
        self.output = output
        self.began = time.monotonic()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "JAX_"))}
        # Programs are compiled once for all tests of all workers: what is tested here is not the compiler.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(Path(os.environ["XDG_CACHE_HOME"]).with_name("compiled")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
                env=clean | cache | {"PYTHONPATH": path} | environment,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds} s:\n{self.text}") from None

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait for something the process brings about."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def children(self) -> list[int]:
        """Processes it started, in order."""
        return children(self.process.pid)

    def end(self) -> None:
        """Whatever happened, nothing is left."""
        below = self.children()
        for pid in (self.process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.wait()


def children(parent: int) -> list[int]:
    """Processes whose parent is `parent`, in order."""
    below = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            number = int(folder.name)
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                below.append(number)
    return sorted(below)


def alive(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be buried."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture(name="start")
def start_processes(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """start(*command, name=..., **environment) -> a process that ends with the test at the latest."""
    with started(tmp_path) as start:
        yield start


@contextlib.contextmanager
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """start(*command, name="...", **environment): processes that do not outlive the block."""
    with contextlib.ExitStack() as stack:

        def start(*command: object, name: str = "output", **environment: str) -> Started:
            process = Started(tuple(map(str, command)), tmp_path / f"{name}.txt", environment)
            stack.callback(process.end)
            return process

        yield start


def launcher(*arguments: object, processes: int = 2) -> tuple[object, ...]:
    """The front door; the command is to follow."""
    return (sys.executable, "-m", "megajax.launch", f"--processes={processes}", *arguments, "--")


_LAUNCH = """
import pathlib, sys
from megajax.command_line.parser import front_door
from megajax.launch import main
folder = pathlib.Path(sys.argv.pop(1))
front_door(lambda arguments: main(arguments, folder))
"""


def launch_on(start: Callable[..., Started], folder: Path, gpus: int, *words: object, **environment: str) -> Started:
    """The launcher on a machine with so many GPUs: their device files are in the folder."""
    for number in range(gpus):
        (folder / f"nvidia{number}").touch()
    return start(sys.executable, "-c", _LAUNCH, folder, *words, **environment)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss."""
    return {step: line["loss"] for step, line in steps(run_dir).items()}
