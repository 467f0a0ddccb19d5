"""Texts that a model reads with another section before it answers, as T5 does with its encoder.

They are read when their rows begin: one compiled program for each of a few lengths runs that section and writes what
the layers need of it into the slots of the rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from megajax.inference.pack import NOWHERE, Row, Step

SHORTEST = 64
"""Texts are padded to this, to twice as many tokens, and so on, and to the longest."""


class ReadingRow(Row, Protocol):
    """A row of such a model."""

    memory: Sequence[int]
    """The tokens that the section before reads."""


class Texts(NamedTuple):
    """What is read at once: one text of each replica."""

    tokens: Any
    """int32 [replicas, L]."""
    counts: Any
    """int32 [replicas]: tokens of each text."""
    states: Any
    """int32 [replicas]: slots of the rows; past the last slot for no text."""


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """The lengths that texts are padded to; none for 0."""
    lengths = [SHORTEST] if longest else []
    while lengths and lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return tuple(min(length, longest) for length in lengths)


def starting_rows(work: Sequence[Step | None]) -> list[Any] | None:
    """For each replica the row that begins in this step, or None; None where none begins."""
    rows = [next((row for row, at, _ in step.prompts if at == 0), None) if step else None for step in work]
    return rows if any(row is not None for row in rows) else None


def texts_of(rows: Sequence[ReadingRow | None], lengths: Sequence[int]) -> Texts:
    """The texts of these rows. Raises ValueError for one that is longer than all lengths."""
    longest = max(len(row.memory) for row in rows if row is not None)
    length = next((each for each in lengths if each >= longest), None)
    if length is None:
        raise ValueError(f"the section before reads {lengths[-1]} tokens, the text has {longest}")
    tokens, counts = np.zeros((len(rows), length), np.int32), np.zeros(len(rows), np.int32)
    states = np.full(len(rows), NOWHERE, np.int32)
    for number, row in enumerate(rows):
        if row is not None:
            tokens[number, : len(row.memory)] = row.memory
            counts[number], states[number] = len(row.memory), row.slot
    return Texts(tokens, counts, states)
