"""Log-probabilities of answers under a reference model, computed once before training and stored beside the data.

The reference model has the weights that a run starts from; with low-rank adapters it has those without the adapters. So
one model is in memory. The name of a file is a digest of its contents' origin (`ScoresOrigin`). It grows with each
batch, so that an interrupted computation continues, and gets its final name when it is complete.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from megajax.batch import Params
from megajax.config.errors import UserError
from megajax.data.rows.row_source import RowSource
from megajax.layers.param import ParamSpec
from megajax.mesh.array_hash import array_hash, hash_of_arrays
from megajax.processes.must_be_equal import MUST_BE_EQUAL
from megajax.processes.peers import Peers
from megajax.storage.index_cache import content_key
from megajax.storage.write_errors import write_fault
from megajax.tokenizers.base import Tokenizer
from megajax.training.program import Program
from megajax.training.scorer import Scorer
from megajax.training.state import TrainState

UNRECORDED = "unrecorded"
"""The checksum of a checkpoint without one."""
RECORD = np.dtype("<u4")
"""A row is stored as its float32 values and their CRC-32."""


class ReferencedRows(Protocol):
    """A row source whose rows have the log-probabilities of a reference model, once it has them."""

    reads_reference: bool
    """Whether the model reads them."""
    reference: np.ndarray | None
    """float32 [T], aligned with the tokens of the data."""
    reference_folder: Path
    """Folder of their files."""
    identity: str
    """Digest of the data and the tokenizer."""

    def whole(self) -> RowSource:
        """A row source of all the data, in an order that depends on the data alone."""
        ...

    def unpacked(self, scores: np.ndarray) -> np.ndarray:
        """Log-probabilities of the labels of the rows of `whole`, [rows, S] -> `reference`."""
        ...


class ScoresOrigin(NamedTuple):
    """What stored log-probabilities were computed from."""

    data: str
    """`ReferencedRows.identity`."""
    length: int
    """Tokens of a row."""
    compute: str
    """Dtype of the computation."""
    weights: str
    """`weights_checksum` of the reference model."""


class Reference(NamedTuple):
    """The reference model of a run."""

    weights: str
    """Checksum of its weights, which is in the metadata of steps."""
    files: tuple[Path, ...]
    """The stored log-probabilities, or weights."""
    scored: int | None
    """Rows that this attempt has computed; None: the files have weights."""


class ScoresFile:
    """A file of rows of log-probabilities. The first process reads and writes it; all processes have its content."""

    def __init__(self, folder: Path, origin: ScoresOrigin, rows: int, peers: Peers):
        self.path = folder / f"{content_key(origin._asdict())[:24]}.scores"
        self._part, self._peers, self._origin = self.path.with_suffix(".part"), peers, origin
        self._shape = rows, origin.length
        self.scores, self.stored = np.zeros(self._shape, np.float32), 0

    def load(self) -> None:
        """Read the rows that are stored. Raises UserError for a folder that can't be written."""
        rows = np.zeros((0, self._shape[1]), np.float32)

        def read() -> None:
            nonlocal rows
            for path, least in ((self.path, self._shape[0]), (self._part, 0)):
                try:
                    table = intact_rows(path.read_bytes() if path.exists() else b"", *self._shape)
                except OSError as error:
                    raise UserError(f"{path}: cannot be read: {write_fault(error)}") from error
                if len(table) >= max(least, len(rows)):  # a damaged complete file is computed again
                    rows = table

        self._peers.check(read if self._peers.first else lambda: None)
        self.stored = self._peers.broadcast(len(rows))
        if self._peers.count > 1 and self.stored:
            sent = rows if self._peers.first else np.zeros((self.stored, self._shape[1]), np.float32)
            rows = np.asarray(multihost_utils.broadcast_one_to_all(sent))
        self.scores[: self.stored] = rows

    @property
    def complete(self) -> bool:
        """Whether all rows are there."""
        return self.stored == len(self.scores)

    def add(self, rows: np.ndarray) -> None:
        """Append rows [n, S]; after the last one the file gets its name. Raises UserError."""
        first, self.stored = self.stored, self.stored + len(rows)
        self.scores[first : self.stored] = rows
        self._peers.check((lambda: self._write(first)) if self._peers.first else lambda: None)

    def _write(self, first: int) -> None:
        size = (self._shape[1] + 1) * RECORD.itemsize
        try:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            with self._part.open("r+b" if self._part.exists() else "w+b") as file:
                file.truncate(first * size)  # of rows that an interruption has cut
                file.seek(first * size)
                file.write(b"".join(map(record, self.scores[first : self.stored])))
                file.flush()
                os.fsync(file.fileno())
            if self.complete:
                about = json.dumps(self._origin._asdict(), indent=1)
                self.path.with_suffix(".json").write_text(f"{about}\n", encoding="utf-8")
                self._part.replace(self.path)
        except OSError as error:
            message = f"{self._part}: cannot be written: {write_fault(error)}"
            raise UserError(f"{message}. Set data.reference_dir to a folder that can be written.") from error

    def others(self) -> str:
        """What other files beside this one were computed from, as the end of a message."""
        descriptions = []
        for path in sorted(self.path.parent.glob("*.json")):
            try:
                origin = json.loads(path.read_text(encoding="utf-8"))
                differs = [name for name, value in self._origin._asdict().items() if origin[name] != value]
            except (OSError, ValueError, KeyError):
                continue
            descriptions.append(f"{path.with_suffix('.scores').name} has other {' and '.join(differs) or 'rows'}")
        return f" ({'; '.join(descriptions)})" if descriptions else ""


def record(row: np.ndarray) -> bytes:
    """A row of float32 as it is stored."""
    data = row.astype("<f4").tobytes()
    return data + zlib.crc32(data).to_bytes(RECORD.itemsize, "little")


def intact_rows(data: bytes, rows: int, length: int) -> np.ndarray:
    """The stored rows before the first one that is incomplete or damaged, float32 [n, length], n <= rows."""
    size = length + 1
    table = np.frombuffer(data, RECORD, min(len(data) // (size * RECORD.itemsize), rows) * size).reshape(-1, size)
    good = next((n for n, row in enumerate(table) if zlib.crc32(row[:-1].tobytes()) != row[-1]), len(table))
    return np.ascontiguousarray(table[:good, :-1]).view("<f4").astype(np.float32)


def kept_checksum(expected: str | None, program: Program) -> str | None:
    """The checksum of the reference model of a run that resumes; None if its weights are those of the state.

    Raises UserError for a step without one, unless the reference is the base of adapters.
    """
    if expected == UNRECORDED and not program.adapters:
        raise UserError(
            "the checkpoint has no checksum of the run's reference model, as those of earlier versions: start a new "
            "run with checkpoint.load=FOLDER, whose reference are the weights that it starts from"
        )
    return None if expected == UNRECORDED else expected


def attach_reference(
    program: Program,
    tokenizer: Tokenizer,
    state: TrainState,
    sources: Iterable[Any],
    *,
    expected: str | None,
    progress: Callable[[], None],
) -> Reference | None:
    """Give row sources the log-probabilities of the reference model, from files or computed; None: no model reads them.

    expected: checksum of the reference model of a run that resumes, None: a new run, whose weights are the reference.
    progress: called after each batch. All processes call it. Raises UserError if the files of a run that resumes are
    missing and its weights are no longer those of the reference.
    """
    inner = (getattr(source, "source", source) for source in sources)  # of data.loader.cyclic
    reading = [source for source in inner if getattr(source, "reads_reference", False)]
    if not reading:
        return None
    weights = reference_weights(program, state.inputs)
    current = weights_checksum({path: weights[path] for path in frozen_paths(program)}, program.declared)
    checksum, files, scored = kept_checksum(expected, program) or current, dict[str, ScoresFile](), 0
    for source in reading:
        if source.identity not in files:
            origin = ScoresOrigin(source.identity, source.sequence_length, program.cfg.precision.compute, checksum)
            rows = source.whole()
            store = files[source.identity] = ScoresFile(source.reference_folder, origin, len(rows), Peers())
            store.load()
            if not store.complete:
                if current != checksum:
                    raise UserError(_missing(store, checksum))
                scored += len(rows) - store.stored
                score(Scorer(program, tokenizer, weights), rows, store, progress)
        source.reference = source.unpacked(files[source.identity].scores)
    return Reference(checksum, tuple(store.path for store in files.values()), scored)


def _missing(store: ScoresFile, checksum: str) -> str:
    return MUST_BE_EQUAL["reference"].message.format(
        weights=checksum, folder=store.path.parent, others=store.others(), file=store.path.name
    )


def score(scorer: Scorer, rows: RowSource, store: ScoresFile, progress: Callable[[], None]) -> None:
    """Compute the missing rows of a store."""
    size = scorer.rows_at_once(scorer.length)
    for first in range(store.stored, len(rows), size):
        batch = [rows[number] for number in range(first, min(first + size, len(rows)))]
        log_p, _ = scorer.scores(batch)
        masks = np.stack([row["loss_mask"] for row in batch])
        store.add(np.where(masks > 0, log_p, 0))
        progress()


def frozen_paths(program: Program) -> Sequence[str]:
    """The weights that make the reference model: all but those of low-rank adapters."""
    return sorted(set(program.declared) - program.adapters)


def reference_weights(program: Program, inputs: Params) -> Params:
    """The inputs of the reference model: those of a state, with low-rank adapters turned off."""
    return {**inputs, **{path: jnp.zeros_like(inputs[path]) for path in program.adapters}}


def weights_checksum(params: Params, declared: Mapping[str, ParamSpec]) -> str:
    """16 hexadecimal digits that depend on every bit of the weights, and not on their layout."""

    def hashes(params: Params) -> Array:
        return jnp.stack([array_hash(x, rows=declared[path].layers) for path, x in sorted(params.items())])

    places = [zlib.crc32(path.encode()) * 2 + 1 for path in sorted(params)]
    return hash_of_arrays(np.asarray(jax.jit(hashes)(dict(params))), places)
