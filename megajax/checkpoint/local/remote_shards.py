"""Reading sets of local checkpoints from other processes over TCP.

Every process serves its sets, read-only, to the processes of its run. A client authenticates with a secret that only
these processes know: the server sends a nonce, the client its HMAC under the secret. A request names a set and a range
of a file in its manifest. Nothing is encrypted, like all other traffic of a run.

    server: 32 bytes of nonce            client: HMAC-SHA256(secret, nonce)
    client: length, JSON {"set": ..., "name": ..., "start": ..., "stop": ...}, with null for the file's end
    server: status, length, content; status 0: the content is an error message
"""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from megajax.checkpoint.local.shard_set import LocalSet, SetInfo
from megajax.checkpoint.manifest import MANIFEST, Damaged, manifest_text
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config.errors import UserError
from megajax.processes.peers import Peers
from megajax.processes.world import is_loopback, split_address
from megajax.storage.folders import ServedFolder, read_into

TIMEOUT_SECONDS = 120.0
"""Timeout of a connection that neither sends nor receives."""
HELLO_SECONDS = 10.0
"""Timeout for the authentication of a client."""
MOST_WAITING = 64
"""Maximum connections that have not authenticated. For one more, the oldest is closed."""
PAUSE_SECONDS = 0.1
"""Time until the next attempt to accept a connection, after one failed for lack of file descriptors or memory."""
REQUEST_BYTES = 2**16
ANSWER_BYTES = 2**30
"""Maximum bytes of a manifest and of an error message."""
_HEADER = struct.Struct(">BQ")
_LENGTH = struct.Struct(">I")


class SetServer:
    """Serves sets in background threads until `close`. offered: id of a set -> set; None if this process lacks it."""

    def __init__(self, host: str, secret: bytes, offered: Callable[[str], LocalSet | None]):
        self._secret, self._offered = secret, offered
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._closed, self._selector = threading.Event(), selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, _Hello] = {}
        threading.Thread(target=self._accept, name="megajax local checkpoints", daemon=True).start()

    def _accept(self) -> None:
        """Accepts and authenticates connections in one thread. Only clients with the secret get a thread."""
        while not self._closed.is_set():
            ready = [key.fileobj for key, _ in self._selector.select(timeout=1.0)]
            for connection in self._waiting.keys() & ready:
                self._read_proof(connection)
            now = time.monotonic()
            for connection in [late for late, hello in self._waiting.items() if hello.deadline < now]:
                self._forget(connection).close()
            if self._listener in ready:
                self._welcome()
        for connection in list(self._waiting):
            self._forget(connection).close()
        self._selector.close()

    def _welcome(self) -> None:
        """Accepts a connection and sends the nonce."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the client has closed it
            return
        except OSError:
            # Not the end, unless `close` was called: without free descriptors, the next client finds one later.
            if self._waiting:
                self._forget(next(iter(self._waiting))).close()
            self._closed.wait(PAUSE_SECONDS)
            return
        if len(self._waiting) >= MOST_WAITING:
            self._forget(next(iter(self._waiting))).close()
        hello = _Hello(secrets.token_bytes(32), bytearray(), time.monotonic() + HELLO_SECONDS)
        self._waiting[connection] = hello
        try:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            connection.sendall(hello.nonce)
        except OSError:
            self._forget(connection).close()

    def _read_proof(self, connection: socket.socket) -> None:
        hello = self._waiting[connection]
        try:
            received = connection.recv(32 - len(hello.proof))
        except OSError:
            received = b""
        hello.proof.extend(received)
        if received and len(hello.proof) < 32:
            return
        self._forget(connection)
        if not hmac.compare_digest(hello.proof, _proof(self._secret, hello.nonce)):
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="megajax local reader", daemon=True).start()
        except RuntimeError:  # too many threads
            connection.close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        """Removes a connection from those that have not authenticated."""
        del self._waiting[connection]
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        return connection

    def _serve(self, connection: socket.socket) -> None:
        """Answers the requests of a client that has authenticated."""
        with connection, contextlib.suppress(OSError, ValueError, EOFError):
            connection.settimeout(TIMEOUT_SECONDS)
            while True:
                (size,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                if size > REQUEST_BYTES:
                    return
                request = json.loads(_receive(connection, size))
                try:
                    status, content = 1, self._answer(request)
                except (Damaged, KeyError, TypeError) as error:
                    status, content = 0, str(error).encode()
                connection.sendall(_HEADER.pack(status, len(content)))
                connection.sendall(content)

    def _answer(self, request: dict[str, Any]) -> bytes | np.ndarray:
        available = self._offered(request["set"])
        if available is None:
            raise Damaged(f"this process has no set {request['set']}")
        entries = available.arrays.files.entries
        name, start, stop = request["name"], request["start"], request["stop"]
        if (name, start, stop) == (MANIFEST, 0, None):
            return manifest_text(entries).encode()
        if name not in entries or not 0 <= start <= stop <= entries[name]["bytes"]:
            raise Damaged(f"set {request['set']} of this process has no bytes {start} to {stop} of {name}")
        content = np.empty(stop - start, np.uint8)
        try:
            return content[: read_into(available.path, name, content, start)]
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None

    def close(self) -> None:
        self._closed.set()
        # shutdown wakes the thread that accepts; close alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class _Hello(NamedTuple):
    """A connection that has not authenticated."""

    nonce: bytes
    proof: bytearray
    """What has been received of it."""
    deadline: float


class RemoteSet(ServedFolder):
    """A set that another process serves, for reading; the counterpart of `LocalSet`. Use it as a context manager."""

    def __init__(self, address: tuple[str, int], secret: bytes, set_id: str):
        """Raises ConnectionError if the process does not answer, Damaged if it does not have the set."""
        self._set, self._exclusive = set_id, threading.Lock()
        self.name = f"{address[0]}:{address[1]}"
        try:
            self._connection = socket.create_connection(address, timeout=TIMEOUT_SECONDS)
            self._connection.sendall(_proof(secret, _receive(self._connection, 32)))
        except (OSError, EOFError) as error:
            raise ConnectionError(f"no connection to {self.name}: {error}") from error
        self.arrays = StoredArrays(self)

    @property
    def info(self) -> SetInfo:
        """The metadata of a finished set. Raises Damaged, ConnectionError."""
        return SetInfo.read(self.arrays)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A range of a file, without verification of its SHA-256. Raises ConnectionError, Damaged."""
        most = ANSWER_BYTES if stop is None else max(stop - start, REQUEST_BYTES)
        content = self._request(most, name=name, start=start, stop=stop)
        if stop is not None and len(content) < stop - start:
            raise ValueError(f"{name} is shorter")
        return content

    def _request(self, most: int, **request: object) -> bytes:
        """The answer, of at most `most` bytes: after a restart, another program may have the port of a process."""
        body = json.dumps({"set": self._set, **request}).encode()
        try:
            with self._exclusive:  # threads read at the same time
                self._connection.sendall(_LENGTH.pack(len(body)) + body)
                status, size = _HEADER.unpack(_receive(self._connection, _HEADER.size))
                if size > most:
                    raise EOFError(f"it sends {size} bytes, at most {most} were expected")
                content = _receive(self._connection, size)
        except (OSError, EOFError) as error:
            raise ConnectionError(f"{self.name} does not answer: {error}") from error
        if not status:
            raise Damaged(f"{self.name}: {content.decode(errors='replace')}")
        return bytes(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()


class OwnAddress(NamedTuple):
    """Where this process serves its sets."""

    bind: str
    """The address to listen at."""
    host: str
    """The host at which other processes reach this one: an address, or a name that each of them resolves."""


def own_address(coordinator: str | None) -> OwnAddress:
    """The address of this machine in the network of the coordinator (HOST:PORT); loopback for a single machine.

    Other processes that reach the coordinator through the same network reach this one at that address.
    """
    host, port = split_address(coordinator or "127.0.0.1:1") or ("127.0.0.1", 1)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        source = probe.getsockname()[0]
    if is_loopback(source) and not is_loopback(host):
        # The name of the coordinator's machine, which many machines resolve to a loopback address for themselves.
        # Others have reached the coordinator by this name, and so reach this process by it too.
        return OwnAddress("0.0.0.0", host)
    return OwnAddress(source, source)


def _proof(secret: bytes, nonce: bytes | bytearray) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


def _receive(connection: socket.socket, size: int) -> bytearray:
    """Receives exactly `size` bytes. Raises EOFError if the connection ends before."""
    content = bytearray(size)
    view, received = memoryview(content), 0
    while received < size:
        count = connection.recv_into(view[received:])
        if not count:
            raise EOFError("the connection was closed")
        received += count
    return content


class Members:
    """All processes of the run. Called by all, in the same order, except `read_from`."""

    def __init__(self, peers: Peers, machine: str, offered: Callable[[str], LocalSet | None]):
        """machine: the same name on all processes with the same local folder. offered: id of a set -> set to serve."""
        self.process = peers.process
        self._secret = bytes.fromhex(peers.broadcast(secrets.token_hex(32) if peers.first else ""))
        self._server: SetServer | None = None
        address: tuple[str, int] = ("", 0)
        if peers.count > 1:
            bind, host = own_address(peers.coordinator)
            self._server = SetServer(bind, self._secret, offered)
            address = host, self._server.address[1]
        everyone = peers.gather((self.process, machine, address))
        self._machines: dict[int, str] = {process: machine for process, machine, _ in everyone}
        self._addresses: dict[int, tuple[str, int]] = {process: (host, port) for process, _, (host, port) in everyone}

    @property
    def count(self) -> int:
        return len(self._machines)

    def on_this_machine(self) -> list[int]:
        """The processes that share this one's local folder, itself included."""
        return [process for process, machine in self._machines.items() if machine == self._machines[self.process]]

    def has_other_owner(self) -> Callable[[int], bool]:
        """Process number in a folder's name -> whether another process than this one owns the sets in it.

        After a restart, a process number may be on another machine; the first process on this one owns its sets.
        """
        neighbors = self.on_this_machine()
        return lambda process: process != self.process and (process in neighbors or self.process != min(neighbors))

    def distance(self, jump: int | None) -> int:
        """Distance to the process whose shards this one keeps; None: the processes of the largest machine."""
        if jump is not None:
            return jump
        machines = list(self._machines.values())
        largest = max(machines.count(machine) for machine in set(machines))
        return largest if largest < self.count else 1

    def sources(self, replicas: int, jump: int | None) -> list[int]:
        """The other processes whose shards this one keeps."""
        if self.count == 1:
            return []
        distance = self.distance(jump)
        return [(self.process + number * distance) % self.count for number in range(1, replicas + 1)]

    def demand_replicas(self, replicas: int, jump: int | None) -> None:
        """Raises UserError if a process would keep its own replica, or a replica twice."""
        sources = self.sources(replicas, jump)
        if self.process in sources or len(set(sources)) < len(sources):
            raise UserError(
                f"checkpoint.local.replicas={replicas} with a jump of {self.distance(jump)} puts a replica on its own "
                f"process, or two on one, of {self.count} processes: keep fewer, or set another checkpoint.local.jump."
            )

    def read_from(self, process: int, set_id: str) -> RemoteSet:
        """A set that another process has. Raises ConnectionError or Damaged."""
        return RemoteSet(self._addresses[process], self._secret, set_id)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
