"""A step of the scheduler as arrays of fixed shapes."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class Bucket(NamedTuple):
    """The shapes of a compiled step, of one replica."""

    rows: int
    """Rows with one token each."""
    chunk: int
    """Tokens of one prompt; 0: none."""

    def groups(self) -> tuple[tuple[int, int], ...]:
        """Rows and tokens of each, as `megajax.layers.decoding.StepRows` has them."""
        return ((self.rows, 1), (1, self.chunk)) if self.chunk else ((self.rows, 1),)

    @property
    def tokens(self) -> int:
        return self.rows + self.chunk

    @property
    def sampled(self) -> int:
        """Rows of the logits: one for each that decodes, then the prompt's."""
        return self.rows + bool(self.chunk)

    def __str__(self) -> str:
        return f"{self.rows} rows" + (f" + prompt of {self.chunk}" if self.chunk else "")


class Row(Protocol):
    """A running request."""

    tokens: Sequence[int]
    """Prompt, then the answer so far."""
    blocks: Sequence[int]
    """Blocks of the pool, in order."""
    slot: int
    """Where leaves of rows are."""


class Step(Protocol):
    """What a replica does in one step."""

    decode: Sequence[tuple[Any, int]]
    """Rows, and the position of the one token of each."""
    prompts: Sequence[tuple[Any, int, int]]
    """At most one: a row, the first position, and how many."""


class StepArrays(NamedTuple):
    """The input of a compiled step; replicas one after another along the first dimension of each array."""

    tokens: Any
    """int32 [T, 1]."""
    positions: Any
    """int32 [T, 1]."""
    slots: Any
    """int32 [T]; see `megajax.layers.decoding.StepRows` for this and those that follow."""
    tables: tuple[Any, ...]
    counts: tuple[Any, ...]
    states: tuple[Any, ...]
    last: Any
    """int32 [sampled rows]: the tokens whose logits are computed, counted within the replica."""


NOWHERE = 2**30
"""A slot past every pool: what is written there is dropped."""


def bucket_for(work: Sequence[Step | None], buckets: Sequence[Bucket]) -> Bucket:
    """The smallest that every replica's step fits into. Raises ValueError where none is."""
    rows = max((len(step.decode) for step in work if step is not None), default=0)
    chunk = max((count for step in work if step is not None for _, _, count in step.prompts), default=0)
    fitting = [bucket for bucket in buckets if bucket.rows >= rows and bucket.chunk >= chunk]
    if not fitting:
        raise ValueError(f"no compiled step has {rows} rows and a prompt of {chunk}: there are {list(buckets)}")
    return min(fitting, key=lambda bucket: (bucket.tokens, bucket.rows))


def pack(step: Step | None, bucket: Bucket, *, block: int, width: int) -> StepArrays:
    """One replica's arrays. block: tokens of a block; width: blocks of the longest row, as the tables have them.

    The rows of the logits are in the order of `Step.decode`; the prompt's is the last.
    """
    groups, total = bucket.groups(), bucket.tokens
    tokens, positions = np.zeros((total, 1), np.int32), np.zeros((total, 1), np.int32)
    slots, last = np.full(total, NOWHERE, np.int32), np.zeros(bucket.sampled, np.int32)
    # Slots and states have to be unique: those past the pool too.
    slots += np.arange(total, dtype=np.int32)
    tables = tuple(np.zeros((rows, width), np.int32) for rows, _ in groups)
    counts = tuple(np.zeros(rows, np.int32) for rows, _ in groups)
    nowhere = NOWHERE + np.arange(bucket.sampled, dtype=np.int32)
    states = (nowhere[: bucket.rows], nowhere[bucket.rows :])[: len(groups)]
    last[:] = np.arange(bucket.sampled)
    decode, prompts = ([], []) if step is None else (step.decode, step.prompts)
    # All rows at once where it is possible: the device waits for this.
    own = slice(len(decode))
    tokens[own, 0], positions[own, 0] = [row.tokens[at] for row, at in decode], [at for _, at in decode]
    slots[own] = [row.blocks[at // block] * block + at % block for row, at in decode]
    counts[0][own], states[0][own] = 1, [row.slot for row, _ in decode]
    for number, (row, _) in enumerate(decode):
        tables[0][number, : len(row.blocks)] = row.blocks
    for row, start, count in prompts:
        at, own = np.arange(start, start + count), slice(bucket.rows, bucket.rows + count)
        tokens[own, 0], positions[own, 0] = row.tokens[start : start + count], at
        slots[own] = np.asarray(row.blocks, np.int32)[at // block] * block + at % block
        tables[1][0, : len(row.blocks)] = row.blocks
        counts[1][0], states[1][0], last[bucket.rows] = count, row.slot, bucket.rows + count - 1
    return StepArrays(tokens, positions, slots, tables, counts, states, last)


def joined(replicas: Sequence[StepArrays]) -> StepArrays:
    """The arrays of several replicas, one after another."""
    return replicas[0] if len(replicas) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *replicas)
