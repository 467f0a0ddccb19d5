"""Rows sharded over `context`: what is sharded, and documents that do not see each other across chunks.

tests/one_device.py has the losses and gradients of models.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tiny_decoders import windows
from tiny_runs import ONE, ROWS, VOCABULARY, build_program, llama, start, within

from megajax.batch import Batch
from megajax.mesh.config import ContextStrategy, ParallelConfig
from megajax.training.scorer import Scorer

LONG = 64
"""Positions of a row: four devices have sixteen each, in two chunks of eight or four of four."""
GATHER, RING = "all_gather", "ring"


def on(context: int, strategy: ContextStrategy = GATHER, rounds: int = 1, **settings: Any) -> ParallelConfig:
    """Rows over so many devices, and other axes; data 1 unless given."""
    return ParallelConfig(**{"data": 1} | settings, context=context, context_strategy=strategy, context_rounds=rounds)


def long_rows(seed: int = 0) -> Batch:
    """Leaves [ROWS, LONG, ...]: one to six documents a row, some of one token; a fifth of the labels masked."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCABULARY, (ROWS, LONG + 1), dtype=np.int32)
    starts = [np.bincount(rng.integers(1, LONG, row % 6), minlength=LONG) > 0 for row in range(ROWS)]
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, np.arange(LONG), 0), axis=1)
    return {
        "tokens": text[:, :-1].copy(),
        "labels": text[:, 1:].copy(),
        "loss_mask": (rng.random((ROWS, LONG)) < np.linspace(0.6, 1, ROWS)[:, None]).astype(np.float32),
        "positions": (np.arange(LONG) - first).astype(np.int32),
        "segment_ids": segments,
        "sample": np.arange(40, 40 + ROWS, dtype=np.uint32),
    }


@pytest.mark.parametrize(("sharding", "parts"), [("replicate", 1), ("zero1", 8), ("fsdp", 8)])
def test_weights_at_rest_and_moments_are_sharded_over_context(sharding: Any, parts: int) -> None:
    """The shardings of the state on data 2 x context 4 say so; nothing is compiled."""
    program = build_program(llama(), on(4, data=2, data_sharding=sharding), microbatches=2)
    for path in ("stack.blocks.0.mlp.up", "stack.blocks.0.mixer.query", "tokens"):
        shape = program.declared[path].shape
        for shardings in (program.shardings.params, program.shardings.optimizer["first_moment"]):
            assert np.prod(shape) == parts * np.prod(shardings[path].shard_shape(shape)), (path, shardings[path])


DOCUMENT = 1
"""Number in its row of the document that is changed."""


@cache
def scored(parallel: ParallelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses of all tokens before and after a document is changed, float32 [rows, LONG]; which are of that document."""
    before = long_rows()
    rows = [row for row in range(len(before["tokens"])) if before["segment_ids"][row, -1] >= 2]
    before = {name: leaf[rows] for name, leaf in before.items()}
    inside = before["segment_ids"] == DOCUMENT
    tokens = np.where(inside, (before["tokens"] + 7) % 250, before["tokens"])
    after = before | {"tokens": tokens}
    program = build_program(replace(windows(), sequence_length=LONG), parallel, microbatches=1)
    with within(program):
        scorer = Scorer(program, tokenizer=None, weights=start(program).inputs)
        losses = [
            -np.concatenate(
                [
                    scorer.scores([{name: leaf[row] for name, leaf in batch.items()} for row in subset])[0]
                    for subset in np.array_split(np.arange(len(rows)), 2)
                ]
            )
            for batch in (before, after)
        ]
    return losses[0], losses[1], inside


@pytest.mark.parametrize(
    "parallel",
    [on(4, GATHER), pytest.param(on(4, RING, 2), marks=pytest.mark.slow)],
    ids=lambda p: f"{p.context_strategy}-{p.context_rounds}-tensor{p.tensor}",
)
def test_changing_a_document_leaves_the_losses_of_others_bit_equal(parallel: ParallelConfig) -> None:
    """Documents cross the borders of chunks; each has its own loss, which changes only with its own tokens."""
    before, after, inside = scored(parallel)
    assert (before > 1).all() and before.shape[1] == LONG and len(before) >= 10
    np.testing.assert_array_equal(before[~inside], after[~inside])
    assert (before[inside] != after[inside]).all()
    chunk = LONG // (2 * parallel.context * parallel.context_rounds)
    places = [np.unique(np.flatnonzero(row) // chunk) for row in inside]
    assert sum(len(chunks) > 1 for chunks in places) >= 5, "documents have to cross borders of chunks"
    unsplit = scored(ONE)[0]
    np.testing.assert_allclose(before, unsplit, rtol=1e-5)
