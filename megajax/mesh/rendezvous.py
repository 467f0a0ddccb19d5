"""A rendezvous of all processes of a run before jax connects them, to report missing, duplicate and foreign processes.

jax's own initialisation aborts every process without naming the missing ones, lets two processes with the same index
replace each other, and accepts processes of another run on its port. So process 0 first listens on that port itself.
Each other process sends a line of JSON about itself, and process 0 answers when all have connected. It then closes the
port, which jax uses afterwards.
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megajax.mesh.gpus import GpuClaim, assign
from megajax.mesh.world import StartError, World, is_loopback, split_address

MESSAGE_BYTES = 4096
"""Maximum length of a line; a longer one is not from a process of a run."""

RETRY_SECONDS = 0.2
HELLO_SECONDS = 2.0
"""How long process 0 waits for the message on a connection."""
LATE_SECONDS = 1.0
"""How long process 0 keeps reporting the error to processes that connect late."""

MAX_NAMED = 8
"""Maximum number of processes that a message names; the rest are counted."""

type Hello = dict[str, Any]


class Place(NamedTuple):
    """What a process learns when all have connected."""

    bind: str = ""
    """The address that jax's service binds in process 0; "" in others."""
    gpus: list[int] | None = None
    """Indices of this process's GPUs among those it sees; None: all of them."""


def meet(world: World, gpus: GpuClaim, *, patience: float, settings: str = "") -> Place:
    """Waits until all processes have connected.

    gpus: the GPUs that this process sees.
    patience: timeout in seconds.
    settings: a value that must be equal in all processes, such as a digest of the config.

    Raises StartError, which names missing processes or the mismatch, or GPUs that do not fit the processes.
    """
    deadline = time.monotonic() + patience
    hello = {
        "megajax": 1,
        "index": world.index,
        "count": world.count,
        "settings": settings,
        "at": f"{socket.gethostname()}, pid {os.getpid()}",
        "gpus": gpus,
    }
    if world.index == 0:
        listener = _listen(world, deadline)
        with listener:
            own_gpus = _gather(world, hello, listener, deadline, patience)
            host, port = listener.getsockname()[:2]
        return Place(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", own_gpus)
    return Place(gpus=_announce(world, hello, deadline, patience))


def _listen(world: World, deadline: float) -> socket.socket:
    """A server socket on the coordinator's address and port."""
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or world.coordinator
    address = split_address(bind)
    if address is None:
        raise StartError(f"JAX_COORDINATOR_BIND_ADDRESS must be ADDRESS:PORT, it is {bind!r}", code=2)
    host, port = address
    addresses = _resolve(host, port, deadline)
    if not is_loopback(host) and all(is_loopback(sockaddr[0]) for _, sockaddr in addresses):
        # Many machines resolve their own name to a loopback address, which other machines can't reach.
        addresses = [(socket.AF_INET, ("0.0.0.0", port))]
    for number, (family, sockaddr) in enumerate(addresses, 1):
        try:
            return socket.create_server(sockaddr[:2], family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(
                    f"port {port} of {host} is in use: another run, or a second process 0. Choose another one with "
                    "--coordinator=HOST:PORT or MEGAJAX_COORDINATOR",
                    code=2,
                ) from error
            if number < len(addresses):
                continue
            raise StartError(
                f"process 0 runs on {socket.gethostname()} and cannot listen at {host}:{port} "
                f"({error.strerror}): the coordinator must be an address of the machine of process 0",
                code=2,
            ) from error
    raise AssertionError("getaddrinfo returned no address")


def _resolve(host: str, port: int, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Addresses of a host. Retries, because a name may not resolve before its machine has started."""
    while True:
        try:
            results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys((family, address) for family, _, _, _, address in results))
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                message = f"the coordinator's host name {host!r} cannot be resolved ({error.strerror})"
                raise StartError(f"{message}: correct --coordinator or MEGAJAX_COORDINATOR", code=2) from error
        time.sleep(RETRY_SECONDS)


def _gather(world: World, root: Hello, listener: socket.socket, deadline: float, patience: float) -> list[int] | None:
    """Process 0: waits for all others and answers them with their GPUs. -> its own GPUs.

    On an error, reports it to all, then raises StartError.
    """
    arrived: dict[int, tuple[socket.socket, Hello]] = {}
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        try:
            for connection, hello in _hellos(listener, deadline):
                connections.append(stack.enter_context(connection))
                if (objection := _objection(hello, root, arrived)) is not None:
                    raise StartError(objection, code=2)
                arrived[hello["index"]] = connection, hello
                if len(arrived) == world.count - 1:
                    arrived = {index: arrival for index, arrival in arrived.items() if not _closed(arrival[0])}
                if len(arrived) == world.count - 1:
                    break
            else:
                missing = set(range(1, world.count)) - arrived.keys()
                raise StartError(
                    f"{name_processes(missing)} of {world.count} did not connect to {world.coordinator} within "
                    f"{patience:g} s: check that they were started, and read their own messages",
                    code=1,
                )
            shares = assign({0: root["gpus"]} | {index: hello["gpus"] for index, (_, hello) in sorted(arrived.items())})
            if isinstance(shares, str):
                raise StartError(shares, code=2)
        except StartError as error:
            answer = {"error": str(error).removeprefix("megajax: "), "code": error.code}
            for connection in connections:
                _say(connection, answer)
            for connection, _ in _hellos(listener, time.monotonic() + LATE_SECONDS):
                _say(stack.enter_context(connection), answer)
            raise
        for index, (connection, _) in arrived.items():
            _say(connection, {"go": True, "gpus": shares[index]})
        return shares[0]


def _hellos(listener: socket.socket, deadline: float) -> Iterator[tuple[socket.socket, Hello]]:
    """Connections until the deadline, with the messages on them; those without a valid message are closed."""
    while (remaining := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            hello = None
            with contextlib.suppress(OSError):
                connection.settimeout(min(remaining, HELLO_SECONDS))
                hello = _parse(connection.makefile("rb").readline(MESSAGE_BYTES))
            if hello is None:
                connection.close()
            else:
                yield connection, hello


def _objection(hello: Hello, root: Hello, arrived: Mapping[int, tuple[socket.socket, Hello]]) -> str | None:
    """Why a process does not belong to the run; None if it does. root: the message of process 0."""
    index, count, place, root_place = hello["index"], hello["count"], hello["at"], root["at"]
    if count != root["count"]:
        counts = f"{count} processes, process 0 ({root_place}) of {root['count']}"
        return f"process {index} ({place}) was started as one of {counts}"
    if not 0 <= index < count:
        return f"a process ({place}) claims index {index} of {count} processes"
    # A launcher may have restarted a process that has ended.
    if index == 0 or (index in arrived and not _closed(arrived[index][0])):
        other_place = root_place if index == 0 else arrived[index][1]["at"]
        return f"two processes claim to be process {index}: on {other_place} and on {place}"
    if hello["settings"] != root["settings"]:
        return (
            f"process {index} ({place}) and process 0 ({root_place}) have different settings: give all processes the "
            "same config file and command line"
        )
    return None


def _say(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(1.0)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _closed(connection: socket.socket) -> bool:
    """Whether the other end has closed."""
    connection.settimeout(0)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _parse(line: bytes) -> Hello | None:
    """The message of a process about itself; None if it is not one."""
    try:
        hello = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"megajax": int, "index": int, "count": int, "settings": str, "at": str}
    valid = isinstance(hello, dict) and all(type(hello.get(name)) is kind for name, kind in kinds.items())
    # The place may be printed on a terminal.
    if not valid or not hello["at"].isprintable() or (gpus := GpuClaim.read(hello.get("gpus"))) is None:
        return None
    return hello | {"gpus": gpus}


def _announce(world: World, hello: Hello, deadline: float, patience: float) -> list[int] | None:
    """Sends this process's message to process 0 until it answers. -> this process's GPUs."""
    address = split_address(world.coordinator)
    assert address is not None, "find_world gives no other"
    host, port = address
    _resolve(host, port, deadline)
    reason = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(remaining, 10.0)) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0 answers at its own deadline, which may be slightly later than this one's.
                connection.settimeout(remaining + 2.0)
                with connection.makefile("rb") as answers:
                    answer = answers.readline(MESSAGE_BYTES)
                if answer.endswith(b"\n"):
                    return _obey(answer, world)
                reason = "no answer from a process 0 there"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(RETRY_SECONDS, max(deadline - time.monotonic(), 0)))
    raise StartError(
        f"process {world.index} found no process 0 at {world.coordinator} within {patience:g} s ({reason})", code=1
    )


def _obey(line: bytes, world: World) -> list[int] | None:
    try:
        answer = json.loads(line)
        if answer.get("go") is True:
            gpus = answer["gpus"]
            return None if gpus is None else [int(index) for index in gpus]
        error, code = answer["error"], answer["code"]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        error, code = "", 2
    if not isinstance(error, str) or not error.isprintable() or not error or code not in (1, 2):
        raise StartError(f"the server at {world.coordinator} is not process 0 of a run", code=2)
    raise StartError(error, code=code, reported=True)


def name_processes(indices: set[int]) -> str:
    """process 3; processes 1, 2 and 5; processes 1, 2, … 8 and 40 more."""
    numbers = [str(index) for index in sorted(indices)]
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    if len(numbers) > MAX_NAMED:
        return f"processes {', '.join(numbers[:MAX_NAMED])} and {len(numbers) - MAX_NAMED} more"
    return f"processes {', '.join(numbers[:-1])} and {numbers[-1]}"
