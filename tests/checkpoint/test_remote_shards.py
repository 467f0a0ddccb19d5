"""Sets are read over TCP only by processes with the secret, only if they are offered, and are verified on arrival."""

import json
import socket
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from local_sets import damage, pack_of
from user_errors import user_error

from megajax.checkpoint.local import remote_shards
from megajax.checkpoint.local.remote_shards import (
    MOST_WAITING,
    REQUEST_BYTES,
    Members,
    OwnAddress,
    RemoteSet,
    SetServer,
    own_address,
)
from megajax.checkpoint.local.shard_set import LocalSet, SetInfo, SetWriter, complete_parts, shards_of_processes
from megajax.checkpoint.manifest import Damaged, entry_of
from megajax.checkpoint.pack_writer import copy_to_host
from megajax.checkpoint.step_folders import META
from megajax.checkpoint.zarr_reader import StoredArrays

SECRET = b"s" * 32
BOX = (slice(0, 3), slice(4, 8))
VALUES = np.arange(24, dtype=np.float32).reshape(3, 8)


@pytest.fixture
def a_set(tmp_path) -> LocalSet:
    writer = SetWriter(tmp_path / "00000007.saving")
    descriptions, shards = copy_to_host({"w": jnp.asarray(VALUES), "n": jnp.int32(5)}, once=False)
    writer.append(0, descriptions, shards.items())
    info = SetInfo(step=7, save="a-1", process=0, attempt="a", processes=2, parts=(0,), meta={"rows": [[0, 2]]})
    writer.finish(info)
    return writer.rename(tmp_path / "00000007")


@pytest.fixture
def server(a_set):
    served = SetServer("127.0.0.1", SECRET, {"a-1/0": a_set}.get)
    yield served
    served.close()


def test_a_set_is_read_from_another_process(server, a_set):
    with RemoteSet(server.address, SECRET, "a-1/0") as remote:
        assert remote.info == a_set.info and remote.info.id == "a-1/0"
        assert np.array_equal(remote.arrays.read("w", BOX), VALUES[BOX])
        assert remote.arrays.value("n") == 5


def test_without_the_secret_nothing_is_sent(server):
    with pytest.raises(ConnectionError):
        RemoteSet(server.address, b"t" * 32, "a-1/0")
    with socket.create_connection(server.address, timeout=100) as stranger:
        assert len(stranger.recv(32)) == 32
        stranger.sendall(b"\0" * 32)
        assert stranger.recv(1) == b""


def test_the_error_for_a_missing_set_or_file_names_it(server):
    with pytest.raises(Damaged, match="this process has no set b-1/0"):
        RemoteSet(server.address, SECRET, "b-1/0")
    with RemoteSet(server.address, SECRET, "a-1/0") as remote:
        for name, start, stop in (("/etc/passwd", 0, 9), (META, 0, 2**20), (META, -1, 1)):
            with pytest.raises(Damaged, match=f"of this process has no bytes {start} to {stop} of {name}"):
                remote.read(name, start, stop)
        assert np.array_equal(remote.arrays.read("w", BOX), VALUES[BOX])  # the connection goes on


def test_an_oversized_request_ends_the_connection(server):
    with RemoteSet(server.address, SECRET, "a-1/0") as remote:
        remote._connection.sendall(struct.pack(">I", REQUEST_BYTES + 1))
        with pytest.raises(ConnectionError):
            remote.arrays.read("w", BOX)


def test_the_oldest_silent_connections_are_closed_for_a_process_of_the_run(server, a_set):
    threads = threading.active_count()
    silent = [socket.create_connection(server.address, timeout=100) for _ in range(3 * MOST_WAITING)]
    try:
        with RemoteSet(server.address, SECRET, "a-1/0") as remote:
            assert remote.arrays.value("n") == 5
            assert len(server._waiting) <= MOST_WAITING and threading.active_count() <= threads + 1
        for oldest in silent[:MOST_WAITING]:
            assert oldest.recv(32)
            assert oldest.recv(1) == b""
    finally:
        for connection in silent:
            connection.close()


def test_a_late_proof_ends_the_connection(server, monkeypatch):
    monkeypatch.setattr(remote_shards, "HELLO_SECONDS", 0.0)
    with socket.create_connection(server.address, timeout=100) as silent:
        assert len(silent.recv(32)) == 32 and silent.recv(1) == b""


WITHOUT_DESCRIPTORS = """
import os, resource, socket, sys
from pathlib import Path
from megajax.checkpoint.local import remote_shards
from megajax.checkpoint.local.shard_set import LocalSet
a_set, secret, remote_shards.TIMEOUT_SECONDS = LocalSet.open(Path(sys.argv[1])), b"s" * 32, 20.0
server, clients, others = remote_shards.SetServer("127.0.0.1", secret, {"a-1/0": a_set}.get), [socket.socket()], []
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
try:
    while True:
        others.append(os.dup(0))
except OSError as error:
    print(error.strerror)
clients[0].settimeout(1)
clients[0].connect(server.address)
try:
    clients[0].recv(1)  # the server cannot accept the connection
except TimeoutError:
    print("silence")
for other in others:
    os.close(other)
with remote_shards.RemoteSet(server.address, secret, "a-1/0") as remote:
    print(remote.arrays.value("n"))
"""


def test_the_server_survives_a_lack_of_file_descriptors(a_set):
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(a_set.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n")[:3] == ["Too many open files", "silence", "5"], done.stderr


def test_an_answer_of_another_program_ends_the_connection(a_set):
    """Its first bytes would be the size of an array of 10**18 bytes."""

    def answer() -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(b"n" * 32)
            client.recv(32)
            client.sendall(b"HTTP/1.1 400 Bad Request")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match=r"at most .* were expected"):
            RemoteSet(listener.getsockname()[:2], SECRET, "a-1/0")
        thread.join(100)


def test_damage_at_the_sender_is_found_by_the_receiver(server, a_set):
    damage(a_set.path / pack_of(0))
    with (
        RemoteSet(server.address, SECRET, "a-1/0") as remote,
        pytest.raises(Damaged, match=r"process_0/00000\.bin: sha256"),
    ):
        remote.arrays.read("w", BOX)


@pytest.mark.parametrize("change", [lambda document: document.pop("parts"), lambda document: document.update(other=1)])
def test_metadata_of_another_form_is_damage(a_set, change):
    document = json.loads((a_set.path / META).read_bytes())
    change(document)
    (a_set.path / META).write_text(json.dumps(document))
    with pytest.raises(Damaged, match=r"meta\.json: "):
        LocalSet.open(a_set.path)
    entries = a_set.arrays.files.entries | {META: entry_of(json.dumps(document).encode())}
    with pytest.raises(Damaged, match=r"meta\.json can't be read"):
        SetInfo.read(StoredArrays(a_set.path, entries))


def test_the_own_address_is_loopback_for_a_local_coordinator():
    loopback = OwnAddress("127.0.0.1", "127.0.0.1")
    assert own_address("127.0.0.1:1234") == own_address("localhost:1234") == own_address(None) == loopback


@pytest.mark.parametrize("resolved", ["127.0.1.1", "127.0.0.1"])
def test_a_machine_whose_name_is_loopback_to_itself_is_reached_by_its_name(resolved, monkeypatch):
    """Debian writes it into /etc/hosts; other machines resolve the name to an address of the network."""
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (resolved, 1234))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    bind, host = own_address("node1:1234")
    assert (bind, host) == ("0.0.0.0", "node1")


class Device:
    def __init__(self, process: int):
        self.process_index = process


class Sharding:
    """Rows over the devices of processes; `copies` devices have the same."""

    def __init__(self, processes: list[int], copies: int = 1):
        self.devices, self.copies = [Device(process) for process in processes], copies

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
        rows = shape[0] * self.copies // len(self.devices)
        starts = [number // self.copies * rows for number in range(len(self.devices))]
        return {device: (slice(start, start + rows),) for device, start in zip(self.devices, starts, strict=True)}


class Leaf(SimpleNamespace):
    shape: tuple[int, ...]
    sharding: Any


def test_shards_of_each_process_and_complete_parts():
    def shards(copies: int) -> dict[int, frozenset]:
        return shards_of_processes({"w": Leaf(shape=(8,), sharding=Sharding([0, 0, 1, 1], copies))})

    spread = shards(1)
    assert spread[1] == {("w", (slice(4, 6),)), ("w", (slice(6, 8),))}
    assert complete_parts(spread[0], spread) == (0,) and complete_parts(spread[0] | spread[1], spread) == (0, 1)
    copied = shards(4)  # data parallel: every process has everything
    assert complete_parts(copied[1], copied) == (0, 1)


class FakeMembers(Members):
    """One of four processes, without a server."""

    def __init__(self, process: int, machines: str):
        self.process, self._machines = process, dict(enumerate(machines))


@pytest.mark.parametrize(
    ("machines", "sources"), [("aabb", [2, 3, 0, 1]), ("abcd", [1, 2, 3, 0]), ("aaaa", [1, 2, 3, 0])]
)
def test_replicas_are_on_another_machine_where_there_is_one(machines, sources):
    assert [FakeMembers(process, machines).sources(1, None)[0] for process in range(4)] == sources
    assert FakeMembers(0, machines).sources(2, 1) == [1, 2] and FakeMembers(0, machines).sources(0, None) == []


def test_replicas_that_would_be_on_their_own_process_are_refused():
    with user_error("checkpoint.local.replicas"):
        FakeMembers(0, "abcd").demand_replicas(1, 4)
    with user_error("checkpoint.local.replicas"):
        FakeMembers(0, "abcd").demand_replicas(4, 1)
    FakeMembers(0, "abcd").demand_replicas(3, 1)


def test_the_first_process_of_a_machine_owns_sets_of_a_process_that_has_moved():
    first, second = FakeMembers(2, "bbaa").has_other_owner(), FakeMembers(3, "bbaa").has_other_owner()
    assert [number for number in range(6) if not first(number)] == [0, 1, 2, 4, 5]
    assert [number for number in range(6) if not second(number)] == [3]
