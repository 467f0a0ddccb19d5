"""Checks of this machine, its environment, and commands that may hang."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megajax.processes.gpus import installed_gpus, visible_gpus

TESTS = ("matmul", "all-reduce", "host to device", "clocks", "GPU health", "disk")
"""Names of the tests of `megajax.machine.before_run`, in order."""
STAGES = ("devices", "eager", "NCCL", "matmul", "attention", "grouped matmul", "all-reduce")
"""Names of the tests of `megajax.machine.device_trial`, in order."""
FIRST_AID = "stop other programs on the devices; check the driver and dmesg; try CUDA_VISIBLE_DEVICES=N one by one"
OUT_OF_SERVICE = "take the device out of service: its results can't be trusted"

KILL_SECONDS = 2.0
"""Time limit of waiting for a killed process, which may hang in a driver forever."""


class CommandOutput(NamedTuple):
    """The output of a command."""

    code: int | None
    """Exit code, negative for a signal; None if the command timed out or could not be started."""
    out: str = ""
    err: str = ""
    why: str = ""
    """Why `code` is None."""

    @property
    def reason(self) -> str:
        """Why the command failed, in one line."""
        killed = self.code is not None and self.code < 0
        ending = f"was killed by signal {abs(self.code or 0)}" if killed else f"ended with code {self.code}"
        last = " / ".join((self.err.strip() or self.out.strip()).splitlines()[-3:])
        return self.why or (f"{ending}: {last}" if last else ending)


def run_limited(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> CommandOutput:
    """Run a command for at most `seconds`, then kill it with all its children, without waiting forever for its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, not pipes: this process would wait for a grandchild that keeps a pipe open.
        try:
            process = subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        except OSError as error:
            return CommandOutput(None, why=f"cannot be started: {error.strerror or error}")
        code, why = None, ""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            why = f"gave no answer within {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return CommandOutput(code, *texts, why)


class Machine:
    """This machine, with a cache of results that several checks need."""

    def __init__(self, run_dir: Path | None = None, environment: Mapping[str, str] | None = None):
        self.environment = dict(os.environ if environment is None else environment)
        self.run_dir = Path.cwd() if run_dir is None else run_dir
        self._cache: dict[str, Any] = {}

    def run(self, *command: str, seconds: float = 10.0, **variables: str) -> CommandOutput:
        """Run a command in this environment, with some `variables` changed."""
        return run_limited(command, seconds=seconds, environment=self.environment | variables)

    def cached[T](self, name: str, compute: Callable[["Machine"], T]) -> T:
        """The result of `compute`, which runs once for each `name`."""
        if name not in self._cache:
            self._cache[name] = compute(self)
        return self._cache[name]

    @cached_property
    def gpu_files(self) -> int:
        """Number of NVIDIA GPUs with a device file."""
        return len(installed_gpus())

    @property
    def visible_gpus(self) -> tuple[str, ...]:
        """Names of the GPUs that CUDA shows in this environment."""
        return visible_gpus(self.environment, [str(number) for number in range(self.gpu_files)])


class Finding(NamedTuple):
    """The result of a check, with advice unless it is ok."""

    status: Literal["ok", "warn", "fail"]
    """warn: training may work. fail: no run will work correctly on this machine."""
    state: str
    advice: str = ""


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")

type Check = tuple[str, Callable[[Machine], Finding | None]]
"""Name and function of a check; the function returns None if the check does not apply to the machine."""


def run_checks(checks: Iterable[Check], machine: Machine) -> Iterator[tuple[str, Finding, float]]:
    """Yield name, finding and seconds of each check that applies. An exception becomes a warning."""
    for name, check in checks:
        start = time.monotonic()
        try:
            finding = check(machine)
        except Exception as error:
            finding = warn(f"could not be checked: {type(error).__name__}: {error}", "check it manually")
        if finding is not None:
            status, *texts = finding
            yield name, Finding(status, *(" ".join(text.split()) for text in texts)), time.monotonic() - start
