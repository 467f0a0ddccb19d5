"""The processes of one attempt: their environment, their output, and their end with the launcher."""

import contextlib
import ctypes
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, BinaryIO

from megajax.config.bounds import Bounds
from megajax.config.errors import Problem, UserError
from megajax.faults.beats import ATTEMPT, BEATS, ELASTIC
from megajax.faults.unfailing_output import CLOSED_STREAM_ERRORS, discard_output
from megajax.processes.world import COORDINATOR, COUNT, INDEX, LOCAL_COUNT, LOCAL_INDEX, TOKEN, split_address

DRAIN_SECONDS = 1.0
"""Timeout for the remaining output of ended processes: a stray grandchild may keep a pipe open."""

LINE_BYTES = 1 << 16
"""Longer lines are forwarded in pieces."""

LAST_LINES, LAST_BYTES = 50, 1 << 16
"""Part of the log of a failed process to show."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1

type Port = Annotated[int, Bounds(at_least=1, at_most=65535)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """The processes to start."""

    command: Sequence[str]
    processes: int
    devices_per_process: int | None = None
    """CPU devices or GPUs of each process; None: one CPU device, or an equal share of the GPUs."""
    port: Port | None = None
    """Port of the coordinator, on the loopback address; None: a free one."""
    coordinator: str | None = None
    """HOST:PORT of process 0 on the first of several machines, each with a launcher; None: this machine alone."""
    machines: int = 1
    machine: int = 0
    """The number of machines, all with as many processes, and the index of this one."""
    log_dir: Path | None = None
    """Folder for a log file per process; None: output is printed, each line with the index of its process."""
    scheduler: bool = False
    """The command itself (srun, mpirun) starts the processes of the run, perhaps on other machines. It is started once,
    and its processes find each other through the environment that it sets."""

    def problems(self, processes: int | None) -> list[Problem]:
        """Problems of the flags. processes: --processes, if given."""
        if self.scheduler:
            hint = "the command decides the number of processes and their devices"
            values = (processes, self.devices_per_process, self.port, self.coordinator, self.machines > 1)
            names = ("processes", "devices-per-process", "coordinator-port", "coordinator", "machines")
            pairs = zip(names, values, strict=True)
            return [Problem(f"--{name}", "has no meaning with --scheduler", hint) for name, value in pairs if value]
        missing = Problem("--processes", "must be given where no GPU is visible", "a whole number")
        return [*[missing] * (processes is None), *self._machine_problems()]

    def _machine_problems(self) -> list[Problem]:
        """Problems of --machines, --machine and --coordinator."""
        problems = []
        if not 0 <= self.machine < self.machines:
            message = f"must be one of {self.machines} machines, 0 to {self.machines - 1}"
            problems.append(Problem("--machine", message))
        if self.machines > 1 and (self.coordinator is None or split_address(self.coordinator) is None):
            message = "must be given" if self.coordinator is None else f"must be HOST:PORT, got {self.coordinator!r}"
            problems.append(Problem("--coordinator", f"{message} with --machines", "an address of machine 0"))
        if self.machines == 1 and self.coordinator is not None:
            problems.append(Problem("--coordinator", "has no meaning without --machines", "see --coordinator-port"))
        if self.machines > 1 and self.port is not None:
            problems.append(Problem("--coordinator-port", "has no meaning with --machines", "--coordinator=HOST:PORT"))
        return problems

    @property
    def first(self) -> int:
        """Index of the first process of this machine."""
        return self.machine * self.processes

    def environment(self, index: int, slot: int, port: int) -> dict[str, str]:
        """Environment variables of process `index` of the run, in addition to the launcher's own.

        slot: its place on the machine, which determines its devices; its position, unless places were dropped.
        """
        environment = {"PYTHONUNBUFFERED": "1"}
        if self.scheduler:
            return environment
        environment |= {LOCAL_INDEX: str(slot), LOCAL_COUNT: str(self.processes)}
        if (count := self.devices_per_process) is not None:
            environment["JAX_NUM_CPU_DEVICES"] = str(count)
            environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(slot * count + device) for device in range(count))
        return environment | {COORDINATOR: self.coordinator or f"127.0.0.1:{port}", INDEX: str(index)}


def free_port(port: int | None) -> int:
    """The port, or for None a free one, of the loopback address. Raises UserError if the port is in use."""
    try:
        with socket.create_server(("127.0.0.1", port or 0)) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise UserError(
            f"--coordinator-port={port}: {error.strerror}; give another port, or none for a free one"
        ) from error


class CannotStart(UserError):
    """The process `index` can't be started."""

    def __init__(self, message: str, index: int):
        super().__init__(message)
        self.index = index


@contextlib.contextmanager
def running(
    gang: Gang, slots: Sequence[int], *, beats: Path, attempt: int, events: "SimpleQueue[Member | signal.Signals]"
) -> "Generator[list[Member]]":
    """Runs the processes of an attempt, one in each slot, within the block, and ends them afterwards.

    Puts each process into `events` when it ends. Raises UserError if a process can't be started.
    """
    port = 0 if gang.scheduler or gang.coordinator else free_port(gang.port)
    common = {BEATS: str(beats), ATTEMPT: str(attempt)}
    if not gang.scheduler:
        common |= {COUNT: str(gang.machines * len(slots))}
        common |= {TOKEN: secrets.token_hex(8)} if gang.machines == 1 else {}
        common |= {ELASTIC: "1"} if len(slots) < gang.processes else {}
    members: list[Member] = []
    try:
        for index, slot in enumerate(slots, gang.first):
            members.append(Member(gang, index, gang.environment(index, slot, port) | common))
        # After all starts, because forking a process with threads is not safe.
        for member in members:
            member.watch(events)
        yield members
    finally:
        for member in members:
            if member.process.returncode is None:
                member.signal(signal.SIGKILL)
                member.process.wait()
        deadline = time.monotonic() + DRAIN_SECONDS
        for member in members:
            member.drain(deadline)


@contextlib.contextmanager
def forwarding(events: SimpleQueue) -> Generator[None]:
    """Puts signals to this process into `events` within the block."""
    # nohup ignores SIGHUP, which must stay ignored.
    handled = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, lambda number, _: events.put(signal.Signals(number))) for number in handled}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Member:
    """One process of the gang. Raises CannotStart if its command can't be run."""

    def __init__(self, gang: Gang, index: int, environment: dict[str, str]):
        self.index, self.started = index, time.monotonic()
        self.ended: float | None = None
        """When its end was noticed, by the monotonic clock."""
        self.name = "the command" if gang.scheduler else f"process {index}"
        self._prefix = b"" if gang.scheduler else b"[%d] " % index
        self.log = None if gang.log_dir is None else gang.log_dir / f"process_{index}.log"
        with contextlib.ExitStack() as stack:
            try:
                log = None if self.log is None else stack.enter_context(self.log.open("ab"))
                self.process = subprocess.Popen(
                    gang.command,
                    stdin=subprocess.DEVNULL,
                    env=os.environ | environment,
                    process_group=0,  # Ctrl-C reaches the launcher only, which forwards it once
                    preexec_fn=Prepare(os.getpid()),
                    stdout=log or subprocess.PIPE,
                    stderr=subprocess.STDOUT if log else subprocess.PIPE,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise CannotStart(f"{gang.command[0]} cannot be started: {error}", index) from error
        self._readers: list[threading.Thread] = []

    def watch(self, events: SimpleQueue) -> None:
        """Forward its output from now on, and put this object into `events` when it has ended."""
        for pipe, target in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            if pipe is not None:
                self._readers.append(threading.Thread(target=self._forward, args=(pipe, target.fileno()), daemon=True))
        for thread in (*self._readers, threading.Thread(target=self._wait, args=(events,), daemon=True)):
            thread.start()

    def _wait(self, events: SimpleQueue) -> None:
        self.process.wait()
        self.ended = time.monotonic()
        self.signal(signal.SIGKILL)  # the rest of its process group
        events.put(self)

    def _forward(self, pipe: BinaryIO, target: int) -> None:
        with pipe:
            while line := pipe.readline(LINE_BYTES):
                write_or_drop(target, b"%s%s\n" % (self._prefix, line.removesuffix(b"\n")))

    def drain(self, deadline: float) -> None:
        """Wait until all its output is forwarded, or until the deadline."""
        for thread in self._readers:
            thread.join(max(deadline - time.monotonic(), 0))

    def signal(self, number: int) -> None:
        """Signals its process group, if that still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self.ended or time.monotonic()) - self.started


_WRITING = threading.Lock()


def write_or_drop(target: int, text: bytes) -> None:
    """Write a line to standard output or standard error. On a full disk the line is dropped; once the reader is gone
    (`... | head`), all later lines are dropped."""
    with _WRITING:
        try:
            while text:
                text = text[os.write(target, text) :]
        except OSError as error:
            if error.errno in CLOSED_STREAM_ERRORS:
                discard_output(target)


def last_lines(log: Path) -> list[str]:
    """The last lines of a log file; [] if it can't be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            return list(deque(file.read().decode(errors="replace").splitlines(), LAST_LINES))
    except OSError:
        return []


class Prepare:
    """Runs in a child before its program: makes the child die with the launcher, and disables core dumps."""

    def __init__(self, parent: int):
        self._parent = parent
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._parent:  # the launcher died in the meantime
                os._exit(1)
