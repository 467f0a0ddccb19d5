"""Starts and supervises the processes of one machine (a gang), and stops all of them when one fails.

The first process to fail is the cause. The others would hang in a collective with it, so they are stopped at once.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from megajax.config.errors import UserError
from megajax.mesh.world import COORDINATOR, COUNT, INDEX, LOCAL_COUNT, LOCAL_INDEX

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL after a failure: the remaining processes can't save without the failed one."""

OTHER_ERRORS_SECONDS = 1.0
"""From an exit with an error code to SIGTERM for the others, which may be about to print their own errors."""

TOGETHER_SECONDS = 0.05
"""Processes that end within this time may have failed in any order."""

DRAIN_SECONDS = 1.0
"""How long to wait for the remaining output of ended processes: a stray grandchild may keep a pipe open."""

LINE_BYTES = 1 << 16
"""A longer line is forwarded in pieces."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """The processes to start."""

    command: Sequence[str]
    processes: int
    devices_per_process: int | None = None
    """CPU devices, or GPUs, of each; None: one CPU device, or an equal share of the GPUs."""
    port: int | None = None
    """Port of the coordinator, on the loopback address; None: a free one."""
    log_dir: Path | None = None
    """Folder for a log file per process; None: output is printed, each line with the index of its process."""

    def environment(self, index: int, port: int) -> dict[str, str]:
        """Environment variables of process `index`, in addition to the launcher's own."""
        own = {
            COORDINATOR: f"127.0.0.1:{port}",
            COUNT: str(self.processes),
            INDEX: str(index),
            LOCAL_INDEX: str(index),
            LOCAL_COUNT: str(self.processes),
            "PYTHONUNBUFFERED": "1",
        }
        if (count := self.devices_per_process) is not None:
            own["JAX_NUM_CPU_DEVICES"] = str(count)
            own["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * count + device) for device in range(count))
        return own


def run(gang: Gang) -> int:
    """Start the gang and wait for its end. -> 0, or the exit code of the process that failed first (1 for a signal).

    Raises UserError where a process can't be started.
    """
    if gang.log_dir is not None:
        try:
            gang.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--log-dir={gang.log_dir} cannot be made: {error.strerror}") from error
    port = free_port(gang.port)
    events: SimpleQueue[_Member | signal.Signals] = SimpleQueue()
    members: list[_Member] = []
    with _forwarding(events):
        try:
            for index in range(gang.processes):
                members.append(_Member(gang, index, port))
            # Only now, because a process with threads may not be forked safely.
            for member in members:
                member.watch(events)
            code, cause = _supervise(members, events)
        finally:
            for member in members:
                if member.process.returncode is None:
                    member.signal(signal.SIGKILL)
                    member.process.wait()
            deadline = time.monotonic() + DRAIN_SECONDS
            for member in members:
                member.drain(deadline)
    if cause:
        print(f"megajax.launch: {cause}; the others were stopped", file=sys.stderr, flush=True)
    return code


def free_port(port: int | None) -> int:
    """The port, or for None a free one, of the loopback address. Raises UserError if the port is in use."""
    try:
        with socket.create_server(("127.0.0.1", port or 0)) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise UserError(
            f"--coordinator-port={port}: {error.strerror}; give another one, or none for one that is free"
        ) from error


@contextlib.contextmanager
def _forwarding(events: SimpleQueue) -> Generator[None]:
    """Within the block, signals to this process go into `events`."""
    # nohup ignores SIGHUP, which must stay ignored.
    handled = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, lambda number, _: events.put(signal.Signals(number))) for number in handled}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Member:
    """One process of the gang. Raises UserError where its command can't be run."""

    def __init__(self, gang: Gang, index: int, port: int):
        self.index, self.started = index, time.monotonic()
        self.log = None if gang.log_dir is None else gang.log_dir / f"process_{index}.log"
        with contextlib.ExitStack() as stack:
            log = None if self.log is None else stack.enter_context(self.log.open("ab"))
            try:
                self.process = subprocess.Popen(
                    gang.command,
                    stdin=subprocess.DEVNULL,
                    env=os.environ | gang.environment(index, port),
                    process_group=0,  # Ctrl-C reaches the launcher only, which forwards it once
                    preexec_fn=_Prepare(os.getpid()),
                    stdout=log or subprocess.PIPE,
                    stderr=subprocess.STDOUT if log else subprocess.PIPE,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise UserError(f"{gang.command[0]} cannot be started: {error}") from error
        self._readers: list[threading.Thread] = []

    def watch(self, events: SimpleQueue) -> None:
        """Forward its output from now on, and put this object into `events` when it has ended."""
        for pipe, target in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            if pipe is not None:
                self._readers.append(threading.Thread(target=self._forward, args=(pipe, target.buffer), daemon=True))
        for thread in (*self._readers, threading.Thread(target=self._wait, args=(events,), daemon=True)):
            thread.start()

    def _wait(self, events: SimpleQueue) -> None:
        self.process.wait()
        self.signal(signal.SIGKILL)  # the rest of its process group
        events.put(self)

    def _forward(self, pipe: BinaryIO, target: BinaryIO) -> None:
        while line := pipe.readline(LINE_BYTES):
            target.write(b"[%d] %s\n" % (self.index, line.removesuffix(b"\n")))
            target.flush()

    def drain(self, deadline: float) -> None:
        """Wait until all its output is forwarded, or until the deadline."""
        for thread in self._readers:
            thread.join(max(deadline - time.monotonic(), 0))

    def signal(self, number: int) -> None:
        """Signals its process group, if that still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def killed_by(self) -> int | None:
        """The signal that ended it, or None."""
        status = self.process.returncode
        return -status if status is not None and status < 0 else None

    @property
    def code(self) -> int:
        """Its exit code; 1 if a signal ended it."""
        return 1 if self.killed_by is not None else self.process.returncode or 0

    def secondary_failure(self) -> int:
        """How likely another process caused its failure: 0 if it caused it itself; an abort is the most likely."""
        if self.killed_by is not None:
            return 2 if self.killed_by == signal.SIGABRT else 0
        return int(self.code == 1)

    def describe_exit(self) -> str:
        """process 2 killed by SIGKILL after 12.3 s (DIR/process_2.log)."""
        reason = f"exited with code {self.code}"
        if self.killed_by is not None:
            reason = f"killed by {signal.Signals(self.killed_by).name}"
        log = f" ({self.log})" if self.log else ""
        return f"process {self.index} {reason} after {time.monotonic() - self.started:.1f} s{log}"


class _Prepare:
    """Runs in a child before its program: makes it die with the launcher, and disables core dumps."""

    def __init__(self, parent: int):
        self._parent = parent
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._parent:  # the launcher died in the meantime
                os._exit(1)


def _supervise(members: Sequence[_Member], events: SimpleQueue) -> tuple[int, str]:
    """Forward signals until all have ended; at the first failure, stop the others. -> exit code, first failure."""
    alive, code, cause = set(members), 0, ""
    scheduled: list[tuple[float, signal.Signals]] = []
    while alive:
        try:
            event = events.get(timeout=max(scheduled[0][0] - time.monotonic(), 0) if scheduled else None)
        except Empty:
            event = scheduled.pop(0)[1]
        if isinstance(event, signal.Signals):
            for member in alive:
                member.signal(event)
            continue
        if event.code and not cause:
            time.sleep(TOGETHER_SECONDS)
            # Processes abort or raise when they lose a peer, so another kind of failure came first.
            first = min((member for member in alive if member.code), key=_Member.secondary_failure)
            code, cause = first.code, first.describe_exit()
            terminate = time.monotonic() + (0.0 if first.killed_by else OTHER_ERRORS_SECONDS)
            scheduled = [(terminate, signal.SIGTERM), (terminate + GRACE_SECONDS, signal.SIGKILL)]
        alive.remove(event)
    return code, cause
