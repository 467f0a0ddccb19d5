"""Heartbeat files, from which the launcher reads the step and the phase of each process.

The launcher names their folder in MEGAJAX_BEATS. Each process replaces its own file there about once a second; a file
that no longer changes belongs to a process that is stopped or dead. A process without a launcher writes none.
"""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from megajax.config.errors import UserError, first_line
from megajax.faults.activity import Position, position
from megajax.processes.world import process_index

BEATS, ATTEMPT, ELASTIC = "MEGAJAX_BEATS", "MEGAJAX_ATTEMPT", "MEGAJAX_ELASTIC"
"""Environment variables that the launcher sets: the folder, the number of this start of the gang (from 1), and whether
the layout is to be adapted to fewer processes than requested, as by parallel.elastic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The contents of a heartbeat file."""

    process: int
    pid: int
    host: str
    time: float
    """When it was written, in seconds since 1970."""
    run_dir: str | None = None
    """The run folder; None if it is not known yet."""
    attempt: int | None = None
    """Number of the attempt in the records of the run; None if it is not known yet."""
    step: int = 0
    """The last step whose numbers have arrived."""
    committed: int | None = None
    """The last step with a complete checkpoint; None if no checkpoint has been saved yet."""
    phase: str | None = None
    """The phase of the main thread; see `megajax.faults.activity`."""
    phase_step: int | None = None
    """The step that the phase belongs to."""
    phase_seconds: float = 0.0
    """Time since the phase, or its stage, began."""
    stage: str | None = None
    """The stage of the phase; see `megajax.faults.activity.Stage`."""
    waits: bool = False
    """Whether it waits for other processes."""
    failure: str | None = None
    """Why the process is about to end, in one line; None if it is not."""
    code: int | None = None
    """The exit code it is about to end with."""
    cause: int | None = None
    """The process that it waited for, written before it ends because of a hang."""
    stacks: str | None = None
    """File with the stacks of its threads, written before it ends because of a hang."""

    def position(self) -> Position:
        """How far the process is."""
        return position(self.phase, self.phase_step, self.stage, waits=self.waits, completed=self.step)

    def write(self, folder: Path) -> None:
        """Replace the file of this process."""
        path = _path(folder, self.process)
        temporary = path.with_suffix(f".{os.getpid()}.writing")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.rename(path)

    @classmethod
    def read(cls, folder: Path, process: int) -> Self | None:
        """The last beat of a process, or None."""
        try:
            fields = json.loads(_path(folder, process).read_text(encoding="utf-8"))
            return cls(**fields)
        except (OSError, ValueError, TypeError):
            return None


def last_beat(failure: str, code: int, stacks: str | None = None) -> None:
    """Tell the launcher, if any, why this process is about to end. Only the first call has an effect."""
    folder, process = beats_folder(), process_index()
    if folder is None:
        return
    beat = Beat.read(folder, process)
    if beat is None or beat.pid != os.getpid():
        beat = Beat(process=process, pid=os.getpid(), host=socket.gethostname(), time=0.0)
    if beat.failure is None:
        with contextlib.suppress(OSError):
            replace(beat, failure=failure, code=code, stacks=stacks, time=time.time()).write(folder)


def exit_code(error: BaseException) -> int:
    """The exit code of a process that ends because of an error."""
    match error:
        case UserError():
            return error.code
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


@contextlib.contextmanager
def failures_reported() -> Generator[None]:
    """An error that leaves the block becomes the last beat of this process."""
    try:
        yield
    except BaseException as error:
        if exit_code(error):
            last_beat(first_line(error), exit_code(error))
        raise


def beats_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of beats; None without a launcher."""
    folder = environment.get(BEATS)
    return Path(folder) if folder else None


def attempt_number(environment: Mapping[str, str] = os.environ) -> int:
    """Number of this start of the gang, from 1."""
    text = environment.get(ATTEMPT, "1")
    return int(text) if text.isdigit() else 1


def _path(folder: Path, process: int) -> Path:
    return folder / f"process_{process}.json"
