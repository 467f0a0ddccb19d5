"""Answers of a model on disk, so that an interrupted evaluation goes on where it stopped."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from megajax.config.errors import UserError
from megajax.training.scoring import Answer, Window


class RequestCache:
    """A line for each window in a file of its own for each model: digest, log-probability, right tokens.

    A line that an interruption cut short is ignored. With several processes, the first reads and writes the file, and
    all have what it read.
    """

    def __init__(self, folder: Path, key: str):
        """key: of the weights and all settings that change an answer. Raises UserError for an unwritable folder."""
        self.path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
        self._first = jax.process_index() == 0
        self._answers: dict[str, Answer] = {}
        text = b""
        if self._first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                text = self.path.read_bytes() if self.path.exists() else b""
                self._file = self.path.open("ab")
            except OSError as error:
                what = f"{self.path}: cannot be written: {error.strerror}"
                raise UserError(f"{what}. Set --output or --cache=false.") from error
            if text and not text.endswith(b"\n"):
                self._file.write(b"\n")
        for line in _everywhere(text).split(b"\n"):
            try:
                digest, value, right = json.loads(line)
                self._answers[digest] = Answer(float.fromhex(value), right)
            except (ValueError, TypeError):
                continue
        self.read = len(self._answers)
        """Answers that an earlier attempt left."""

    def get(self, windows: Sequence[Window]) -> list[Answer | None]:
        """Those of these windows, None for a new one."""
        return [self._answers.get(_digest(window)) for window in windows]

    def put(self, windows: Sequence[Window], answers: Sequence[Answer]) -> None:
        """Keep the answers of a batch: on disk when this returns."""
        for window, answer in zip(windows, answers, strict=True):
            self._answers[_digest(window)] = answer
            if self._first:
                line = json.dumps([_digest(window), float(answer.log_probability).hex(), answer.right])
                self._file.write(f"{line}\n".encode())
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
    """Of its tokens and how many of them count."""
    tokens = np.ascontiguousarray(window.tokens, "<i4").tobytes()
    return hashlib.sha256(tokens + window.counted.to_bytes(8, "little")).hexdigest()[:24]


def _everywhere(text: bytes) -> bytes:
    """The bytes of the first process on all of them."""
    if jax.process_count() == 1:
        return text
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.frombuffer(text, np.uint8) if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data)))
