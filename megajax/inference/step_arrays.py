"""A step of the scheduler, and the texts that an encoder reads, as arrays of fixed shapes."""

from collections import abc
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax.inference.request import Sequence, Step


class Bucket(NamedTuple):
    """Shapes of a compiled step, for one replica."""

    rows: int
    """Number of rows with one token each."""
    chunk: int
    """Number of tokens of a prompt; 0: no prompt."""

    def groups(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens of a row) of each group, as in `megajax.layers.decoding.StepRows`."""
        return ((self.rows, 1), (1, self.chunk)) if self.chunk else ((self.rows, 1),)

    @property
    def tokens(self) -> int:
        return self.rows + self.chunk

    @property
    def sampled(self) -> int:
        """Rows of the logits: one for each decoding row, then the prompt's."""
        return self.rows + bool(self.chunk)

    def __str__(self) -> str:
        return f"{self.rows} rows" + (f" + prompt of {self.chunk}" if self.chunk else "")


class StepArrays(NamedTuple):
    """The input of a compiled step; replicas are concatenated along the first dimension of each array."""

    tokens: Any
    """int32 [T, 1]."""
    positions: Any
    """int32 [T, 1]."""
    slots: Any
    """int32 [T]; see `megajax.layers.decoding.StepRows` for this and the following arrays."""
    tables: tuple[Any, ...]
    counts: tuple[Any, ...]
    states: tuple[Any, ...]
    last: Any
    """int32 [sampled rows]: indices, within the replica, of the tokens whose logits are computed."""


NOWHERE = 2**30
"""A slot past every pool: writes to it are dropped."""


def bucket_for(work: abc.Sequence[Step | None], buckets: abc.Sequence[Bucket]) -> Bucket:
    """The smallest bucket that fits the steps of all replicas. Raises ValueError if there is none."""
    rows = max((len(step.decode) for step in work if step is not None), default=0)
    chunk = max((count for step in work if step is not None for _, _, count in step.prompts), default=0)
    fitting = [bucket for bucket in buckets if bucket.rows >= rows and bucket.chunk >= chunk]
    if not fitting:
        raise ValueError(f"no compiled step has {rows} rows and a prompt of {chunk}: there are {list(buckets)}")
    return min(fitting, key=lambda bucket: (bucket.tokens, bucket.rows))


def pack(step: Step | None, bucket: Bucket, *, block: int, width: int) -> StepArrays:
    """Arrays of a replica's step. block: tokens of a block; width: maximum blocks of a row, the width of the tables.

    The rows of the logits are in the order of `Step.decode`, the prompt's row last.
    """
    groups, total = bucket.groups(), bucket.tokens
    tokens, positions = np.zeros((total, 1), np.int32), np.zeros((total, 1), np.int32)
    slots, last = np.full(total, NOWHERE, np.int32), np.zeros(bucket.sampled, np.int32)
    # Slots and states must be unique, also past the pool.
    slots += np.arange(total, dtype=np.int32)
    tables = tuple(np.zeros((rows, width), np.int32) for rows, _ in groups)
    counts = tuple(np.zeros(rows, np.int32) for rows, _ in groups)
    nowhere = NOWHERE + np.arange(bucket.sampled, dtype=np.int32)
    states = (nowhere[: bucket.rows], nowhere[bucket.rows :])[: len(groups)]
    last[:] = np.arange(bucket.sampled)
    decode, prompts = ([], []) if step is None else (step.decode, step.prompts)
    # Vectorized over rows, because the device waits for this.
    span = slice(len(decode))
    tokens[span, 0], positions[span, 0] = [row.tokens[at] for row, at in decode], [at for _, at in decode]
    slots[span] = [row.blocks[at // block] * block + at % block for row, at in decode]
    counts[0][span], states[0][span] = 1, [row.slot for row, _ in decode]
    for number, (row, _) in enumerate(decode):
        tables[0][number, : len(row.blocks)] = row.blocks
    for row, start, count in prompts:
        at, span = np.arange(start, start + count), slice(bucket.rows, bucket.rows + count)
        tokens[span, 0], positions[span, 0] = row.tokens[start : start + count], at
        slots[span] = np.asarray(row.blocks, np.int32)[at // block] * block + at % block
        tables[1][0, : len(row.blocks)] = row.blocks
        counts[1][0], states[1][0], last[bucket.rows] = count, row.slot, bucket.rows + count - 1
    return StepArrays(tokens, positions, slots, tables, counts, states, last)


def joined(replicas: abc.Sequence[StepArrays]) -> StepArrays:
    """The arrays of several replicas, concatenated."""
    return replicas[0] if len(replicas) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *replicas)


SHORTEST = 64
"""Encoder texts are padded to this length, its doubles, or the maximum length."""


class Texts(NamedTuple):
    """The input of the encoder: a text of each replica."""

    tokens: Any
    """int32 [replicas, L]."""
    counts: Any
    """int32 [replicas]: tokens of each text."""
    states: Any
    """int32 [replicas]: slots of the rows; past the last slot for replicas without a text."""


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """The padded lengths of texts; empty for 0."""
    lengths = [SHORTEST] if longest else []
    while lengths and lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return tuple(min(length, longest) for length in lengths)


def starting_rows(work: abc.Sequence[Step | None]) -> list[Sequence | None] | None:
    """For each replica the row that starts in this step, or None; None if no row starts."""
    rows = [next((row for row, at, _ in step.prompts if at == 0), None) if step else None for step in work]
    return rows if any(row is not None for row in rows) else None


def texts_of(rows: abc.Sequence[Sequence | None], lengths: abc.Sequence[int]) -> Texts:
    """The texts of these rows. Raises ValueError for a text that is longer than all lengths."""
    longest = max(len(row.memory) for row in rows if row is not None)
    length = next((padded for padded in lengths if padded >= longest), None)
    if length is None:
        raise ValueError(f"the encoder reads at most {lengths[-1]} tokens, the text has {longest}")
    tokens, counts = np.zeros((len(rows), length), np.int32), np.zeros(len(rows), np.int32)
    states = np.full(len(rows), NOWHERE, np.int32)
    for number, row in enumerate(rows):
        if row is not None:
            tokens[number, : len(row.memory)] = row.memory
            counts[number], states[number] = len(row.memory), row.slot
    return Texts(tokens, counts, states)
