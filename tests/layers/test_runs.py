"""Layers in runs of patterns, of one stack and of all chunks of a pipeline."""

import numpy as np
import pytest

from megajax.layers.stack.config import split_patterns
from megajax.pipeline.partition import Partition, common_runs

NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def numbers(text: str) -> list[int]:
    return [text.index(letter) for letter in text]


def chunks(text: str, count: int) -> list[list[int]]:
    return [numbers(text)[span.start : span.stop] for span in Partition.even(len(text), count, 1).layers()[0]]


def test_an_aperiodic_stack_has_few_blocks_to_compile() -> None:
    assert len(NEMOTRON_H_8B) == 52
    runs = split_patterns(numbers(NEMOTRON_H_8B))
    assert [number for pattern, count in runs for number in pattern * count] == numbers(NEMOTRON_H_8B)
    assert [len(pattern) for pattern, _ in runs] == [11, 2]


@pytest.mark.parametrize(
    ("text", "count", "compiled"),
    [
        (NEMOTRON_H_8B, 2, 10),
        (NEMOTRON_H_8B, 4, 7),
        (NEMOTRON_H_8B, 26, 6),
        ("DDD" + "E" * 58, 4, 2),
        ("DDD" + "E" * 58, 16, 2),
        ("M-M*", 4, 3),
        ("M-M*-M-M*-", 2, 5),
    ],
)
def test_one_program_runs_chunks_that_differ(text: str, count: int, compiled: int) -> None:
    """Each chunk's runs are its own layers, and the patterns are few."""
    parts = chunks(text, count)
    runs = common_runs(parts)
    for chunk, layers in enumerate(parts):
        assert [number for run in runs for number in run.pattern * run.counts[chunk]] == layers
    assert sum(len(run.pattern) for run in runs) == compiled


def test_any_layers_can_be_cut_anywhere() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        bounds = np.sort(draw.choice(np.arange(1, 20), 3, replace=False))
        parts = [part.tolist() for part in np.split(draw.integers(0, 3, 20), bounds)]
        runs = common_runs(parts)
        for chunk, layers in enumerate(parts):
            assert [number for run in runs for number in run.pattern * run.counts[chunk]] == layers


def test_rows_of_a_weight_that_only_some_layers_have() -> None:
    """Nine layers in chunks of 3, 2, 2 and 2, two on each stage: stage 0 has chunks 0 and 2."""
    partition = Partition.even(9, 2, 2)
    assert [list(chunk) for chunk in partition.stored()] == [[0, 1, 2], [5, 6], [3, 4], [7, 8]]
    assert partition.order_of((0, 2, 4, 7)) == (0, 1, -1, -1, 2, -1, 3, -1)
    assert Partition.even(9, 1, 1).order_of((0, 2, 4, 7)) == (0, 1, 2, 3)
