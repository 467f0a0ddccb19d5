"""Connecting and disconnecting the processes of a run, after a rendezvous of all that reports missing, duplicate and
unequal ones.

jax's own initialisation aborts every process without naming the missing ones, lets two processes with the same index
replace each other, and accepts processes of another run on its port. So process 0 first listens on that port itself
(see `rendezvous_process_zero`). Each other process sends a line of JSON about itself, and process 0 answers when all
have connected. It then closes the port, which jax uses afterwards.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from megajax.processes.gpus import GpuClaim, installed_gpus, set_nccl_variables, visible_gpus
from megajax.processes.must_be_equal import Identity
from megajax.processes.rendezvous_process_zero import MESSAGE_BYTES, PROTOCOL, Gathering
from megajax.processes.world import StartError, World, find_world, is_loopback, split_address
from megajax.processes.xla_options import CPU_PATIENCE, add_flags

RETRY_SECONDS = 0.2
RESOLVE_SECONDS = 30.0
"""How long a host name may fail to resolve. In Kubernetes, where a name exists only once its pod has started, this is
the timeout of the whole start."""
REFUSED_SECONDS = 1.0
"""Pause before the next attempt after process 0 of another run has answered."""
HEARTBEAT_SECONDS = 300
"""Minimum time without a heartbeat until jax ends all processes: one that pins host memory sends none for minutes."""
_CONNECT_SECONDS = 60.0
"""Minimum time for jax to connect processes that have all started."""


def start(
    *, patience: float = 300.0, identity: Callable[[], Identity] = dict, devices: Path = Path("/dev")
) -> World | None:
    """Connects this process with the others of its run. Call it before any other use of jax's devices.

    Returns None for a single process. patience: timeout in seconds for all processes to start. identity: returns
    what must be equal in all processes. devices: folder of device files. Raises StartError, which names missing
    processes, and those that differ.
    """
    world, visible = find_world(), visible_gpus(os.environ, installed_gpus(devices))
    on_cpu = jax.config.jax_platforms == "cpu" or not (jax.config.jax_platforms or visible)
    visible = () if on_cpu else visible
    if world is None:
        set_nccl_variables(len(visible), processes=1)
        return None
    # MegaJAX handles SIGTERM itself; the runtime's handler would replace it.
    jax.config.update("jax_enable_preemption_service", False)
    if on_cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        add_flags(CPU_PATIENCE)
    claim = GpuClaim.of(world, visible)
    place = meet(world, claim, patience=patience, identity=identity())
    set_nccl_variables(len(claim.gpus if place.gpus is None else place.gpus), processes=world.count)
    jax.distributed.initialize(
        world.coordinator,
        world.count,
        world.index,
        local_device_ids=place.gpus,
        # jax's cluster detection gives every process one device, even if it is the only process of its machine.
        cluster_detection_method="deactivate",
        coordinator_bind_address=place.bind or None,
        initialization_timeout=int(max(patience, _CONNECT_SECONDS)),
        heartbeat_timeout_seconds=int(max(patience, HEARTBEAT_SECONDS)),
    )
    return world


def finish() -> None:
    """Waits for all processes, then disconnects them. Call it after closing all logs.

    Otherwise the first process to exit terminates the others.
    """
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


class Membership(NamedTuple):
    """What a process learns when all have connected."""

    bind: str = ""
    """The address that jax's service binds in process 0; "" in others."""
    gpus: list[int] | None = None
    """Indices of this process's GPUs among those it sees; None: all of them."""


def meet(world: World, gpus: GpuClaim, *, patience: float, identity: Identity) -> Membership:
    """Waits until all processes have connected.

    gpus: the GPUs that this process sees. patience: timeout in seconds. identity: what must be equal in all processes.

    Raises StartError, which names missing processes, differences, or GPUs that do not fit the processes.
    """
    deadline = time.monotonic() + patience
    hello = {
        "megajax": PROTOCOL,
        "token": world.token,
        "index": world.index,
        "count": world.count,
        "at": f"{socket.gethostname()}, pid {os.getpid()}",
        "gpus": gpus,
        "identity": identity,
    }
    if world.index == 0:
        with _listen(world, deadline) as listener, Gathering(world, hello, listener, patience) as gathering:
            own_gpus = gathering.wait(deadline)
            host, port = listener.getsockname()[:2]
        return Membership(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", own_gpus)
    return Membership(gpus=_announce(world, hello, deadline, patience))


def _listen(world: World, deadline: float) -> socket.socket:
    """A server socket on the coordinator's address and port."""
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or world.coordinator
    address = split_address(bind)
    if address is None:
        raise StartError(f"JAX_COORDINATOR_BIND_ADDRESS must be ADDRESS:PORT, it is {bind!r}", code=2)
    host, port = address
    addresses = _resolve(world, host, port, deadline)
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
                    code=_mistake(world),
                ) from error
            if number < len(addresses):
                continue
            raise StartError(
                f"process 0 runs on {socket.gethostname()} and cannot listen at {host}:{port} "
                f"({error.strerror}): the coordinator must be an address of the machine of process 0",
                code=2,
            ) from error
    raise AssertionError("getaddrinfo returned no address")


def _mistake(world: World) -> int:
    """Exit code if another program is at the coordinator's port: a launcher that gives a token takes another port."""
    return 1 if world.token else 2


def _resolve(world: World, host: str, port: int, deadline: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Addresses of a host. The first failure is printed at once, and retried: a resolver may fail for a while."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        deadline = min(deadline, time.monotonic() + RESOLVE_SECONDS)
    warned = bool(world.local_index)  # one process of a machine prints it
    while True:
        try:
            results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys((family, address) for family, _, _, _, address in results))
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            message = (
                f"the coordinator's host name {host!r} cannot be resolved on {socket.gethostname()} "
                f"({why}), so nobody reaches its port {port}: set --coordinator=ADDRESS:{port} or "
                f"MEGAJAX_COORDINATOR=ADDRESS:{port} in all processes, with an IP address of the machine of process 0"
            )
            if (remaining := deadline - time.monotonic()) < RETRY_SECONDS:
                raise StartError(message, code=1) from error
            if not warned:
                print(f"warning: {message}; retrying for {remaining:.0f} s", file=sys.stderr, flush=True)
            warned = True
        time.sleep(RETRY_SECONDS)


def _announce(world: World, hello: dict[str, Any], deadline: float, patience: float) -> list[int] | None:
    """Sends this process's message to process 0 until it answers. -> this process's GPUs."""
    address = split_address(world.coordinator)
    assert address is not None, "find_world gives no other"
    _resolve(world, *address, deadline)
    line = json.dumps(hello).encode() + b"\n"
    reason = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        pause = RETRY_SECONDS
        try:
            with socket.create_connection(address, timeout=min(remaining, 10.0)) as connection:
                connection.sendall(line)
                # Process 0 answers at its own deadline, which may be slightly later than this one's.
                connection.settimeout(remaining + 2.0)
                with connection.makefile("rb") as answers:
                    answer = answers.readline(MESSAGE_BYTES)
                if answer.endswith(b"\n"):
                    return _obey(answer, world)
                reason = "no answer from a process 0 there"
        except _OtherRunError as error:
            reason, pause = str(error), REFUSED_SECONDS
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
    raise StartError(
        f"found no process 0 at {world.coordinator} within {patience:g} s ({reason}): check that it was started and "
        "can be reached there",
        code=1,
    )


class _OtherRunError(Exception):
    """Process 0 of another run is at the coordinator's address."""


def _obey(line: bytes, world: World) -> list[int] | None:
    """Follows the answer of process 0, that all have connected. -> this process's GPUs.

    Raises StartError for an error, and _OtherRunError.
    """
    try:
        answer = json.loads(line)
        if answer.get("go") is True:
            gpus = answer["gpus"]
            return None if gpus is None else [int(index) for index in gpus]
        text, code, reported = (answer[name] for name in ("error", "code", "reported"))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        text, code, reported = "", 0, True
    if not isinstance(text, str) or not text.isprintable() or not text or code not in (0, 1, 2):
        raise StartError(f"the server at {world.coordinator} is not process 0 of a run", code=_mistake(world))
    if code == 0:
        raise _OtherRunError(text)
    raise StartError(text, code=code, reported=bool(reported))
