"""Process 0's side of a rendezvous: it reads the messages of all connections at once, and answers them.

Anyone can connect to its port. Connections without a valid message, and messages of other runs, are closed and do not
affect the run. A process of this run that differs from process 0 ends the start.
"""

import contextlib
import errno
import json
import resource
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from megajax.processes.gpus import GpuClaim, assign
from megajax.processes.must_be_equal import IDENTITY, IdentitySection, difference, name_processes
from megajax.processes.world import StartError, World

PROTOCOL = 2
"""Version of the messages."""
MESSAGE_BYTES = 16384
"""Maximum length of a message; a longer one is not from a process of a run."""
TEXT_LENGTH = 300
"""Maximum length of a text in a message."""
ANSWER_LENGTH = 2000
"""Maximum length of an error in an answer."""

HELLO_SECONDS = 10.0
"""How long a connection may take to send its message."""
MAX_SILENT = 256
"""Maximum number of connections without a message; further ones replace the oldest. A process of a run sends its
message as soon as it has connected."""
DIFFERENCE_SECONDS = 5.0
"""How long process 0 waits for the others after one that differs, to report all that differ together."""
LATE_SECONDS = 1.0
"""How long process 0 keeps reporting an error to processes that connect late."""
FULL_SECONDS = 0.2
"""How long no connection is accepted after all file descriptors are in use."""
SPARE_FILES = 1024
"""File descriptors of process 0 for other purposes than the connections of the others."""

MAX_WARNINGS = 3
"""Maximum number of lines about connections of other runs."""

_PLURALS = {"differs": "differ", "was": "were"}

type Hello = dict[str, Any]


@dataclass(eq=False, slots=True)
class _Caller:
    """A connection."""

    connection: socket.socket
    deadline: float
    """When its message must have arrived."""
    received: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    problem: str | None = None
    """How it differs from process 0."""

    @property
    def index(self) -> int:
        return -1 if self.hello is None else self.hello["index"]

    def closed(self) -> bool:
        """Whether the other end has closed."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def say(self, answer: dict[str, Any]) -> None:
        """Sends a line, without waiting: it is shorter than the buffer of a connection."""
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps(answer, ensure_ascii=False).encode() + b"\n")


class Gathering:
    """The connections to process 0, within a `with` block."""

    def __init__(self, world: World, hello: Hello, listener: socket.socket, patience: float):
        """hello: the message of process 0 about itself. patience: seconds, for messages."""
        self._world, self._root, self._listener, self._patience = world, hello, listener, patience
        self._selector = selectors.DefaultSelector()
        self._silent: dict[_Caller, None] = {}  # in order of arrival
        self._members: dict[int, _Caller] = {}
        self._differing: list[_Caller] = []
        self._first_difference = float("inf")
        self._closed_until = 0.0
        self._strangers, self._warnings = 0, 0
        self._verdict: StartError | None = None

    def __enter__(self) -> Self:
        allow_files(self._world.count + SPARE_FILES)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for caller in [*self._silent, *self._members.values(), *self._differing]:
            caller.connection.close()
        self._selector.close()

    def wait(self, deadline: float) -> list[int] | None:
        """Waits for all others and answers them with their GPUs. -> the GPUs of process 0.

        On an error, reports it to all, then raises StartError.
        """
        while not self._complete():
            if (error := self._error(deadline)) is not None:
                self._end(error)
            self._serve(min(deadline, self._decision_time()))
        hellos = {caller.index: caller.hello or {} for _, caller in sorted(self._members.items())}
        shares = assign({index: hello["gpus"] for index, hello in ({0: self._root} | hellos).items()})
        if isinstance(shares, str):
            self._end(StartError(shares, code=2))
        for index, caller in self._members.items():
            caller.say({"go": True, "gpus": shares[index]})
        for caller in self._differing:
            caller.say(_refusal(f"process 0 has started its run without this process: {caller.problem}", 1))
        return shares[0]

    def _complete(self) -> bool:
        """Whether all others are connected. A launcher may have restarted a process that has ended."""
        if len(self._members) == self._world.count - 1:
            for caller in [caller for caller in self._members.values() if caller.closed()]:
                self._drop(caller)
        return len(self._members) == self._world.count - 1

    def _missing(self) -> set[int]:
        differing = {caller.index for caller in self._differing}
        return set(range(1, self._world.count)) - self._members.keys() - differing

    def _decision_time(self) -> float:
        """When a difference ends the start, by the monotonic clock.

        Without a token, a process that differs may be of another run, and the right one may still come.
        """
        if self._missing():
            return self._first_difference + DIFFERENCE_SECONDS
        return self._first_difference + (0.0 if self._world.token else LATE_SECONDS)

    def _error(self, deadline: float) -> StartError | None:
        """Why the start fails now; None: it goes on."""
        now, missing = time.monotonic(), self._missing()
        if self._differing and now >= min(deadline, self._decision_time()):
            # Retried if a process of another run may have caused it: no token, and one of this run did not connect.
            return StartError(self._differences(), code=2 if self._world.token or not missing else 1)
        if now < deadline:
            return None
        strangers = f"; {self._strangers} connections were not of this run" * bool(self._strangers)
        return StartError(
            f"{name_processes(missing)} of {self._world.count} did not connect to {self._world.coordinator} within "
            f"{self._patience:g} s: check that they were started, and read their own messages{strangers}",
            code=1,
        )

    def _differences(self) -> str:
        """All differences from process 0 in one line; processes that differ alike are named together."""
        groups: dict[str, list[_Caller]] = {}
        for caller in self._differing:
            groups.setdefault(caller.problem or "", []).append(caller)
        texts = []
        for problem, callers in groups.items():
            place = (callers[0].hello or {})["at"]
            first = f"{', the first on' * (len(callers) > 1)} {place}".removeprefix(", ").strip()
            verb, _, rest = problem.partition(" ")
            verb = _PLURALS.get(verb, verb) if len(callers) > 1 else verb
            texts.append(f"{name_processes({caller.index for caller in callers})} ({first}) {verb} {rest}")
        text = " | ".join(texts)
        return text if len(text) <= ANSWER_LENGTH else text[:ANSWER_LENGTH] + "..."

    def _end(self, error: StartError) -> NoReturn:
        """Tells all processes, also those that connect a little later, and raises the error."""
        self._verdict = error
        answer = {"error": str(error).removeprefix("megajax: "), "code": error.code, "reported": True}
        for caller in [*self._members.values(), *self._differing]:
            caller.say(answer)
        deadline = time.monotonic() + LATE_SECONDS
        while time.monotonic() < deadline:
            self._serve(deadline)
        raise error

    def _serve(self, until: float) -> None:
        """Waits for something to happen on any connection, at most until then, and handles it."""
        now = time.monotonic()
        next_times = [until, *[caller.deadline for caller in self._silent][:1], *[self._closed_until] * self._is_full]
        for key, _ in self._selector.select(max(0.0, min(next_times) - now)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data.connection.fileno() >= 0:  # not dropped meanwhile
                self._read(key.data)
        now = time.monotonic()
        for caller in [caller for caller in self._silent if caller.deadline <= now]:
            self._drop(caller, stranger=True)
        if self._is_full and now >= self._closed_until:
            self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def _is_full(self) -> bool:
        """Whether connections are not accepted for a moment."""
        return self._listener not in self._selector.get_map()

    def _accept(self) -> None:
        for _ in range(MAX_SILENT):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room()
                    return
                continue  # the other end has gone already
            connection.setblocking(False)
            caller = _Caller(connection, time.monotonic() + HELLO_SECONDS)
            self._silent[caller] = None
            self._selector.register(connection, selectors.EVENT_READ, caller)
            self._read(caller)
            if len(self._silent) > MAX_SILENT:
                self._drop(next(iter(self._silent)), stranger=True)

    def _make_room(self) -> None:
        """No file descriptors are left: close half of the connections without a message, and pause."""
        for caller in list(self._silent)[: len(self._silent) // 2 + 1]:
            self._drop(caller, stranger=True)
        self._selector.unregister(self._listener)
        self._closed_until = time.monotonic() + FULL_SECONDS

    def _read(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(caller)
        elif caller.hello is None:
            caller.received += data
            line, newline, _ = caller.received.partition(b"\n")
            if newline or len(caller.received) > MESSAGE_BYTES:
                caller.hello = parse_hello(bytes(line)) if len(line) <= MESSAGE_BYTES else None
                self._place(caller)

    def _place(self, caller: _Caller) -> None:
        """Decides what a connection with a complete message is."""
        hello = caller.hello
        if hello is None:
            return self._drop(caller, stranger=True)
        if hello["token"] != self._root["token"]:
            self._warn(f"a process of another run ({hello['at']}) has connected to this one, and is ignored")
            caller.say(_refusal(f"process 0 of another run is there ({self._root['at']})", 0))
            return self._drop(caller, stranger=True)
        if self._verdict is not None:
            error = str(self._verdict).removeprefix("megajax: ")
            caller.say({"error": error, "code": self._verdict.code, "reported": True})
            return self._drop(caller)
        del self._silent[caller]
        caller.problem = self._problem(hello)
        if caller.problem is None:
            self._members[caller.index] = caller
        else:
            self._differing.append(caller)
            self._first_difference = min(self._first_difference, time.monotonic())
        return None

    def _problem(self, hello: Hello) -> str | None:
        """Why a process does not fit the run; None if it does."""
        index, count, root = hello["index"], hello["count"], self._root
        if count != root["count"] or index >= count:
            return f"was started as one of {count} processes, process 0 ({root['at']}) as one of {root['count']}"
        if index in self._members:
            former = self._members[index]
            if not former.closed():
                return f"and another one ({(former.hello or {})['at']}) both claim to be process {index}"
            self._drop(former)
        text = difference(hello["identity"], root["identity"])
        return None if text is None else f"differs from process 0 ({root['at']}) in {text}"

    def _drop(self, caller: _Caller, *, stranger: bool = False) -> None:
        """Closes a connection. stranger: it is not of this run."""
        self._strangers += stranger
        self._silent.pop(caller, None)
        if self._members.get(caller.index) is caller:
            del self._members[caller.index]
        if caller in self._differing:
            self._differing.remove(caller)
            if not self._differing:
                self._first_difference = float("inf")
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def _warn(self, text: str) -> None:
        self._warnings += 1
        if self._warnings <= MAX_WARNINGS:
            print(f"warning: {text}", file=sys.stderr, flush=True)


def allow_files(count: int) -> None:
    """Raises the soft limit of open files to `count` where the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def parse_hello(line: bytes) -> Hello | None:
    """The message of a process about itself; None if it is not one."""
    try:
        hello = json.loads(line)
        identity = {name: IdentitySection(*hello["identity"][name]) for name in IDENTITY if name in hello["identity"]}
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return None
    kinds = {"megajax": int, "index": int, "count": int, "token": str, "at": str}
    if not all(type(hello.get(name)) is kind for name, kind in kinds.items()):
        return None
    gpus = GpuClaim.read(hello.get("gpus"))
    if gpus is None or hello["index"] < 1 or hello["count"] < 2:
        return None
    if not all(isinstance(part.values, dict | None) for part in identity.values()):
        return None
    # Texts may be printed on a terminal.
    texts = [hello["at"], hello["token"], *[part.digest for part in identity.values()]]
    texts += [text for part in identity.values() for pair in (part.values or {}).items() for text in pair]
    if not all(isinstance(text, str) and len(text) <= TEXT_LENGTH and text.isprintable() for text in texts):
        return None
    return hello | {"identity": identity, "gpus": gpus}


def _refusal(text: str, code: int) -> dict[str, Any]:
    """An answer to a process that this one's output does not report. code: exit code; 0: it may ask again."""
    return {"error": text, "code": code, "reported": False}
