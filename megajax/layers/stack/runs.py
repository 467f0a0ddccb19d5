"""Layers as runs: patterns of blocks with repeats. Only the patterns are compiled. Imports neither jax nor flax.

Blocks are numbers here: equal blocks have the same number.
"""

from collections.abc import Collection, Sequence
from operator import eq
from typing import NamedTuple

type Pattern = tuple[int, ...]
type PatternRun = tuple[Pattern, int]
"""A pattern and how often it is repeated."""


class Run(NamedTuple):
    """Consecutive layers in every chunk of a pipeline."""

    pattern: Pattern
    counts: tuple[int, ...]
    """Repeats in each chunk; 0: the chunk has no such layers."""


def period(numbers: Sequence[int]) -> int:
    """Length of the shortest sequence that gives this one when repeated."""
    count = len(numbers)
    return next(n for n in range(1, count + 1) if count % n == 0 and all(map(eq, numbers, numbers[n:])))


def split_patterns(numbers: Sequence[int], patterns: Collection[Pattern] | None = None) -> tuple[PatternRun, ...]:
    """The numbers as patterns with their repeats: the shortest total length of patterns, then the fewest patterns.

    patterns: the allowed ones, which include each number as its own pattern; None: any pattern.
    """
    numbers = tuple(numbers)
    best: list[tuple[int, int, tuple[tuple[Pattern, int], ...]]] = [(0, 0, ())]
    for end in range(1, len(numbers) + 1):
        options = []
        for start in range(end):
            size = period(numbers[start:end])
            pattern = numbers[start : start + size]
            if patterns is None or pattern in patterns:
                cost, count, before = best[start]
                options.append((cost + size, count + 1, (*before, (pattern, (end - start) // size))))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]


def common_runs(chunks: Sequence[Sequence[int]]) -> tuple[Run, ...]:
    """Runs that give every chunk with its own counts, with the smallest total length of patterns found.

    Candidates are the patterns of each chunk and those of all chunks joined; the runs of the chunks are merged by
    shortest common supersequences.
    """
    single = {(number,) for chunk in chunks for number in chunk}
    sources = dict.fromkeys([*map(tuple, chunks), tuple(number for chunk in chunks for number in chunk)])
    choices = dict.fromkeys(frozenset(pattern for pattern, _ in split_patterns(source)) | single for source in sources)
    candidates = [_merged([split_patterns(chunk, patterns) for chunk in chunks]) for patterns in choices]
    return min(candidates, key=lambda runs: (sum(len(run.pattern) for run in runs), len(runs)))


def _merged(chunks: Sequence[Sequence[tuple[Pattern, int]]]) -> tuple[Run, ...]:
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
        Run(pattern, tuple(repeats)) for pattern, repeats in zip(merged, zip(*counts, strict=True), strict=True)
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
