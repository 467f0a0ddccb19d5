"""A model split at its stacks, the layers of each pipeline stage, and the order in which they are stored.

Gradient functions get a model as `Staged`: embedding, layers and output of each section, and the loss.

A stack of R repeats is divided into P·V chunks of consecutive repeats; stage s has chunks s, P+s, 2P+s, ...
Every chunk stores as many rows of each weight as the largest chunk. The padding rows are zeros, which the executor
skips. All stages run each tick together, so a chunk with fewer layers waits for the largest one anyway.

B rows of a microbatch, S positions, D hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from megajax.batch import Params, Rows
from megajax.layers.context import Context
from megajax.layers.stack.config import Pattern, split_patterns
from megajax.layers.stack.spans import BlockRows, PerChunk, Span
from megajax.layers.stack.stack import Stack

type Sums = Any
"""The sums over microbatches that a head returns."""

MEMORY = "memory"
"""Key of the previous section's output among the values that all layers of a section use."""


class StagedSection(NamedTuple):
    """A section split at its stack. `shared`: the model's weights outside stacks; a pipeline shards some of them."""

    path: str
    """Path of its stacked weights in the model, ending with a dot."""
    context: Callable[[Rows], Context]
    """rows -> the inputs of layers other than activations; not differentiated."""
    embed: Callable[[Params, Rows], Array]
    """(shared, rows) -> embeddings [B, S, D], computed jointly by all stages; equal on all, as is the cotangent."""
    enter: Callable[[Params, Array, Context, Array | None], Array]
    """(shared, embeddings, context, output of the previous section, if any) -> input of the first layer [B, S, D]."""
    spans: Sequence[Span]
    """The layers of a chunk."""
    common: Callable[[Params], Params]
    """shared -> the weights that every layer uses, by their paths in `shared`."""
    leave: Callable[[Params, Array, Context, Array | None], Array] | None
    """(shared, output of the last layer, context, output of the previous section, if any) -> input of the next section;
    None for the last section."""


class Staged(NamedTuple):
    """A model split at its stacks."""

    sections: Sequence[StagedSection]
    """In the order in which they run."""
    head: Callable[..., tuple[Array, Sums]]
    """(shared, x, rows, scale=1.0) -> loss to differentiate [] and sums to report.

    scale: the loss scale, also in the cotangent; it does not change the loss. All P stages call it with the same x and
    a cotangent of scale / P; the sum of their gradients is the gradient.
    """


def row_order(chunks: Sequence[range], layers: Sequence[int]) -> tuple[int, ...]:
    """For each row of a stacked weight, the index of its layer in `layers`; -1 for padding.

    chunks: layer numbers of each chunk, in the order of storage; layers: numbers of the layers that have the weight.
    """
    if len(chunks) == 1:
        return tuple(range(len(layers)))
    inside = [[place for place, layer in enumerate(layers) if layer in chunk] for chunk in chunks]
    rows = max(map(len, inside))
    return tuple(row for places in inside for row in (*places, *[-1] * (rows - len(places))))


@dataclass(frozen=True, slots=True)
class Partition:
    """The number of repeats in each chunk, in the order of the layers."""

    stages: int
    chunks: int
    """V, chunks per stage."""
    repeats: tuple[int, ...]
    """Repeats in each of the P·V chunks; they sum to the repeats of the stack."""
    size: int = 1
    """Layers per repeat."""

    @classmethod
    def even(cls, repeats: int, stages: int, chunks: int, size: int = 1) -> "Partition":
        """Chunks as even as possible; if the repeats don't divide, the first chunks have one more."""
        base, remainder = divmod(repeats, stages * chunks)
        return cls(stages, chunks, tuple(base + (chunk < remainder) for chunk in range(stages * chunks)), size)

    @property
    def rows(self) -> int:
        """Stored rows per chunk of a weight that every repeat has."""
        return max(self.repeats)

    def layers(self) -> tuple[tuple[range, ...], int]:
        """Layer numbers of each chunk in the order of the model, and `rows`."""
        bounds = np.cumsum([0, *self.repeats]) * self.size
        return tuple(range(int(a), int(b)) for a, b in pairwise(bounds)), self.rows

    def stored(self) -> tuple[range, ...]:
        """Layer numbers of each chunk, stage by stage."""
        chunks = self.layers()[0]
        return tuple(chunks[chunk * self.stages + s] for s in range(self.stages) for chunk in range(self.chunks))

    def order_of(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Order of the rows of a weight in these layers: see `row_order`."""
        return row_order(self.stored(), layers)

    def order(self) -> tuple[int, ...]:
        """Order of the rows of a weight that every repeat has."""
        return self.order_of(range(0, self.size * sum(self.repeats), self.size))

    def numbers(self) -> np.ndarray:
        """First layer of the repeat in each row of each stage, int32 [P, V * rows]; -1 for padding."""
        first = np.cumsum([0, *self.repeats[:-1]])
        row = np.arange(self.rows)
        starts = zip(first, self.repeats, strict=True)
        by_chunk = [np.where(row < count, self.size * (start + row), -1) for start, count in starts]
        by_stage = np.array(by_chunk, np.int32).reshape(self.chunks, self.stages, self.rows).transpose(1, 0, 2)
        return by_stage.reshape(self.stages, self.chunks * self.rows)

    def padded(self) -> bool:
        """Whether any rows are padding."""
        return min(self.repeats) < self.rows

    def spans(self, stack: Stack) -> list[Span]:
        """The spans of all chunks of a stack: one program for all. Raises ValueError as `Stack.spans`."""
        if stack.segmented:
            return _spans_of_segments(stack, self.layers()[0])
        spans = stack.segment_spans(stack.segments[0]._replace(repeats=self.rows), numbered=False)
        return [span._replace(ring=ring) for ring, span in enumerate(spans)]


def _spans_of_segments(stack: Stack, chunks: Sequence[range]) -> list[Span]:
    """The spans of chunks of different layers. chunks: layer numbers, in the order of the model."""
    block_of = {layer: block for block, layers in enumerate(stack.numbers) for layer in layers}
    rows = [max(sum(layer in chunk for layer in layers) for chunk in chunks) for layers in stack.numbers]
    rows_used = np.zeros((len(chunks), len(stack.numbers)), int)
    layer, rings, offsets, spans = np.array([chunk.start for chunk in chunks]), {}, {}, []
    for pattern, repeats in common_runs([[block_of[layer] for layer in chunk] for chunk in chunks]):
        counts, places = np.array(repeats), []
        for number, block in enumerate(pattern):
            start = rows_used[:, block] + pattern[:number].count(block)
            places.append(BlockRows(block, _collapse(start), pattern.count(block), rows[block]))
        ring, before = rings.setdefault(pattern, len(rings)), offsets.get(pattern, 0 * counts)
        unit, varying = stack.unit(pattern, stack.recomputing.policy()), (_collapse(layer), _collapse(counts))
        spans.append(Span(0, 1, unit, 1, tuple(places), *varying, ring, _collapse(before)))
        for block in pattern:
            rows_used[:, block] += counts
        layer, offsets[pattern] = layer + counts * len(pattern), before + counts
    units = [int(np.max(offset)) for offset in offsets.values()]  # by ring
    return [span._replace(units=units[span.ring]) for span in spans]


def _collapse(values: np.ndarray) -> PerChunk:
    """An int if all values are equal, otherwise the array."""
    return int(values[0]) if (values == values[0]).all() else values.astype(np.int32)


class LayerRun(NamedTuple):
    """Consecutive layers in every chunk of a pipeline."""

    pattern: Pattern
    counts: tuple[int, ...]
    """Repeats in each chunk; 0: the chunk has no such layers."""


def common_runs(chunks: Sequence[Sequence[int]]) -> tuple[LayerRun, ...]:
    """Runs that give every chunk with its own counts, with the smallest total length of patterns found.

    Candidates are the patterns of each chunk and those of all chunks joined; the runs of the chunks are merged by
    shortest common supersequences.
    """
    single = {(number,) for chunk in chunks for number in chunk}
    sources = dict.fromkeys([*map(tuple, chunks), tuple(number for chunk in chunks for number in chunk)])
    choices = dict.fromkeys(frozenset(pattern for pattern, _ in split_patterns(source)) | single for source in sources)
    candidates = [_merged([split_patterns(chunk, patterns) for chunk in chunks]) for patterns in choices]
    return min(candidates, key=lambda runs: (sum(len(run.pattern) for run in runs), len(runs)))


def _merged(chunks: Sequence[Sequence[tuple[Pattern, int]]]) -> tuple[LayerRun, ...]:
    merged: list[Pattern] = []
    for chunk in sorted(chunks, key=len, reverse=True):
        merged = _supersequence(merged, [pattern for pattern, _ in chunk])
    counts = [[0] * len(merged) for _ in chunks]
    for number, chunk in enumerate(chunks):
        place = -1
        for pattern, count in chunk:
            place = merged.index(pattern, place + 1)
            counts[number][place] = count
    return tuple(
        LayerRun(pattern, tuple(repeats)) for pattern, repeats in zip(merged, zip(*counts, strict=True), strict=True)
    )


def _supersequence(first: Sequence[Pattern], second: Sequence[Pattern]) -> list[Pattern]:
    """The shortest sequence with both as subsequences, measured by the lengths of patterns."""
    # shared[i][j]: the longest subsequence that one[i:] and other[j:] have in common.
    shared = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i in reversed(range(len(first))):
        for j in reversed(range(len(second))):
            matched = len(first[i]) + shared[i + 1][j + 1] if first[i] == second[j] else 0
            shared[i][j] = max(matched, shared[i + 1][j], shared[i][j + 1])
    merged, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        if first[i] == second[j] and shared[i][j] == len(first[i]) + shared[i + 1][j + 1]:
            merged.append(first[i])
            i, j = i + 1, j + 1
        elif shared[i + 1][j] >= shared[i][j + 1]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return [*merged, *first[i:], *second[j:]]
