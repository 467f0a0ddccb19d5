"""A model's answers on disk, so that an interrupted evaluation can resume."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from megajax.config.errors import UserError
from megajax.processes.peers import Peers
from megajax.storage.index_cache import checked_line, checked_values
from megajax.storage.write_errors import write_fault
from megajax.training.scorer import Window, WindowScore


class RequestCache:
    """One file per model with one line per window: digest, log-probability, number of correct tokens.

    Lines that an interruption has cut off, or that are damaged, are ignored. The first process reads and writes the
    file; all processes have its content. Replicas write a file for each part of their work, and read all of them.
    """

    def __init__(self, folder: Path, key: str, part: str = ""):
        """key: identifies the weights and all settings of answers; part: the name of a part of the work.

        Raises UserError for an unwritable folder.
        """
        self._digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        self.path = folder / (f"{self._digest}.{part}.jsonl" if part else f"{self._digest}.jsonl")
        self._first = jax.process_index() == 0
        self._answers: dict[str, WindowScore] = {}
        self._text = b""
        Peers("evaluation cache").check(lambda: self._open(folder) if self._first else None)
        for line in _everywhere(self._text).split(b"\n"):
            if (values := checked_values(line)) is not None:
                digest, value, correct = values
                self._answers[digest] = WindowScore(float.fromhex(value), correct)
        self.loaded = len(self._answers)
        """Number of answers from earlier attempts."""

    def _open(self, folder: Path) -> None:
        """Read the file and open it for more lines. Raises UserError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            if (size := self._file.tell()) and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                self._file.write(b"\n")
            self._text = b"\n".join(path.read_bytes() for path in sorted(folder.glob(f"{self._digest}*.jsonl")))
        except OSError as error:
            problem = f"{self.path}: cannot be written: {write_fault(error)}"
            raise UserError(f"{problem}. Set --output or --cache=false.") from error

    def get(self, windows: Sequence[Window]) -> list[WindowScore | None]:
        """The answers of these windows, None for new ones."""
        return [self._answers.get(_digest(window)) for window in windows]

    def put(self, windows: Sequence[Window], answers: Sequence[WindowScore]) -> None:
        """Write the answers of a batch to the file before returning."""
        for window, answer in zip(windows, answers, strict=True):
            self._answers[_digest(window)] = answer
            if self._first:
                line = checked_line([_digest(window), float(answer.log_probability).hex(), answer.right])
                self._file.write(line + b"\n")
        if self._first:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._first:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _digest(window: Window) -> str:
    """Digest of a window's tokens and the number that counts."""
    tokens = np.ascontiguousarray(window.tokens, "<i4").tobytes()
    return hashlib.sha256(tokens + window.counted.to_bytes(8, "little")).hexdigest()[:24]


def _everywhere(text: bytes) -> bytes:
    """The bytes of the first process on all of them."""
    if jax.process_count() == 1:
        return text
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.frombuffer(text, np.uint8) if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data)))
