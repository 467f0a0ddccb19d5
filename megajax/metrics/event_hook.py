"""The user's command for each line of events.jsonl (`logging.on_event`).

A process beside the run reads the file, so that the command also runs for lines that other processes or the launcher
append after the run has failed. `python -m megajax.metrics.event_hook RUN_DIR COMMAND BEGIN` reads until its standard
input ends or its parent does, and for a while longer.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

import megajax
from megajax.storage.disk import open_regular

COMMAND_SECONDS = 60
"""Limit of one run of the command."""
POLL_SECONDS = 0.5
LAST_SECONDS = 15.0
"""How long lines are read after the run has ended: the launcher appends some then."""
POSITION = ".on_event"
"""File of the run folder with the position in events.jsonl up to which the command has run, for the next attempt."""
LOG = "on_event.log"
"""File of the run folder with the output of the command."""
WAIT_SECONDS = 0.2
"""Time between looks at the log while the command runs."""
LOG_BYTES = 2**20
"""When the log of the command is larger, only its last half is kept."""


@contextlib.contextmanager
def event_hook(run_dir: Path, command: str | None) -> Generator[None]:
    """Run `command` for the lines that are written within the block; does nothing without one.

    An attempt continues with the lines since the last one; the first attempt with a command begins with its own lines.
    """
    if command is None:
        yield
        return
    events = run_dir / "events.jsonl"
    begin = events.stat().st_size if events.exists() else 0
    path = os.pathsep.join(filter(None, [str(Path(megajax.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "megajax.metrics.event_hook", str(run_dir), command, str(begin)],
        stdin=subprocess.PIPE,
        # Not the outputs of the run: a launcher reads those to their end.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # what ends the run must not end it
    )
    assert process.stdin is not None
    with process.stdin:
        yield


def follow(run_dir: Path, command: str, begin: int) -> None:
    """Run the command for new lines until the run has ended and LAST_SECONDS have passed.

    begin: position in events.jsonl of the first line for a run that had no command until now, bytes.
    """
    parent, end = os.getppid(), float("inf")
    while time.monotonic() < end:
        handle_new_lines(run_dir, command, begin)
        if end < float("inf"):
            time.sleep(POLL_SECONDS)
        elif select.select([sys.stdin], [], [], POLL_SECONDS)[0] or os.getppid() != parent:
            end = time.monotonic() + LAST_SECONDS


def handle_new_lines(run_dir: Path, command: str, begin: int) -> None:
    """Run the command for each complete line after the position, which follows: no line is handled twice."""
    events_file, position_file = run_dir / "events.jsonl", run_dir / POSITION
    # A refused start writes no line, and its folder stays as it was.
    if not events_file.exists() or (events_file.stat().st_size <= begin and not position_file.exists()):
        return
    with os.fdopen(os.open(position_file, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as position:
        # The hook of an earlier attempt may be reading too. Some file systems have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(position, fcntl.LOCK_EX)
        with (
            open(open_regular(events_file), "rb") as events,
            open(open_regular(run_dir / LOG, append=True), "r+b", 0) as log,
        ):
            at = int(position.read() or begin)
            events.seek(at)
            for line in events:
                if not line.endswith(b"\n"):
                    break
                _run(command, line, run_dir, log)
                at += len(line)
                # Of one length: a shorter number would leave digits of a longer one.
                os.pwrite(position.fileno(), b"%020d" % at, 0)


def _run(command: str, line: bytes, run_dir: Path, log: IO[bytes]) -> None:
    """Run the command for a line; its output and its failure go to the log."""
    try:
        name = str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):
        return  # an incomplete line, whose writer was killed
    with tempfile.TemporaryFile() as event_input:
        event_input.write(line)
        event_input.seek(0)
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=event_input,
            stdout=log,
            stderr=log,
            env={**os.environ, "MEGAJAX_EVENT": name, "MEGAJAX_RUN": str(run_dir)},
            start_new_session=True,
        )
    end, code, failure = time.monotonic() + COMMAND_SECONDS, None, None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(WAIT_SECONDS)
        shorten(log)
        if code is None and time.monotonic() > end:
            failure = subprocess.TimeoutExpired(command, COMMAND_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        log.write(f"megajax: event {name}: {failure or subprocess.CalledProcessError(code, command)}\n".encode())
    shorten(log)


def shorten(log: IO[bytes]) -> None:
    """Keep the last half of a log that is too large."""
    if (size := os.fstat(log.fileno()).st_size) > LOG_BYTES:
        rest = os.pread(log.fileno(), LOG_BYTES // 2, size - LOG_BYTES // 2)
        log.truncate(0)
        log.write(rest)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
