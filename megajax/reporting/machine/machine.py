"""How checks look at a machine: its environment, its files, and commands that may hang."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

DEVICE_SECONDS = 90.0
"""For each stage of looking at the devices: the first contact with eight GPUs may take a minute."""

UNKILLABLE_SECONDS = 2.0
"""How long the end of a killed command is waited for: one that hangs in a driver never ends."""


@dataclass(frozen=True, slots=True)
class Output:
    """What came of a command."""

    code: int | None
    """Exit code, negative for a signal; None: it took too long, or it could not be started."""
    out: str
    err: str
    why: str = ""
    """Why there is no exit code."""


def run_limited(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Output:
    """Run a command for at most `seconds`; then it is killed with all it started, and left behind if it won't die."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files and not pipes: a grandchild that keeps a pipe open would keep us waiting for its end.
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            return Output(None, "", "", f"cannot be started: {error.strerror or error}")
        code, why = None, ""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            why = f"did not come back within {seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(UNKILLABLE_SECONDS)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Output(code, *texts, why)


@dataclass(frozen=True, slots=True)
class Stages:
    """What the process that tries the devices said, stage by stage."""

    done: Mapping[str, Any]
    """Stage -> what it found."""
    seconds: Mapping[str, float]
    stopped_in: str = ""
    """The stage that did not end; "" if all did."""
    why: str = ""
    """Why it did not."""


class Machine:
    """This machine, looked at once: what several checks need is kept."""

    def __init__(self, run_dir: Path | None = None, environment: Mapping[str, str] | None = None):
        self.environment = dict(os.environ if environment is None else environment)
        self.run_dir = Path.cwd() if run_dir is None else run_dir
        self._given_up: dict[str, Output] = {}
        self._known: dict[str, Any] = {}
        self._stages: Stages | None = None
        self._devices: Devices | None = None
        self._looking: threading.Thread | None = None

    def run(self, *command: str, seconds: float = 10.0, **changed: str) -> Output:
        """A command with the environment, of which `changed` variables are others.

        A program that did not come back is not started again: nvidia-smi hangs for every question if for one.
        """
        program = command[0]
        if program in self._given_up:
            return self._given_up[program]
        output = run_limited(command, seconds=seconds, environment=self.environment | changed)
        if output.code is None and program != sys.executable:
            self._given_up[program] = output
        return output

    def once[T](self, name: str, look: Callable[["Machine"], T]) -> T:
        """What `look` finds, for all who ask under this name."""
        if name not in self._known:
            self._known[name] = look(self)
        return self._known[name]

    def read(self, path: str) -> str | None:
        """A file of the system; None where it is not there or cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    @cached_property
    def packages(self) -> dict[str, str]:
        """Installed distribution, in lower case with dashes -> its version."""
        found: dict[str, str] = {}
        for distribution in distributions():
            name = (distribution.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
            found.setdefault(name, distribution.version)
        return found

    @cached_property
    def gpu_files(self) -> int:
        """NVIDIA GPUs the kernel shows, by their device files."""
        return len(list(Path("/dev").glob("nvidia[0-9]*")))

    def start_looking(self) -> None:
        """Try the devices while other things are looked at."""
        self._looking = threading.Thread(target=self._look, name="devices", daemon=True)
        self._looking.start()

    @property
    def stages(self) -> Stages:
        """What came of trying the devices; waits for it."""
        if self._looking is None:
            self.start_looking()
        if self._looking is not None:
            self._looking.join()
        return self._stages or Stages({}, {}, "start", "the process that tries the devices left no word")

    def _look(self) -> None:
        environment = self.environment | {"PYTHONUNBUFFERED": "1"}
        if not self.gpu_files:
            # Without a GPU the plugin of the extra aot would print pages on missing CUDA libraries.
            environment.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        self._devices = Devices(environment)
        self._stages = self._devices.stages()

    def close(self) -> None:
        """End what is still trying the devices."""
        if self._devices is not None:
            self._devices.end()


@dataclass
class Devices:
    """The process that tries the devices, watched: a stage that hangs is ended, and named."""

    environment: Mapping[str, str]
    command: Sequence[str] = (sys.executable, "-m", "megajax.reporting.machine.devices")
    seconds: float = DEVICE_SECONDS
    """Of a stage."""
    done: dict[str, Any] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    stage: str = "start"
    """The one under way; "" after the last."""
    process: subprocess.Popen | None = None

    def stages(self) -> Stages:
        """Start it and see it to its end."""
        with tempfile.TemporaryFile() as err:
            try:
                process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=err,
                    env=dict(self.environment),
                    start_new_session=True,
                    text=True,
                )
            except OSError as error:
                return Stages({}, {}, "start", f"cannot be started: {error.strerror or error}")
            self.process = process
            hung = self._watch(process)
            err.seek(0)
            last = [line for line in err.read().decode(errors="replace").splitlines() if line.strip()][-3:]
        if not self.stage:
            return Stages(self.done, self.took)
        why = f"did not come back within {self.seconds:g} s" if hung else _death(process.returncode, last)
        return Stages(self.done, self.took, self.stage, why)

    def _watch(self, process: subprocess.Popen) -> bool:
        """Take lines until it ends; -> whether it hung."""
        alive, over = threading.Event(), threading.Event()
        reader = threading.Thread(target=self._read, args=(process, alive, over), daemon=True)
        reader.start()
        hung = False
        while not over.is_set():
            alive.clear()
            if not over.wait(0) and not alive.wait(self.seconds) and not over.is_set():
                hung = True
                break
        if not hung:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(UNKILLABLE_SECONDS)
        self.end()
        return hung

    def end(self) -> None:
        """Kill it with all it started, if it has not ended by itself."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(UNKILLABLE_SECONDS)

    def _read(self, process: subprocess.Popen, alive: threading.Event, over: threading.Event) -> None:
        for line in process.stdout or ():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict) and "begins" in said:
                self.stage = said["begins"]
            elif isinstance(said, dict) and "stage" in said:
                self.done[said["stage"]], self.took[said["stage"]] = said["found"], said["seconds"]
            alive.set()
        over.set()
        alive.set()


def _death(code: int | None, last: Sequence[str]) -> str:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
    return f"{how}: {' / '.join(last)}" if last else how
