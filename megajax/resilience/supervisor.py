"""The processes of one machine as a gang: started together, watched, and ended together when one of them fails.

Whoever dies first is the cause; the others are stuck without it, in a collective that may never return, so they are
ended at once instead of being left to find out.
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
"""From SIGTERM to SIGKILL for those that are left after a failure: they can save nothing without the one that died."""

WORD_SECONDS = 1.0
"""From a failure with an exit code to SIGTERM for the others, who may be about to say why they fail as well."""

DRAIN_SECONDS = 1.0
"""How long the last words of processes that are gone are waited for."""

LINE_BYTES = 1 << 16
"""A longer line is passed on in pieces."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    """What is to be started."""

    command: Sequence[str]
    processes: int
    devices_per_process: int | None = None
    """CPU devices, or GPUs, of each; None: one CPU device, or an equal share of the GPUs."""
    port: int | None = None
    """Of the coordinator, on the loopback address; None: a free one."""
    log_dir: Path | None = None
    """A file for each process's output; None: all of it goes on, line by line with the process's number."""

    def environment(self, index: int, port: int) -> dict[str, str]:
        """What process `index` finds in its environment beside the launcher's own."""
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
    """Start the gang and see it to its end. -> its exit code: 0, or that of the first process that failed.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP are passed on to every process. Raises UserError for what can't be started.
    To be called in the main thread.
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
            return _Watch(members, signals, output).until_the_end()
        finally:
            for member in members:
                member.kill()
            output.drain(DRAIN_SECONDS)


def free_port(wanted: int | None) -> int:
    """A port of the loopback address on which nobody listens. Raises UserError where that is not so of `wanted`."""
    try:
        with socket.create_server(("127.0.0.1", wanted or 0)) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        raise UserError(
            f"--coordinator-port={wanted}: {error.strerror}; give another one, or none for one that is free"
        ) from error


class _Signals:
    """Signals to this process as something to wait for beside the gang's output."""

    def __init__(self) -> None:
        self.asked: list[signal.Signals] = []
        """To be passed on."""

    def __enter__(self) -> Self:
        self.inbox, self._outbox = socket.socketpair()
        for end in (self.inbox, self._outbox):
            end.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        # Who runs this with nohup wants it to live on.
        heard = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        self._former = {number: signal.signal(number, self._take) for number in heard}
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.inbox.close()
        self._outbox.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(signal.Signals(number))

    def empty(self) -> None:
        """Read what woke us."""
        with contextlib.suppress(BlockingIOError):
            while self.inbox.recv(512):
                pass


class _Output:
    """Pipes from the gang, passed on line by line with the number of the process."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.selector.close()

    def add(self, index: int, pipe: Any, target: BinaryIO) -> None:
        """Pass on what process `index` writes into `pipe`."""
        os.set_blocking(pipe.fileno(), False)
        self.selector.register(pipe, selectors.EVENT_READ, _Lines(f"[{index}] ".encode(), target))

    def pass_on(self, pipe: Any, lines: "_Lines") -> None:
        """What is there to read."""
        data = pipe.read(LINE_BYTES)
        if data is None:
            return
        lines.take(data)
        if not data:
            self.selector.unregister(pipe)
            pipe.close()

    def drain(self, seconds: float) -> None:
        """What is left, up to the end of every pipe, which a stray grandchild may keep open."""
        deadline = time.monotonic() + seconds
        while pipes := [key for key in self.selector.get_map().values() if isinstance(key.data, _Lines)]:
            if (left := deadline - time.monotonic()) <= 0:
                break
            for key, _ in self.selector.select(left):
                if isinstance(key.data, _Lines):
                    self.pass_on(key.fileobj, key.data)
        for key in pipes:
            key.data.take(b"")


@dataclass
class _Lines:
    """Bytes of one pipe until they make a line."""

    prefix: bytes
    target: BinaryIO
    rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Write every whole line; nothing means the end."""
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
                    process_group=0,  # Ctrl-C goes to the launcher alone, which passes it on once
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
        """To its whole process group, if there is one left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def look(self) -> bool:
        """Whether it has ended; what it left in its process group goes with it."""
        if self.process.poll() is None:
            return False
        self.signal(signal.SIGKILL)
        return True

    def kill(self) -> None:
        """End it and wait until it is gone."""
        if not self.ended:
            self.signal(signal.SIGKILL)
            self.process.wait()

    @property
    def ended(self) -> bool:
        """Whether `look` has seen its end."""
        return self.process.returncode is not None

    @property
    def killed_by(self) -> int | None:
        """The signal that ended it."""
        status = self.process.returncode
        return -status if status is not None and status < 0 else None

    @property
    def code(self) -> int:
        """Its exit code; 1 where a signal ended it."""
        return 1 if self.killed_by is not None else self.process.returncode or 0

    def likely_victim(self) -> int:
        """0 for what only the process itself can have caused, more for what the loss of a partner looks like."""
        if self.killed_by is not None:
            return 2 if self.killed_by == signal.SIGABRT else 0
        return int(self.code == 1)

    def obituary(self) -> str:
        """process 2 killed by SIGKILL after 12.3 s (DIR/process_2.log)."""
        how = f"exited with code {self.code}"
        if self.killed_by is not None:
            how = f"killed by {signal.Signals(self.killed_by).name}"
        where = f" ({self.log})" if self.log else ""
        return f"process {self.index} {how} after {time.monotonic() - self.started:.1f} s{where}"


class _Prepare:
    """Run in a child before its program: it dies with the launcher and leaves no core."""

    def __init__(self, parent: int):
        self._parent = parent
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def __call__(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._parent:  # it died in the meantime
                os._exit(1)


@dataclass
class _Watch:
    """The gang at work."""

    members: list[_Member]
    signals: _Signals
    output: _Output
    cause: str = ""
    """What the first failure was."""
    code: int = 0
    orders: list[tuple[float, signal.Signals]] = field(default_factory=list)
    """What those that are left after a failure are to be sent, and when."""
    alive: list[_Member] = field(default_factory=list)

    def until_the_end(self) -> int:
        """Pass signals and output on until all have ended."""
        self.output.selector.register(self.signals.inbox, selectors.EVENT_READ, None)
        self.alive = list(self.members)
        while self.alive:
            wait = max(self.orders[0][0] - time.monotonic(), 0) if self.orders else None
            for key, _ in self.output.selector.select(wait):
                if key.data is None:
                    self.signals.empty()
                else:
                    self.output.pass_on(key.fileobj, key.data)
            while self.signals.asked:
                self.send(self.signals.asked.pop(0))
            self.bury()
            while self.orders and time.monotonic() >= self.orders[0][0]:
                self.send(self.orders.pop(0)[1])
        self.output.drain(DRAIN_SECONDS)
        if self.cause:
            print(f"megajax.launch: {self.cause}; the others were stopped", file=sys.stderr, flush=True)
        return self.code

    def send(self, number: signal.Signals) -> None:
        """A signal to all that are left."""
        for member in self.alive:
            member.signal(number)

    def bury(self) -> None:
        """Take note of who has ended; at the first failure, end the others."""
        ended = [member for member in self.alive if member.look()]
        self.alive = [member for member in self.alive if not member.ended]
        failed = [member for member in ended if member.code]
        if not failed or self.cause:
            return
        # Several at one look: those that lose a partner abort or raise, so what is neither was first.
        first = min(failed, key=_Member.likely_victim)
        self.cause, self.code = first.obituary(), first.code
        now = time.monotonic() + (0.0 if first.killed_by else WORD_SECONDS)
        self.orders = [(now, signal.SIGTERM), (now + GRACE_SECONDS, signal.SIGKILL)]
