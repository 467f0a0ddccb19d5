"""Rows sharded over `context` train like whole rows: by every strategy, and with every other axis.

Cases are in tests/context_cases.py. Slow tests run a few of them that cover models and strategies;
`python -m benchmarks context_layouts --devices=cpu:8` checks all, and prints their differences.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from combinations import TOLERANCE, difference
from context_cases import LONG, MODELS, Case, apart, covering, latent, long, long_rows, over_context, windows
from test_experts_train_alike import LOSSES, moe
from tiny_runs import ONE, build_program, differentiate, gpt, llama, start, train, within

from megajax.mesh.config import ContextStrategy, ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.training.scorer import Scorer

RUN = 1e-4
"""Largest relative error of a loss of a few steps."""
GATHER, RING, HEADS, GROUPS = "all_gather", "ring", "all_to_all", "ring+all_to_all"
QUICKEST = (Case("Llama, documents", over_context(4, RING)),)


@pytest.fixture(autouse=True)
def small_memory():
    """Drops compiled programs, each of which is used once."""
    yield
    jax.clear_caches()


def check(case: Case) -> None:
    actual = case.difference()
    assert max(actual.loss, actual.gradient) <= TOLERANCE, actual


@pytest.mark.parametrize("case", QUICKEST, ids=lambda case: case.name)
def test_a_step_equals_that_of_one_device(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in covering() if case not in QUICKEST], ids=lambda case: case.name)
def test_a_step_of_every_strategy_equals_that_of_one_device(case: Case) -> None:
    check(case)


def on(context: int, strategy: ContextStrategy = GATHER, rounds: int = 1, **settings: Any) -> ParallelConfig:
    """Rows over so many devices, and other axes; data 1 unless given."""
    return ParallelConfig(**{"data": 1} | settings, context=context, context_strategy=strategy, context_rounds=rounds)


INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}
TOGETHER: dict[str, tuple[DecoderConfig, ParallelConfig, int]] = {
    "pipeline, tensor, sequence": (
        replace(windows(), stack=replace(windows().stack, repeats=2)),
        on(2, GATHER, pipeline=2, tensor=2, sequence=True),
        4,
    ),
    "interleaved, exchange": (long(llama(repeats=4)), on(2, HEADS, **INTERLEAVED), 4),
    "gpipe, fsdp": (latent(), on(2, RING, 2, pipeline=2, data=2, schedule="gpipe", data_sharding="fsdp"), 4),
    "fsdp, exchange": (windows(), on(4, GROUPS, data=2, data_sharding="fsdp"), 2),
    "zero1": (long(gpt("selective")), on(4, RING, data=2), 2),
    "replicate": (latent(), on(4, HEADS, data=2, data_sharding="replicate"), 2),
    "tensor, sequence": (windows(), on(4, GROUPS, 2, tensor=2, sequence=True), 2),
    "whole experts": (long(moe(LOSSES)), on(2, RING, expert=2, tensor=2, sequence=True, expert_tensor="whole"), 3),
    "experts, pipeline": (long(moe(LOSSES)), on(2, GATHER, pipeline=2, expert=2), 3),
    "full recomputation, ring": (replace(windows(), recompute="full"), on(4, RING), 2),
    "full recomputation, exchange": (replace(windows(), recompute="full"), on(4, HEADS), 2),
    "two layers recomputed together": (
        replace(long(llama(repeats=4)), recompute="full", layers_per_checkpoint=2),
        on(4, RING),
        4,
    ),
}
"""Name -> model, layout, microbatches."""


def has_experts(model: DecoderConfig) -> bool:
    return any(hasattr(block.mlp, "experts") for block in model.stack.pattern)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_with_other_axes(name: str) -> None:
    """A step; test_layouts_matrix.py trains further combinations, context 2 x pipeline 2 x tensor 2 by default."""
    model, parallel, microbatches = TOGETHER[name]
    # Losses that balance experts are of a microbatch.
    count = microbatches if has_experts(model) else 2
    alone = replace(model, recompute="selective", layers_per_checkpoint=1)
    expected = differentiate(alone, ONE, microbatches=count, draw=long_rows)
    actual = apart(differentiate(model, parallel, microbatches=microbatches, draw=long_rows), expected)
    assert max(actual.loss, actual.gradient) <= TOLERANCE, actual
    assert actual.padding == 0, actual


@pytest.mark.slow
@pytest.mark.parametrize(("average", "strategy"), [("tokens", RING), ("microbatches", GATHER)])
def test_averages_and_evaluation(average: str, strategy: ContextStrategy) -> None:
    """Mean over tokens and of microbatches' means, in data 2 x context 2, with an evaluation before and after."""
    model, layout = long(llama()), on(2, strategy, data=2)
    count = 4 if average == "tokens" else 2 * layout.data
    options = {"average": average, "draw": long_rows}
    actual, expected = train(model, layout, microbatches=2, **options), train(model, ONE, microbatches=count, **options)
    between = difference(actual, expected)
    np.testing.assert_allclose(actual.losses[0], expected.losses[0], rtol=TOLERANCE)
    assert max(between.norm, between.gradient) <= TOLERANCE, between
    assert between.loss <= RUN, between
    assert between.padding == 0, between
    assert actual.tokens == expected.tokens
    np.testing.assert_allclose([actual.before], [expected.before], rtol=TOLERANCE)
    np.testing.assert_allclose([actual.evaluation], [expected.evaluation], rtol=RUN)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [RING, GROUPS])
def test_bfloat16_computes_in_low_precision(strategy: ContextStrategy) -> None:
    """At most 1.5 times as far from float32 as one device in bfloat16."""
    options = {"microbatches": 2, "evaluated": False, "draw": long_rows}
    low = train(windows(), on(4, strategy), compute="bfloat16", **options)
    unsplit, exact = train(windows(), compute="bfloat16", **options), train(windows(), **options)
    np.testing.assert_allclose(low.losses, unsplit.losses, rtol=2e-3)
    for path, g in exact.gradients.items():
        errors = [np.linalg.norm(run.gradients[path] - g) / np.linalg.norm(g) for run in (low, unsplit)]
        assert 1e-4 < errors[0] < 1.5 * errors[1] < 0.1, path


@pytest.mark.parametrize(("sharding", "parts"), [("replicate", 1), ("zero1", 8), ("fsdp", 8)])
def test_weights_at_rest_and_moments_are_sharded_over_context(sharding: Any, parts: int) -> None:
    """Over data 2 x context 4, by the shardings of the state; nothing is compiled."""
    program = build_program(long(llama()), on(4, data=2, data_sharding=sharding), microbatches=2)
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
    program = build_program(windows(), parallel, microbatches=1)
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
    [
        on(4, GATHER),
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (on(4, RING, 2), on(4, GROUPS), on(4, RING, tensor=2))
        ),
    ],
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
    np.testing.assert_allclose(before, unsplit, rtol=TOLERANCE)


def test_the_documents_of_the_cases_cross_chunks() -> None:
    """This keeps the comparisons above meaningful: rows have documents of one token, and some longer than a chunk."""
    segments = long_rows()["segment_ids"]
    sizes = [np.bincount(row) for row in segments]
    assert min(map(min, sizes)) == 1 and max(len(row) for row in sizes) >= 4
    assert {len(row) for row in sizes} >= {1, 2, 3}
    assert all(model.config.sequence_length == LONG for model in MODELS.values())
