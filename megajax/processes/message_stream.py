"""Messages from process 0 to all others, for programs whose next step process 0 alone decides, such as a server's.

They go over a TCP connection to each process, which also tells within milliseconds that a process has ended. The
coordination service of jax would need a call of each process for each message, and misses a process only after its
heartbeats have failed for minutes; a broadcast between devices has one shape, and waits for ever for a lost process.

A message begins with its kind (one byte). The other way, a process sends JSON, once after each message that it has run:
one that hangs would keep the others waiting for ever.
"""

import contextlib
import hmac
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from megajax.processes.peers import Peers
from megajax.processes.world import is_loopback, split_address

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
JSON_BYTES = 4096
"""Maximum length of what another process sends."""
MESSAGE, END = b"\0", b"\1"

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
        self._send(MESSAGE + message)

    def ran(self) -> None:
        """Process 0 has run all messages, and may wait for the others from now on."""
        self._due = self._sent

    def close(self) -> None:
        """Tell all others to end, and wait until they have left."""
        self._closing = True
        self._send(END)
        self._thread.join(LEAVE_SECONDS)

    def _send(self, message: bytes) -> None:
        for connection, _ in self._connections.values():
            try:
                connection.send_bytes(message)
            except OSError:
                # The process has ended. The thread has read its last words, and calls `lost`.
                self._thread.join(LEAVE_SECONDS)

    def _end(self, index: int, name: str, reason: str | None = None, code: int = 1) -> None:
        if not self._closing:
            self._lost(f"process {index} ({name})", reason, code)

    def _watch(self) -> None:
        """Read what the others send, until all have left, and find those that hang."""
        present = {connection: (index, name) for index, (connection, name) in self._connections.items()}
        while present:
            ready = wait(list(present), CHECK_SECONDS)
            for connection in [connection for connection in present if connection in ready]:
                index, name = present[connection]
                try:
                    self._obey(index, name, json.loads(connection.recv_bytes(JSON_BYTES)))
                except (EOFError, OSError):
                    del present[connection]
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

    def _obey(self, index: int, name: str, news: dict[str, Any]) -> None:
        if "ran" in news:
            self._ran[index], self._since[index] = news["ran"], time.monotonic()
        elif "failed" in news:
            self._end(index, name, news["failed"], news["code"])
        else:
            self._stop()


class Receiver:
    """Another process's connection to process 0."""

    def __init__(self, peers: Peers, lost: Lost):
        """Connects to process 0. Raises TimeoutError."""
        self._lost, self._messages = lost, SimpleQueue[bytes | None]()
        sent: Any = None
        port, secret = peers.broadcast(sent)
        address = split_address(peers.coordinator or "")
        assert address is not None, "the coordinator's address has connected this process"
        connected = socket.create_connection((address[0], port), timeout=CONNECT_SECONDS)
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        connected.sendall(json.dumps({"secret": secret, "index": peers.index, "name": name}).encode() + b"\n")
        self._connection = _connection(connected)
        threading.Thread(target=self._read, name="messages of process 0", daemon=True).start()

    def __iter__(self) -> Iterator[bytes]:
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
        self._say({"failed": reason[: JSON_BYTES // 8], "code": code})

    def close(self) -> None:
        """Leave process 0."""
        self._connection.close()

    def _say(self, news: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(news).encode())

    def _read(self) -> None:
        try:
            while (message := self._connection.recv_bytes())[:1] != END:
                self._messages.put(message[1:])
        except (EOFError, OSError):
            self._lost("process 0", None, 1)
        self._messages.put(None)


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


def _accepted(listener: socket.socket, secret: str, count: int) -> dict[int, tuple[Connection, str]]:
    """The connections of `count` processes that know the secret, by index, with the names of the processes."""
    connections, deadline = {}, time.monotonic() + CONNECT_SECONDS
    while len(connections) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connected, _ = listener.accept()
        except TimeoutError:
            raise TimeoutError(f"{count - len(connections)} of {count} processes did not connect") from None
        connected.settimeout(HELLO_SECONDS)
        with connected, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            with connected.makefile("rb", buffering=0) as lines:
                hello = json.loads(lines.readline(JSON_BYTES))
            if hmac.compare_digest(hello["secret"], secret):
                connections[int(hello["index"])] = _connection(connected), str(hello["name"])
    return dict(sorted(connections.items()))


def _connection(connected: socket.socket) -> Connection:
    """A connection that sends at once, and finds out that the other machine is lost. Takes the socket over."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", LOST_SECONDS // 3), ("TCP_KEEPINTVL", LOST_SECONDS // 6), ("TCP_KEEPCNT", 4),
                        ("TCP_USER_TIMEOUT", LOST_SECONDS * 1000)):  # fmt: skip
        if hasattr(socket, name):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connected.detach())
