"""Messages of process 0, and the ends of processes, over loopback connections of threads."""

import contextlib
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from peer_threads import Service, ThreadPeers

from megajax.processes import message_stream
from megajax.processes.message_stream import Receiver, Sender


class Stream:
    """A sender and its receivers, and what they are told."""

    def __init__(self, count: int):
        service, self.lost, self.stops = Service(count), SimpleQueue[tuple[Any, ...]](), SimpleQueue[None]()
        peers = [ThreadPeers(service, index) for index in range(count)]
        for peer in peers:
            peer.coordinator = "127.0.0.1:1"

        def told(index: int) -> Any:
            return lambda *loss: self.lost.put((index, *loss))

        with ThreadPoolExecutor(count) as pool:
            sender = pool.submit(Sender, peers[0], told(0), lambda: self.stops.put(None))
            receivers = [pool.submit(Receiver, peer, told(peer.index)) for peer in peers[1:]]
            self.sender, self.receivers = sender.result(), [future.result() for future in receivers]


def test_messages_arrive_whole_and_in_order() -> None:
    stream, sent = Stream(3), [b"", b"a" * 3_000_000, b"\n{}", b"end"]
    with ThreadPoolExecutor(2) as pool:
        received = [pool.submit(lambda r=receiver: (list(r), r.close())[0]) for receiver in stream.receivers]
        for message in sent:
            stream.sender.send(message)
        stream.sender.close()
        assert [future.result() for future in received] == [sent, sent]
    assert stream.lost.empty(), "they ended together"


def test_a_process_that_ends_is_named() -> None:
    stream = Stream(3)
    shut_down(stream.receivers[1]._connection)
    assert stream.lost.get(timeout=100) == (0, name_of(stream, 2), None, 1)


def shut_down(connection: Connection) -> None:
    """End what this end of a connection sends."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_WR)


def name_of(stream: Stream, index: int) -> str:
    return f"process {index} ({stream.sender._connections[index][1]})"


def test_a_failure_is_told_with_its_reason() -> None:
    """The reason comes before the end of the connection."""
    stream = Stream(2)
    stream.receivers[0].fail("the disk is gone " * 1000, 2)
    shut_down(stream.receivers[0]._connection)
    index, process, reason, code = stream.lost.get(timeout=100)
    assert (index, process, code) == (0, name_of(stream, 1), 2) and reason.startswith("the disk is gone the")
    assert stream.lost.get(timeout=100) == (0, name_of(stream, 1), None, 1)


def test_the_end_of_process_0_is_seen() -> None:
    stream = Stream(2)
    for connection, _ in stream.sender._connections.values():
        shut_down(connection)
    assert list(stream.receivers[0]) == []
    assert stream.lost.get(timeout=100) == (1, "process 0", None, 1)


def test_another_process_asks_to_stop() -> None:
    stream = Stream(2)
    stream.receivers[0].ask_to_stop()
    stream.stops.get(timeout=100)
    assert stream.lost.empty()


def test_a_process_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not run what process 0 has run: neither one that waits for messages, nor one that still compiles."""
    monkeypatch.setattr(message_stream, "CHECK_SECONDS", 0.01)
    stream, hung = Stream(3), SimpleQueue[tuple[Any, ...]]()
    stream.sender.watch(0.2, lambda *late: hung.put(late))
    follower, hanging = map(iter, stream.receivers)
    with ThreadPoolExecutor(2) as pool:
        received = pool.submit(list, follower)
        for number, starting in enumerate((True, False)):
            stream.sender.send(b"%d" % number, starting=starting)
            assert next(hanging) == b"%d" % number
            with pytest.raises(Empty):
                hung.get(timeout=0.5)
            stream.sender.ran()
        assert hung.get(timeout=100) == (name_of(stream, 2), 0.2)
        closed = pool.submit(stream.sender.close)
        assert received.result() == [b"0", b"1"] and list(hanging) == []
        for receiver in stream.receivers:
            receiver.close()
        closed.result()


def test_strangers_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without the secret is closed, whatever it sends."""
    service, ports = Service(2), SimpleQueue[int]()
    peers = [ThreadPeers(service, index) for index in range(2)]

    def broadcast(value: Any) -> Any:
        ports.put(value[0])
        return ThreadPeers.broadcast(peers[0], value)

    for peer in peers:
        peer.coordinator = "127.0.0.1:1"
    monkeypatch.setattr(message_stream, "HELLO_SECONDS", 1.0)
    monkeypatch.setattr(peers[0], "broadcast", broadcast)
    with ThreadPoolExecutor(2) as pool:
        sender = pool.submit(Sender, peers[0], lambda *loss: None, lambda: None)
        port = ports.get(timeout=100)
        hello = {"secret": "no", "index": 1, "name": "stranger"}
        for line in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", json.dumps(hello).encode() + b"\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(line)
                stranger.settimeout(100)
                assert stranger.recv(1) == b""
        receiver = Receiver(peers[1], lambda *loss: None)
        assert "stranger" not in sender.result()._connections[1][1]
        sender.result().send(b"message")
        assert next(iter(receiver)) == b"message"


def test_a_process_that_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = ThreadPeers(Service(3), 0)
    peers.coordinator = "127.0.0.1:1"
    monkeypatch.setattr(message_stream, "CONNECT_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="2 of 2 processes did not connect"):
        Sender(peers, lambda *loss: None, lambda: None)
