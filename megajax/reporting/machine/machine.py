"""How checks look at this machine: its environment, its files, and commands that may hang."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Any, NamedTuple

KILL_SECONDS = 2.0
"""How long to wait for a killed process: one that hangs in a driver never ends."""


class Output(NamedTuple):
    """The output of a command."""

    code: int | None
    """Exit code, negative for a signal; None if it took too long, or could not be started."""
    out: str = ""
    err: str = ""
    why: str = ""
    """Why there is no exit code."""

    @property
    def reason(self) -> str:
        """Why the command failed, in one line."""
        killed = self.code is not None and self.code < 0
        how = f"was killed by signal {abs(self.code or 0)}" if killed else f"ended with code {self.code}"
        last = " / ".join((self.err.strip() or self.out.strip()).splitlines()[-3:])
        return self.why or (f"{how}: {last}" if last else how)


def run_limited(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Output:
    """Run a command for at most `seconds`, then kill it with all its children. Never waits for one that won't die."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, not pipes: a grandchild that keeps a pipe open would keep this process waiting.
        try:
            process = subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        except OSError as error:
            return Output(None, why=f"cannot be started: {error.strerror or error}")
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
        return Output(code, *texts, why)


class Machine:
    """This machine; what several checks need is looked up once."""

    def __init__(self, run_dir: Path | None = None, environment: Mapping[str, str] | None = None):
        self.environment = dict(os.environ if environment is None else environment)
        self.run_dir = Path.cwd() if run_dir is None else run_dir
        self._known: dict[str, Any] = {}

    def run(self, *command: str, seconds: float = 10.0, **variables: str) -> Output:
        """A command in this environment, with some `variables` changed."""
        return run_limited(command, seconds=seconds, environment=self.environment | variables)

    def once[T](self, name: str, look: Callable[["Machine"], T]) -> T:
        """The result of `look`, which runs once for each `name`."""
        if name not in self._known:
            self._known[name] = look(self)
        return self._known[name]

    def read(self, path: str) -> str:
        """A file of the system; "" if it can't be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    @cached_property
    def packages(self) -> dict[str, str]:
        """Installed distribution, in lower case with dashes -> its version."""
        names = ((each.metadata["Name"] or "", each.version) for each in reversed([*distributions()]))
        return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in names}

    def requires(self, package: str) -> list[str]:
        """The requirements of an installed distribution."""
        try:
            return requires(package) or []
        except PackageNotFoundError:
            return []

    @cached_property
    def gpu_files(self) -> int:
        """Number of NVIDIA GPUs with a device file."""
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
