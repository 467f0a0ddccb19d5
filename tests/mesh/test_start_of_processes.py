"""Processes meet before jax connects them: here in threads, each with a socket of its own."""

import json
import os
import socket
import threading
import time

import jax
import numpy as np
import pytest

from megajax.mesh.config import ParallelConfig
from megajax.mesh.gpus import GpuClaim
from megajax.mesh.mesh import build_mesh
from megajax.mesh.processes import StopFlags, start
from megajax.mesh.rendezvous import Place, meet, name_processes
from megajax.mesh.world import StartError, World


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


NO_GPUS = GpuClaim("here")


class Meeting:
    """Processes that come to one meeting; what became of each."""

    def __init__(self, patience: float = 20.0):
        self.port, self.patience = free_port(), patience
        self.threads: list[threading.Thread] = []
        self.outcomes: list[tuple[int, object]] = []

    def join(
        self, index: int, count: int, settings: str = "same", host: str = "127.0.0.1", gpus: GpuClaim = NO_GPUS
    ) -> None:
        def body() -> None:
            try:
                world = World(count, index, f"{host}:{self.port}")
                outcome: object = meet(world, gpus, patience=self.patience, settings=settings)
            except StartError as error:
                outcome = error
            self.outcomes.append((index, outcome))

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def results(self) -> list[tuple[int, object]]:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        return sorted(self.outcomes, key=lambda outcome: outcome[0])

    def errors(self, code: int, *texts: str) -> list[tuple[int, StartError]]:
        """All of them fail with this code, and process 0 with these words; the others do not repeat them."""
        errors = [(index, error) for index, error in self.results() if isinstance(error, StartError)]
        assert len(errors) == len(self.threads)
        first = next(error for index, error in errors if index == 0)
        for word in texts:
            assert word in str(first), str(first)
        assert str(first).startswith("megajax: ") and "\n" not in str(first)
        assert all(error.code == code for _, error in errors)
        assert [error.reported for index, error in errors] == [index != 0 for index, _ in errors]
        return errors


def test_all_processes_connect_and_the_port_is_freed():
    meeting = Meeting()
    for index in (3, 1, 0, 2):
        meeting.join(index, 4)
    assert meeting.results() == [(0, Place(f"127.0.0.1:{meeting.port}")), (1, Place()), (2, Place()), (3, Place())]
    socket.create_server(("127.0.0.1", meeting.port)).close()


def test_missing_processes_are_named():
    meeting = Meeting(patience=1.0)
    meeting.join(0, 5)
    meeting.join(2, 5)
    meeting.errors(1, "processes 1, 3 and 4 of 5 did not connect to", f":{meeting.port} within 1 s")


def test_many_missing_are_counted():
    assert name_processes({1}) == "process 1"
    assert name_processes({5, 1}) == "processes 1 and 5"
    assert name_processes(set(range(1, 60))) == "processes 1, 2, 3, 4, 5, 6, 7, 8 and 51 more"


def test_duplicate_process_ids():
    meeting = Meeting()
    for index in (0, 1, 1):
        meeting.join(index, 3)
    meeting.errors(2, "two processes claim to be process 1: on ", f"{socket.gethostname()}, pid {os.getpid()}")


def test_a_wrong_number_of_processes():
    meeting = Meeting()
    meeting.join(0, 3)
    meeting.join(1, 4)
    meeting.errors(2, "process 1 (", "was started as one of 4 processes, process 0 (", "of 3")


def test_other_settings():
    meeting = Meeting()
    meeting.join(0, 2)
    meeting.join(1, 2, settings="other")
    meeting.errors(2, "process 1 (", "have different settings", "the same config file and command line")


def test_late_processes_get_the_error_too():
    meeting = Meeting()
    for index in (0, 1, 1):
        meeting.join(index, 4)
    time.sleep(0.5)
    meeting.join(3, 4)
    meeting.errors(2, "two processes claim to be process 1")


def test_a_port_in_use():
    meeting = Meeting()
    with socket.create_server(("127.0.0.1", meeting.port)):
        meeting.join(0, 2)
        meeting.errors(2, f"port {meeting.port} of 127.0.0.1 is in use")


def test_a_coordinator_on_another_machine_than_process_0():
    meeting = Meeting()
    meeting.join(0, 2, host="203.0.113.7")
    meeting.errors(2, f"process 0 runs on {socket.gethostname()}", "203.0.113.7", "an address of the machine")


@pytest.mark.parametrize("index", [0, 1])
def test_an_unknown_host(index, monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StartError, match=r"'nowhere' cannot be resolved .*Name or service not known") as error:
        meet(World(2, index, "nowhere:4000"), NO_GPUS, patience=0.5)
    assert error.value.code == 2


def test_nobody_at_the_coordinator():
    port = free_port()
    began = time.monotonic()
    with pytest.raises(StartError, match=rf"process 1 found no process 0 at 127.0.0.1:{port} within 1 s") as error:
        meet(World(2, 1, f"127.0.0.1:{port}"), NO_GPUS, patience=1.0)
    assert error.value.code == 1 and not error.value.reported
    assert time.monotonic() - began < 30


def test_a_foreign_server_at_the_coordinators_address():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b'{"error": "\\u001b[31m", "code": 1}\n')

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StartError, match="is not process 0 of a run"):
            meet(World(2, 1, f"127.0.0.1:{server.getsockname()[1]}"), NO_GPUS, patience=5)


def test_foreign_connections_are_ignored():
    """Half a line, noise, and one that came and went are not the process that is awaited."""
    meeting = Meeting()
    meeting.join(0, 3)
    strangers = []
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 10_000,
        b'{"megajax": 1',
        b'{"megajax": 1, "index": "1"}\n',
        b"[]\n",
    ):
        for _ in range(100):
            try:
                stranger = socket.create_connection(("127.0.0.1", meeting.port), timeout=5)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        stranger.sendall(noise)
        strangers.append(stranger)
    connection = socket.create_connection(("127.0.0.1", meeting.port), timeout=5)
    hello = {"megajax": 1, "index": 1, "count": 3, "settings": "same", "at": "x", "gpus": NO_GPUS}
    with connection:
        connection.sendall(json.dumps(hello).encode() + b"\n")
    meeting.join(1, 3)
    meeting.join(2, 3)
    assert meeting.results()[0] == (0, Place(f"127.0.0.1:{meeting.port}"))
    for stranger in strangers:
        stranger.close()


def test_all_processes_learn_their_gpus():
    """Two machines: the processes of the first divide four GPUs, those of the second have two of their own each."""
    meeting = Meeting()
    for index in range(2):
        meeting.join(index, 4, gpus=GpuClaim("one", ("0", "1", "2", "3"), None, False, index, 2))
        meeting.join(2 + index, 4, gpus=GpuClaim("two", (("0", "1"), ("2", "3"))[index], None, False, index, 2))
    assert [place.gpus for _, place in meeting.results()] == [[0, 1], [2, 3], None, None]


def test_too_few_gpus_are_said_by_all_processes_at_once():
    meeting = Meeting()
    for index in range(3):
        meeting.join(index, 3, gpus=GpuClaim("one a1b2", ("0", "1"), None, False, index, 3))
    meeting.errors(2, "one has 3 processes and 2 visible GPUs", "start 1 or 2 there", "CUDA_VISIBLE_DEVICES")


def test_a_single_process_starts_nothing(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MEGAJAX_", "SLURM_", "OMPI_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    assert start() is None
    assert not jax.distributed.is_initialized()


def test_there_is_one_flag_per_device_created_once():
    mesh = build_mesh(ParallelConfig(data=4, tensor=2))
    flags = StopFlags(mesh)
    assert flags(False) is flags(False)
    for flag in (False, True):
        array = flags(flag)
        assert [shard.data.shape for shard in array.addressable_shards] == [(1,)] * 8
        np.testing.assert_array_equal(array, np.full(8, flag, np.int32))
