"""Processes meet before jax connects them: here as threads, each with its own socket."""

import errno
import json
import os
import socket
import threading
import time

import jax
import numpy as np
import pytest
from user_errors import user_error

from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.named_shardings import each_process
from megajax.processes.gpus import GpuClaim
from megajax.processes.identity import IdentitySection, section
from megajax.processes.must_be_equal import name_processes
from megajax.processes.start import Membership, meet, start
from megajax.processes.world import StartError, World


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


NO_GPUS = GpuClaim("here")


def identity(seed: int = 0) -> dict[str, IdentitySection]:
    return {"versions": section({"jax": "1"}), "settings": section({"seed": str(seed), "steps": "9"})}


def hello(index: int, count: int, seed: int = 0, token: str = "") -> bytes:
    """The message of a process."""
    fields = {"megajax": 2, "token": token, "index": index, "count": count, "at": "x", "identity": identity(seed)}
    fields["gpus"] = NO_GPUS
    return json.dumps(fields).encode() + b"\n"


def connect(port: int) -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    deadline = time.monotonic() + 100
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=100)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("megajax.processes.rendezvous_process_zero.DIFFERENCE_SECONDS", 1.0)


class Meeting:
    """Processes that join one meeting, and their outcomes."""

    def __init__(self, patience: float = 100.0):
        self.port, self.patience = free_port(), patience
        self.threads: list[threading.Thread] = []
        self.outcomes: list[tuple[int, object]] = []

    def join(
        self, index: int, count: int, seed: int = 0, host: str = "127.0.0.1", gpus: GpuClaim = NO_GPUS, token: str = ""
    ) -> None:
        def body() -> None:
            try:
                world = World(count, index, f"{host}:{self.port}", token=token)
                outcome: object = meet(world, gpus, patience=self.patience, identity=identity(seed))
            except StartError as error:
                outcome = error
            self.outcomes.append((index, outcome))

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def results(self) -> list[tuple[int, object]]:
        for thread in self.threads:
            thread.join(100)
            assert not thread.is_alive()
        return sorted(self.outcomes, key=lambda outcome: outcome[0])

    def errors(self, code: int, *texts: str) -> list[tuple[int, StartError]]:
        """All of them fail with this code, and process 0 with this message; the others do not repeat it."""
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
    assert meeting.results() == [
        (0, Membership(f"127.0.0.1:{meeting.port}")),
        (1, Membership()),
        (2, Membership()),
        (3, Membership()),
    ]
    socket.create_server(("127.0.0.1", meeting.port)).close()


def test_missing_processes_are_named():
    meeting = Meeting(patience=2.0)
    meeting.join(0, 5)
    meeting.join(2, 5)
    meeting.errors(1, "processes 1, 3 and 4 of 5 did not connect to", f":{meeting.port} within 2 s")


def test_many_missing_are_counted():
    assert name_processes({1}) == "process 1"
    assert name_processes({5, 1}) == "processes 1 and 5"
    assert name_processes(set(range(1, 60))) == "processes 1, 2, 3, 4, 5, 6, 7, 8 and 51 more"


def test_duplicate_process_ids():
    meeting = Meeting()
    for index in (0, 1, 1):
        meeting.join(index, 3, token="t")
    meeting.errors(2, "both claim to be process 1", f"{socket.gethostname()}, pid {os.getpid()}")


def test_a_wrong_number_of_processes():
    meeting = Meeting()
    meeting.join(0, 3, token="t")
    meeting.join(1, 4, token="t")
    meeting.errors(2, "process 1 (", "was started as one of 4 processes, process 0 (", "as one of 3")


@pytest.mark.parametrize("token", ["", "t"])
def test_other_settings(token):
    """Complete, so all messages are certainly of this run."""
    meeting = Meeting()
    for index in range(5):
        meeting.join(index, 5, seed=(0, 0, 3, 3, 4)[index], token=token)
    meeting.errors(
        2,
        "processes 2 and 3 (the first on",
        ") differ from process 0 (",
        "in settings: seed 3 (process 0: 0); give all processes the same config file and command line",
        "process 4 (",
        ") differs from process 0 (",
        "in settings: seed 4 (process 0: 0)",
    )


@pytest.mark.parametrize(("token", "code"), [("", 1), ("t", 2)])
def test_differences_before_all_have_connected(token, code):
    """Reported long before the limit of missing processes; retried, because it may be a process of another run."""
    meeting = Meeting(patience=300)
    meeting.join(0, 3, token=token)
    meeting.join(1, 3, seed=1, token=token)
    meeting.errors(code, "process 1 (", "in settings: seed 1 (process 0: 0)")


def test_a_difference_is_forgotten_when_its_process_ends():
    meeting = Meeting()
    meeting.join(0, 3)
    with connect(meeting.port) as former:
        former.sendall(hello(1, 3, seed=5))
        meeting.join(2, 3)
    meeting.join(1, 3)
    assert meeting.results() == [(0, Membership(f"127.0.0.1:{meeting.port}")), (1, Membership()), (2, Membership())]


def test_a_run_starts_despite_a_stranger_that_claims_a_place():
    """A stranger without a token is told as soon as all processes of the run have connected."""
    meeting = Meeting()
    meeting.join(0, 2)
    with connect(meeting.port) as stranger:
        stranger.sendall(hello(1, 2, seed=5))
        meeting.join(1, 2)
        assert meeting.results() == [(0, Membership(f"127.0.0.1:{meeting.port}")), (1, Membership())]
        answer = json.loads(stranger.makefile().readline())
    assert answer["code"] == 1 and "without this process: differs from process 0" in answer["error"]


def test_processes_of_another_start_are_ignored(capfd):
    """They may be of an earlier attempt, and have other settings, another count, or a place of this run."""
    meeting = Meeting()
    meeting.join(0, 3, token="second")
    strangers = [connect(meeting.port) for _ in range(6)]
    for stranger, message in zip(
        strangers, (hello(1, 3, token="first"), hello(1, 9), hello(2, 3, 5, "first")) * 2, strict=True
    ):
        stranger.sendall(message)
        answer = json.loads(stranger.makefile().readline())
        assert answer["code"] == 0 and "another run" in answer["error"]
    for index in (1, 2):
        meeting.join(index, 3, token="second")
    assert meeting.results() == [(0, Membership(f"127.0.0.1:{meeting.port}")), (1, Membership()), (2, Membership())]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and all("a process of another run (x)" in line for line in lines)
    for stranger in strangers:
        stranger.close()


def test_a_process_waits_until_its_own_process_0_listens():
    """While an earlier attempt still holds the port, it asks again."""
    meeting = Meeting()
    with socket.create_server(("127.0.0.1", meeting.port)) as former:
        meeting.join(1, 2, token="second")
        connection, _ = former.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(b'{"error": "process 0 of another run is there", "code": 0, "reported": false}\n')
    meeting.join(0, 2, token="second")
    assert meeting.results() == [(0, Membership(f"127.0.0.1:{meeting.port}")), (1, Membership())]


def test_many_silent_connections_keep_no_process_out(monkeypatch):
    monkeypatch.setattr("megajax.processes.rendezvous_process_zero.MAX_SILENT", 40)
    meeting = Meeting(patience=100)
    meeting.join(0, 4)
    strangers = [connect(meeting.port) for _ in range(60)]
    for number, stranger in enumerate(strangers):
        if number % 3:
            stranger.sendall(b'{"megajax": 2' if number % 2 else b"\xff" * 5000)
    began = time.monotonic()
    for index in (1, 2, 3):
        meeting.join(index, 4)
    assert len(meeting.results()) == 4 and not any(isinstance(outcome, StartError) for _, outcome in meeting.results())
    # One after another, with two seconds for each, they took 120 s.
    assert time.monotonic() - began < 100
    for stranger in strangers:
        stranger.close()


def test_no_file_descriptors_left(monkeypatch):
    """Process 0 closes silent connections, and continues."""
    accept, failures = socket.socket.accept, iter(range(3))
    meeting = Meeting(patience=100)
    meeting.join(0, 2)
    silent = connect(meeting.port)

    def failing(listener: socket.socket):
        for _ in failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    meeting.join(1, 2)
    assert meeting.results() == [(0, Membership(f"127.0.0.1:{meeting.port}")), (1, Membership())]
    assert silent.recv(10) == b""
    silent.close()


def test_late_processes_get_the_error_too(monkeypatch):
    monkeypatch.setattr("megajax.processes.rendezvous_process_zero.DIFFERENCE_SECONDS", 3.0)
    meeting = Meeting()
    meeting.join(0, 4, token="t")
    with connect(meeting.port) as connection:
        connection.sendall(hello(1, 5, token="t"))
        connection.makefile().readline()  # the error
        meeting.join(3, 4, token="t")
        meeting.errors(2, "process 1 (x) was started as one of 5 processes")


@pytest.mark.parametrize(("token", "code"), [("", 2), ("t", 1)])
def test_a_port_in_use(token, code):
    """A launcher takes another port for its next attempt."""
    meeting = Meeting()
    with socket.create_server(("127.0.0.1", meeting.port)):
        meeting.join(0, 2, token=token)
        meeting.errors(code, f"port {meeting.port} of 127.0.0.1 is in use")


def test_a_coordinator_that_is_not_on_the_machine_of_process_0():
    meeting = Meeting()
    meeting.join(0, 2, host="203.0.113.7")
    meeting.errors(2, f"process 0 runs on {socket.gethostname()}", "203.0.113.7", "an address of the machine")


@pytest.mark.parametrize("index", [0, 1])
def test_an_unknown_host(index, monkeypatch, capfd):
    monkeypatch.setattr("megajax.processes.start.RESOLVE_SECONDS", 0.5)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with user_error(kind=StartError, code=1) as error:
        meet(World(2, index, "nowhere:4000"), NO_GPUS, patience=300, identity={})
    assert error.value.code == 1  # Its machine may start later.
    line = capfd.readouterr().err
    assert line.startswith("warning: the coordinator's host name 'nowhere' cannot be resolved on ")
    assert "MEGAJAX_COORDINATOR=ADDRESS:4000 in all processes" in line and line.count("\n") == 1


def test_a_host_that_resolves_later(monkeypatch, capfd):
    """A resolver may fail for a moment."""
    resolve, faults = socket.getaddrinfo, [socket.gaierror(-3, "Temporary failure in name resolution")] * 2

    def sometimes(host: str, *rest: object, **more: object) -> object:
        if host == "later":
            if faults:
                raise faults.pop()
            host = "127.0.0.1"
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", sometimes)
    meeting = Meeting()
    for index in (0, 1):
        meeting.join(index, 2, host="later")
    assert [outcome.gpus for _, outcome in meeting.results()] == [None, None]
    assert "Temporary failure" in capfd.readouterr().err


def test_nobody_listens_at_the_coordinator():
    port = free_port()
    began = time.monotonic()
    with user_error(kind=StartError, code=1) as error:
        meet(World(2, 1, f"127.0.0.1:{port}"), NO_GPUS, patience=1.0, identity={})
    assert error.value.code == 1 and not error.value.reported
    assert time.monotonic() - began < 100


def test_a_foreign_server_at_the_coordinators_address():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b'{"error": "\\u001b[31m", "code": 1}\n')

        threading.Thread(target=answer, daemon=True).start()
        with user_error(kind=StartError):
            meet(World(2, 1, f"127.0.0.1:{server.getsockname()[1]}"), NO_GPUS, patience=100, identity={})


def test_foreign_connections_are_ignored():
    """Half a line, noise, and a connection that closes are not the awaited process."""
    meeting = Meeting()
    meeting.join(0, 3)
    strangers = []
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 10_000,
        b'{"megajax": 2',
        b'{"megajax": 2, "index": "1"}\n',
        b"[]\n",
        b"[" * 8000 + b"\n",
        hello(0, 3),
        hello(1, 3).replace(b'"x"', b'"\\u001b[31m"'),
        hello(1, 3).replace(b'["', b'[["'),
    ):
        strangers.append(connect(meeting.port))
        strangers[-1].sendall(noise)
    with connect(meeting.port) as connection:
        connection.sendall(hello(1, 3))
    meeting.join(1, 3)
    meeting.join(2, 3)
    assert meeting.results()[0] == (0, Membership(f"127.0.0.1:{meeting.port}"))
    for stranger in strangers:
        stranger.close()


def test_all_processes_learn_their_gpus():
    """Two machines: the processes of the first divide four GPUs, those of the second have two of their own each."""
    meeting = Meeting()
    for index in range(2):
        meeting.join(index, 4, gpus=GpuClaim("one", ("0", "1", "2", "3"), None, False, index, 2))
        meeting.join(2 + index, 4, gpus=GpuClaim("two", (("0", "1"), ("2", "3"))[index], None, False, index, 2))
    assert [place.gpus for _, place in meeting.results()] == [[0, 1], [2, 3], None, None]


def test_too_few_GPUs_are_reported_by_all_processes_at_once():
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


def test_there_is_one_flag_per_device():
    mesh = build_mesh(ParallelConfig(data=4, tensor=2))
    for flag in (False, True):
        array = each_process(mesh, np.asarray(flag, np.int32))
        assert [shard.data.shape for shard in array.addressable_shards] == [(1,)] * 8
        np.testing.assert_array_equal(array, np.full(8, flag, np.int32))
