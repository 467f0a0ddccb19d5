"""Messages from process 0 to all others, for programs whose next step process 0 alone decides, such as a server's.

They go over a TCP connection to each process, which also tells within milliseconds that a process has ended. The
coordination service of jax would need a call of each process for each message, and misses a process only after its
heartbeats have failed for minutes; a broadcast between devices has one shape, and waits for ever for a lost process.

A frame is its kind (one byte), its length (eight bytes) and its bytes. The other way, a process sends lines of JSON,
one of them after each message that it has run: one that hangs would keep the others waiting for ever.
"""

import contextlib
import hmac
import json
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from queue import SimpleQueue
from typing import Any

from megajax.mesh.processes.peers import Peers
from megajax.mesh.processes.world import is_loopback, split_address

CONNECT_SECONDS = 120.0
"""How long all processes may take to connect, after they have met."""
HELLO_SECONDS = 10.0
"""How long a connection may take to say which process it is of."""
LEAVE_SECONDS = 30.0
"""How long the others may take to end after process 0 said so."""
LOST_SECONDS = 30
"""After this time without an answer of its machine, a process is lost."""
STARTING_SECONDS = 3600.0
"""How long a message of the start may take, such as a compilation, after process 0 has run it."""
CHECK_SECONDS = 0.5
"""Time between two looks for a process that hangs."""
LINE_BYTES = 4096
"""Maximum length of a line of JSON."""
HEAD = struct.Struct("<BQ")
MESSAGE, END = 0, 1

type Lost = Callable[[str, str | None, int], None]
"""Called in a thread when a process has ended: which one, why if it said so, and the exit code for this process."""
type Hung = Callable[[str, float], None]
"""Called in a thread when processes hang: which ones, and for how many seconds."""


class Sender:
    """Process 0's connections to all others."""

    def __init__(self, peers: Peers, lost: Lost, stop: Callable[[], None]):
        """Waits until all have connected. stop: called if another process was asked to stop. Raises TimeoutError."""
        self._lost, self._stop, self._closing = lost, stop, False
        self._hung: Hung = lambda names, seconds: None
        self._patience = math.inf
        self._sent = self._due = self._starting = 0
        secret = secrets.token_hex(16)
        with _listener(peers) as listener:
            peers.broadcast([listener.getsockname()[1], secret])
            self._connections = _accepted(listener, secret, peers.count - 1)
        self._ran, self._since = (dict.fromkeys(self._connections, number) for number in (0, time.monotonic()))
        self._thread = threading.Thread(target=self._watch, name="watch of processes", daemon=True)
        self._thread.start()

    def watch(self, patience: float, hung: Hung) -> None:
        """From now on, the others have so many seconds to run a message after process 0 has run it."""
        self._patience, self._hung = patience, hung

    def send(self, message: bytes, *, starting: bool = False) -> None:
        """Send a message to all others. starting: it may take long, such as a compilation."""
        self._sent += 1
        self._starting = self._sent if starting else self._starting
        self._send(HEAD.pack(MESSAGE, len(message)) + message)

    def ran(self) -> None:
        """Process 0 has run all messages, and may wait for the others from now on."""
        self._due = self._sent

    def close(self) -> None:
        """Tell all others to end, and wait until they have left."""
        self._closing = True
        self._send(HEAD.pack(END, 0))
        self._thread.join(LEAVE_SECONDS)

    def _send(self, frame: bytes) -> None:
        for connection, _ in self._connections.values():
            try:
                connection.sendall(frame)
            except OSError:
                # The process has ended. The thread has read its last words, and calls `lost`.
                self._thread.join(LEAVE_SECONDS)

    def _end(self, index: int, name: str, reason: str | None = None, code: int = 1) -> None:
        if not self._closing:
            self._lost(f"process {index} ({name})", reason, code)

    def _watch(self) -> None:
        """Read the lines of the others, until all have left, and find those that hang."""
        with selectors.DefaultSelector() as selector:
            for index, (connection, name) in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, (index, connection, name, bytearray()))
            while selector.get_map():
                for key, _ in selector.select(CHECK_SECONDS):
                    index, connection, name, received = key.data
                    data = b""
                    with contextlib.suppress(OSError):
                        data = connection.recv(LINE_BYTES)
                    received += data
                    while b"\n" in received:
                        line, _, rest = received.partition(b"\n")
                        received[:] = rest
                        self._obey(index, name, json.loads(line))
                    if not data:
                        selector.unregister(connection)
                        self._end(index, name)
                self._find_hanging()

    def _find_hanging(self) -> None:
        """Those that have run too few of the messages for too long."""
        now, late = time.monotonic(), dict[float, list[str]]()
        for index, (_, name) in self._connections.items():
            if self._ran[index] >= self._due:
                self._since[index] = now
            seconds = STARTING_SECONDS if self._ran[index] < self._starting else self._patience
            if now - self._since[index] > seconds:
                self._since[index] = now
                late.setdefault(seconds, []).append(f"process {index} ({name})")
        for seconds, names in late.items() if not self._closing else ():
            self._hung(" and ".join(names), seconds)

    def _obey(self, index: int, name: str, line: dict[str, Any]) -> None:
        if "ran" in line:
            self._ran[index], self._since[index] = line["ran"], time.monotonic()
        elif "failed" in line:
            self._end(index, name, line["failed"], line["code"])
        else:
            self._stop()


class Receiver:
    """Another process's connection to process 0."""

    def __init__(self, peers: Peers, lost: Lost):
        """Connects to process 0. Raises TimeoutError."""
        self._lost, self._messages = lost, SimpleQueue[bytearray | None]()
        sent: Any = None
        port, secret = peers.broadcast(sent)
        address = split_address(peers.coordinator or "")
        assert address is not None, "the coordinator's address has connected this process"
        self._connection = socket.create_connection((address[0], port), timeout=CONNECT_SECONDS)
        self._connection.settimeout(None)
        _set_up(self._connection)
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        self._say({"secret": secret, "index": peers.index, "name": name})
        threading.Thread(target=self._read, name="messages of process 0", daemon=True).start()

    def __iter__(self) -> Iterator[bytearray]:
        """The messages of process 0, until it ends. One has been run when the next one is asked for."""
        for number in count(1):
            if (message := self._messages.get()) is None:
                return
            yield message
            self._say({"ran": number})

    def ask_to_stop(self) -> None:
        """Tell process 0 that this process was asked to stop."""
        self._say({"stop": True})

    def fail(self, reason: str, code: int) -> None:
        """Tell process 0 why this process ends, in one line. code: its exit code."""
        self._say({"failed": reason[: LINE_BYTES // 8], "code": code})

    def close(self) -> None:
        """Leave process 0."""
        self._connection.close()

    def _say(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(line).encode() + b"\n")

    def _read(self) -> None:
        try:
            while True:
                kind, length = HEAD.unpack(_exactly(self._connection, HEAD.size))
                if kind == END:
                    break
                self._messages.put(_exactly(self._connection, length))
        except OSError:
            self._lost("process 0", None, 1)
        self._messages.put(None)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    """The next bytes. Raises OSError if there are fewer."""
    received, place = bytearray(count), 0
    view = memoryview(received)
    while place < count:
        if not (more := connection.recv_into(view[place:])):
            raise ConnectionError("the connection was closed")
        place += more
    return received


def _listener(peers: Peers) -> socket.socket:
    """A server socket at a free port, which the others reach at the coordinator's host."""
    address = split_address(peers.coordinator or "")
    assert address is not None, "the coordinator's address has connected the processes"
    if is_loopback(address[0]):
        family, _, _, _, bound = socket.getaddrinfo(address[0], 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(bound[:2], family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _accepted(listener: socket.socket, secret: str, count: int) -> dict[int, tuple[socket.socket, str]]:
    """The connections of `count` processes that know the secret, by index, with the names of the processes."""
    connections, deadline = {}, time.monotonic() + CONNECT_SECONDS
    while len(connections) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise TimeoutError(f"{count - len(connections)} of {count} processes did not connect") from None
        connection.settimeout(HELLO_SECONDS)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            with connection.makefile("rb", buffering=0) as lines:
                hello = json.loads(lines.readline(LINE_BYTES))
            if hmac.compare_digest(hello["secret"], secret):
                connection.settimeout(None)
                _set_up(connection)
                connections[int(hello["index"])] = connection, str(hello["name"])
                continue
        connection.close()
    return dict(sorted(connections.items()))


def _set_up(connection: socket.socket) -> None:
    """Send at once, and find out that the other machine is lost."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", LOST_SECONDS // 3), ("TCP_KEEPINTVL", LOST_SECONDS // 6), ("TCP_KEEPCNT", 4),
                        ("TCP_USER_TIMEOUT", LOST_SECONDS * 1000)):  # fmt: skip
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
