"""Texts for the encoder of a model, for example T5.

An encoder text is read when its row starts. A compiled program for each of a few lengths runs the encoder and writes
its keys and values into the slots of the rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from megajax.inference.pack import NOWHERE, Row, Step

SHORTEST = 64
"""Texts are padded to this length, its doubles, or the maximum length."""


class EncoderRow(Row, Protocol):
    """A row of a model with an encoder."""

    memory: Sequence[int]
    """Tokens for the encoder."""


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


def starting_rows(work: Sequence[Step | None]) -> list[Any] | None:
    """For each replica the row that starts in this step, or None; None if no row starts."""
    rows = [next((row for row, at, _ in step.prompts if at == 0), None) if step else None for step in work]
    return rows if any(row is not None for row in rows) else None


def texts_of(rows: Sequence[EncoderRow | None], lengths: Sequence[int]) -> Texts:
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
