"""Starts and supervises the processes of one machine (a gang), and stops all of them when one fails.

The first process to fail is the cause. The others would hang in a collective with it, so they are stopped at once.
"""

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Self

from megajax.config.errors import UserError
from megajax.mesh.world import COORDINATOR, COUNT, INDEX, LOCAL_COUNT, LOCAL_INDEX

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL after a failure: the remaining processes can't save without the failed one."""

OTHER_ERRORS_SECONDS = 1.0
"""From an exit with an error code to SIGTERM for the others, which may be about to print their own errors."""

DRAIN_SECONDS = 1.0
"""How long to wait for the remaining output of ended processes."""

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
    """Starts the gang and waits for its end. -> exit code: 0, or that of the first process that failed.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP are forwarded to every process. Raises UserError if a process can't be started.
    Call it in the main thread.
    """
    if gang.log_dir is not None:
        try:
            gang.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--log-dir={gang.log_dir} cannot be made: {error.strerror}") from error
    port = free_port(gang.port)
    with _Signals() as signals, _Output() as output:
        members: list[_Member] = []
        try:
            for index in range(gang.processes):
                members.append(_Member.start(gang, index, port, output))
            return _Supervisor(members, signals, output).wait()
        finally:
            for member in members:
                member.kill()
            output.drain(DRAIN_SECONDS)


def free_port(port: int | None) -> int:
    """The port, or for None a free one, of the loopback address. Raises UserError if the port is in use."""
    try:
        with socket.create_server(("127.0.0.1", port or 0)) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise UserError(
            f"--coordinator-port={port}: {error.strerror}; give another one, or none for one that is free"
        ) from error


class _Signals:
    """Makes signals to this process readable from a socket, so that a selector can wait for them and for output."""

    def __init__(self) -> None:
        self.pending: list[signal.Signals] = []
        """Signals to forward."""

    def __enter__(self) -> Self:
        self.inbox, self._outbox = socket.socketpair()
        for end in (self.inbox, self._outbox):
            end.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        # nohup ignores SIGHUP, which must stay ignored.
        handled = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
        self._former = {number: signal.signal(number, self._take) for number in handled}
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.inbox.close()
        self._outbox.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(signal.Signals(number))

    def empty(self) -> None:
        """Empties the socket."""
        with contextlib.suppress(BlockingIOError):
            while self.inbox.recv(512):
                pass


class _Output:
    """Forwards the output of the gang, line by line with the index of the process."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.selector.close()

    def add(self, index: int, pipe: Any, target: BinaryIO) -> None:
        """Forwards what process `index` writes into `pipe`."""
        os.set_blocking(pipe.fileno(), False)
        self.selector.register(pipe, selectors.EVENT_READ, _Lines(f"[{index}] ".encode(), target))

    def forward(self, pipe: Any, lines: "_Lines") -> None:
        """Forwards the data in a pipe."""
        data = pipe.read(LINE_BYTES)
        if data is None:
            return
        lines.take(data)
        if not data:
            self.selector.unregister(pipe)
            pipe.close()

    def drain(self, seconds: float) -> None:
        """Forwards the rest, up to the end of all pipes or the timeout: a stray grandchild may keep a pipe open."""
        deadline = time.monotonic() + seconds
        while pipes := [key for key in self.selector.get_map().values() if isinstance(key.data, _Lines)]:
            if (left := deadline - time.monotonic()) <= 0:
                break
            for key, _ in self.selector.select(left):
                if isinstance(key.data, _Lines):
                    self.forward(key.fileobj, key.data)
        for key in pipes:
            key.data.take(b"")


@dataclass
class _Lines:
    """Collects the bytes of a pipe into lines."""

    prefix: bytes
    target: BinaryIO
    rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Writes the complete lines; empty data means the end."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) > LINE_BYTES):
            whole, self.rest = [*whole, self.rest], b""
        if whole:
            self.target.write(b"".join(self.prefix + line + b"\n" for line in whole))
            self.target.flush()


@dataclass
class _Member:
    """One process of the gang."""

    index: int
    process: subprocess.Popen
    started: float
    log: Path | None

    @classmethod
    def start(cls, gang: Gang, index: int, port: int, output: _Output) -> "_Member":
        """Raises UserError where the command can't be run."""
        environment = os.environ | gang.environment(index, port)
        log = None if gang.log_dir is None else gang.log_dir / f"process_{index}.log"
        out: Any = subprocess.PIPE
        with contextlib.ExitStack() as stack:
            if log is not None:
                out = stack.enter_context(log.open("ab"))
            try:
                process = subprocess.Popen(
                    gang.command,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    process_group=0,  # Ctrl-C reaches the launcher only, which forwards it once
                    preexec_fn=_Prepare(os.getpid()),
                    bufsize=0,
                    stdout=out,
                    stderr=subprocess.STDOUT if log else subprocess.PIPE,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise UserError(f"{gang.command[0]} cannot be started: {error}") from error
        member = cls(index, process, time.monotonic(), log)
        if process.stdout is not None and process.stderr is not None:
            output.add(index, process.stdout, sys.stdout.buffer)
            output.add(index, process.stderr, sys.stderr.buffer)
        return member

    def signal(self, number: int) -> None:
        """Signals its process group, if that still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def poll(self) -> bool:
        """Whether it has ended; kills the rest of its process group."""
        if self.process.poll() is None:
            return False
        self.signal(signal.SIGKILL)
        return True

    def kill(self) -> None:
        """Kills it and waits for its end."""
        if not self.ended:
            self.signal(signal.SIGKILL)
            self.process.wait()

    @property
    def ended(self) -> bool:
        """Whether `poll` has seen its end."""
        return self.process.returncode is not None

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


@dataclass
class _Supervisor:
    """Supervises the running gang."""

    members: list[_Member]
    signals: _Signals
    output: _Output
    cause: str = ""
    """Description of the first failure."""
    code: int = 0
    scheduled: list[tuple[float, signal.Signals]] = field(default_factory=list)
    """Signals to send after a failure, with their times."""
    alive: list[_Member] = field(default_factory=list)

    def wait(self) -> int:
        """Forwards signals and output until all have ended. -> exit code."""
        self.output.selector.register(self.signals.inbox, selectors.EVENT_READ, None)
        self.alive = list(self.members)
        while self.alive:
            timeout = max(self.scheduled[0][0] - time.monotonic(), 0) if self.scheduled else None
            for key, _ in self.output.selector.select(timeout):
                if key.data is None:
                    self.signals.empty()
                else:
                    self.output.forward(key.fileobj, key.data)
            while self.signals.pending:
                self.send(self.signals.pending.pop(0))
            self.reap()
            while self.scheduled and time.monotonic() >= self.scheduled[0][0]:
                self.send(self.scheduled.pop(0)[1])
        self.output.drain(DRAIN_SECONDS)
        if self.cause:
            print(f"megajax.launch: {self.cause}; the others were stopped", file=sys.stderr, flush=True)
        return self.code

    def send(self, number: signal.Signals) -> None:
        """Signals all running processes."""
        for member in self.alive:
            member.signal(number)

    def reap(self) -> None:
        """Removes ended processes; at the first failure, schedules the end of the others."""
        ended = [member for member in self.alive if member.poll()]
        self.alive = [member for member in self.alive if not member.ended]
        failed = [member for member in ended if member.code]
        if not failed or self.cause:
            return
        # If several have failed since the last poll: processes abort or raise when they lose a peer, so another kind
        # of failure came first.
        first = min(failed, key=_Member.secondary_failure)
        self.cause, self.code = first.describe_exit(), first.code
        terminate = time.monotonic() + (0.0 if first.killed_by else OTHER_ERRORS_SECONDS)
        self.scheduled = [(terminate, signal.SIGTERM), (terminate + GRACE_SECONDS, signal.SIGKILL)]
