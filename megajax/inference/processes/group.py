"""The processes of an engine: process 0 announces its operations, and the others run their parts of them.

Process 0 has the requests, the scheduler, the tokenizer and the answers. For each operation it sends the others what
they need to run the same program: its shapes, and arrays on the host. Weights and cache stay on the devices, and
results are replicated, so process 0 reads them without the others.

A tree of arrays is sent as a line of JSON with the structure, then the arrays. Reading it runs no code.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import jax.numpy as jnp
import numpy as np

from megajax.config.errors import UserError, first_line
from megajax.faults.exit_codes import HANG
from megajax.faults.unfailing_output import to_stderr
from megajax.inference.device import Embedder, ModelDevice
from megajax.inference.encoder import EncoderDevice
from megajax.inference.sampling.choose import Drawing, Edits, RowSampling
from megajax.inference.sampling.chooser import PromptScorer
from megajax.inference.speculation.prediction_heads import AfterStep
from megajax.inference.step_arrays import Bucket, StepArrays, Texts
from megajax.mesh.mesh import find_devices
from megajax.processes.message_stream import Receiver, Sender
from megajax.processes.peers import Peers

CLASSES: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (Bucket, StepArrays, Texts, RowSampling, Drawing, Edits, AfterStep, PromptScorer, Embedder)
}
"""Named tuples that a tree may have."""
ALIGNMENT = 16
"""Arrays begin at multiples of this number of bytes."""


def encode(tree: object) -> bytes:
    """None, numbers, texts, arrays, and tuples and mappings of them, as bytes. Raises TypeError for anything else."""
    arrays: list[np.ndarray] = []
    structure, parts, entries = _described(tree, arrays), [], []
    for array in arrays:
        stored, fill = _trimmed(array)
        entries.append([array.dtype.name, array.shape, stored.shape, fill])
        parts += [stored.tobytes(), b"\0" * (-stored.nbytes % ALIGNMENT)]
    head = json.dumps([structure, entries], separators=(",", ":")).encode() + b"\n"
    return b"".join([head, b"\0" * (-len(head) % ALIGNMENT), *parts])


def decode(data: bytes | bytearray) -> Any:
    """The tree of `encode`. Arrays without omitted columns are views of the data."""
    end = data.index(b"\n") + 1
    (structure, entries), arrays, place = json.loads(data[:end]), list[np.ndarray](), end + -end % ALIGNMENT
    for name, shape, stored, fill in entries:
        dtype, count = jnp.dtype(name), prod(stored)
        values = np.frombuffer(data, dtype, count, place).reshape(stored)
        place += count * dtype.itemsize + -(count * dtype.itemsize) % ALIGNMENT
        if shape != stored:
            values = np.concatenate([values, np.full((shape[0], shape[1] - stored[1]), fill, dtype)], axis=1)
        arrays.append(values)
    return _built(structure, arrays)


def _trimmed(array: np.ndarray) -> tuple[np.ndarray, Any]:
    """A matrix without the last columns that have one value, which are most of a table of blocks or of a mask of the
    vocabulary, and this value. Other arrays as they are."""
    if array.ndim != 2 or not array.size:
        return array, None
    fill = array[-1, -1]
    used = np.flatnonzero((array != fill).any(axis=0))
    return array[:, : int(used[-1]) + 1 if used.size else 0], fill.item()


def _described(tree: object, arrays: list[np.ndarray]) -> Any:
    """The structure of a tree as JSON. arrays: those of the tree are appended."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case np.ndarray() | np.generic():
            arrays.append(np.asarray(tree))
            return {"array": len(arrays) - 1}
        case tuple() if hasattr(tree, "_fields"):
            name = type(tree).__name__
            if CLASSES.get(name) is not type(tree):
                raise TypeError(f"{name} is not among the named tuples that processes exchange")
            return {"class": name, "fields": [_described(value, arrays) for value in tree]}
        case tuple():
            return [_described(value, arrays) for value in tree]
        case dict():
            return {"items": [[key, _described(value, arrays)] for key, value in tree.items()]}
    raise TypeError(f"processes exchange no {type(tree).__name__}")


def _built(structure: Any, arrays: Sequence[np.ndarray]) -> Any:
    match structure:
        case list():
            return tuple(_built(part, arrays) for part in structure)
        case {"array": number}:
            return arrays[number]
        case {"class": name, "fields": fields}:
            return CLASSES[name](*(_built(part, arrays) for part in fields))
        case {"items": items}:
            return {key: _built(part, arrays) for key, part in items}
    return structure


REPORT_SECONDS = 3.0
"""How long process 0 waits after another one has reported a failure: it may be about to report the same one itself."""
PATIENCE = 600.0
"""Seconds after which a process hangs that has not run its part of an operation."""
STARTING = ("compile", "allocate")
"""Operations before the first request."""
DUPLICATE_SECONDS = 0.25
"""A launcher and the terminal may forward the same signal."""


class Processes:
    """All processes of an engine, within a `with` block; also a single one.

    If one ends or hangs, all end: process 0 with a line that names it. A signal to one of them asks process 0 to stop.
    """

    def __init__(self):
        """Connects the processes, which `megajax.processes.start.start` has joined."""
        self.stop_asked = threading.Event()
        """In process 0: set if another process was asked to stop."""
        self._link: Sender | Receiver | None = None
        self._signal: tuple[int, float] | None = None
        peers = Peers("engine")
        self.first = peers.first
        """Whether this is process 0."""
        if peers.count == 1:
            return
        # gloo waits only 30 s for a process that is still finding its devices.
        find_devices()
        peers.agree()
        self._link = Sender(peers, _lost, self.stop_asked.set) if peers.first else Receiver(peers, self._left)
        if not peers.first:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(self._link, Receiver) and error is not None:
            self._link.fail(first_line(error), error.code if isinstance(error, UserError) else 1)

    def close(self) -> None:
        """End all processes together: process 0 tells the others."""
        if self._link is not None:
            self._link.close()

    def lead(self, device: ModelDevice | EncoderDevice, patience: float = PATIENCE) -> None:
        """In process 0: send the following operations of an engine's device to the others.

        patience: seconds that they have for an operation after process 0 has run its part of it.
        """
        link = self._link
        if not isinstance(link, Sender):
            return
        link.watch(patience, _hung)

        @contextmanager
        def announced(name: str, arguments: tuple[Any, ...]) -> Generator[None]:
            link.send(encode((name, arguments)), starting=name in STARTING)
            yield
            link.ran()

        device.programs.announced = announced

    def follow(self, device: ModelDevice | EncoderDevice) -> int:
        """In other processes: run the operations of process 0 until it ends -> exit code 0."""
        for message in self._link if isinstance(self._link, Receiver) else ():
            name, arguments = decode(message)
            device.programs.operate(name, *arguments)
        return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._signal is not None and time.monotonic() > self._signal[1] + DUPLICATE_SECONDS:
            os._exit(128 + number)
        if self._signal is None and isinstance(self._link, Receiver):
            self._signal = number, time.monotonic()
            self._link.ask_to_stop()

    def _left(self, process: str, reason: str | None, code: int) -> NoReturn:
        """Process 0 was killed, or has failed."""
        _end(process, _what(reason), code if self._signal is None else 128 + self._signal[0])


def _lost(process: str, reason: str | None, code: int) -> NoReturn:
    """Another process has ended. The devices of this one may wait for it for ever, so nothing can be finished."""
    if reason is not None:
        time.sleep(REPORT_SECONDS)
    _end(process, _what(reason), code)


def _hung(names: str, seconds: float) -> NoReturn:
    """Other processes hang. The devices of this one may wait for them for ever."""
    _end(names, f"did not run the operations of process 0 for {seconds:g} s", HANG)


def _what(reason: str | None) -> str:
    """What has become of a process that ended."""
    return "has ended" if reason is None else f"failed: {reason}"


def _end(process: str, what: str, code: int) -> NoReturn:
    to_stderr(f"megajax: {process} {what}; this process ends as well\n")
    sys.stdout.flush()
    os._exit(code)
