"""What process 0 alone reads, such as from an object store, and passes on to all other processes."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from megajax.config.errors import UserError
from megajax.processes.gpus import machine_name
from megajax.processes.peers import Peers

PART = 1 << 24
"""Bytes of a broadcast."""


def read_by_first(read: Callable[[], Any]) -> Any:
    """The value that process 0 reads, which JSON can express, on all processes. A collective.

    Raises UserError on all processes if `read` raises it, or OSError.
    """
    peers, values = Peers(), [None]

    def read_first() -> None:
        if peers.first:
            values[0] = read()

    peers.check(read_first)
    if peers.count == 1:
        return values[0]
    text = json.dumps(values[0]).encode()
    size = peers.broadcast(len(text))
    return json.loads(b"".join(_passed_on(peers, size, lambda start, stop: text[start:stop])))


def copy_from_first(paths: Sequence[Path]) -> None:
    """Copies files that process 0 has to the machines that lack them, under the same names. A collective.

    Machines that share the folder lack none. Raises UserError on all processes if a file can't be read or written.
    """
    peers = Peers()
    if peers.count == 1:
        return
    absent = [number for number, path in enumerate(paths) if not path.exists()]
    lacking: list[tuple[str, list[int]]] = peers.gather((machine_name(), absent))
    for number in sorted({number for _, numbers in lacking for number in numbers}):
        machines = [machine if number in numbers else "" for machine, numbers in lacking]
        writes = machines[peers.index] != "" and machines.index(machines[peers.index]) == peers.index
        _copy(peers, paths[number], writes=writes)


def _copy(peers: Peers, path: Path, *, writes: bool) -> None:
    """One file. A failure is reported after the last part: until then every process takes part in each broadcast."""
    faults = list[OSError]()

    def read(start: int, stop: int) -> bytes:
        try:
            with path.open("rb") as file:
                content = os.pread(file.fileno(), stop - start, start)
        except OSError as error:
            faults.append(error)
            content = b""
        return content.ljust(stop - start, b"\0")

    size = peers.of_first(lambda: path.stat().st_size)
    parts, temporary = _passed_on(peers, size, read), path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        faults.append(error)
    for _ in parts:  # those that this process does not need, or could not write
        pass

    def finish() -> None:
        if faults:
            cause = f"{path}: its copy from process 0 can't be written or read: {faults[0].strerror}"
            raise UserError(f"{cause}. Set data.cache_dir to a folder with room that can be written")

    try:
        peers.check(finish)
        peers.check(lambda: temporary.rename(path) if writes else None)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _passed_on(peers: Peers, size: int, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """The bytes of process 0, by parts. read: start, stop -> bytes."""
    for start in range(0, size, PART):
        stop = min(start + PART, size)
        content = read(start, stop) if peers.first else bytes(stop - start)
        values = multihost_utils.broadcast_one_to_all(np.frombuffer(content, np.uint8), is_source=peers.first)
        yield np.asarray(values).tobytes()
