"""Rows sharded over `context` train like whole rows: by every strategy, and with every other axis.

Cases are in tests/context_cases.py, and `python -m benchmarks context_layouts` prints their differences.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from combinations import TOLERANCE, difference
from context_cases import CASES, LONG, MODELS, Case, apart, latent, long, long_rows, over_context, windows
from test_experts_train_alike import LOSSES, moe
from tiny_runs import ONE, Trained, build_program, differentiate, gpt, llama, start, train, within

from megajax.layers.recompute import Recompute
from megajax.mesh.config import ContextStrategy, ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.training.scoring import Scorer

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
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICKEST], ids=lambda case: case.name)
def test_every_strategy_gives_the_step_of_one_device(case: Case) -> None:
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
    "1f1b, ring, tensor": (windows(2), on(2, RING, pipeline=2, tensor=2), 4),
    "interleaved, exchange": (long(llama(repeats=4)), on(2, HEADS, **INTERLEAVED), 4),
    "gpipe, fsdp": (latent(), on(2, RING, 2, pipeline=2, data=2, schedule="gpipe", data_sharding="fsdp"), 4),
    "fsdp, ring": (long(llama()), on(4, RING, data=2, data_sharding="fsdp"), 2),
    "fsdp, exchange": (windows(), on(4, GROUPS, data=2, data_sharding="fsdp"), 2),
    "zero1": (long(gpt("selective")), on(4, RING, data=2), 2),
    "replicate": (latent(), on(4, HEADS, data=2, data_sharding="replicate"), 2),
    "tensor, sequence": (windows(), on(4, GROUPS, 2, tensor=2, sequence=True), 2),
    "tensor": (latent(), on(4, RING, tensor=2), 2),
    "experts, data": (long(moe(LOSSES)), on(2, GATHER, expert=2, data=2), 3),
    "experts, tensor, sequence": (long(moe(LOSSES)), on(2, HEADS, expert=2, tensor=2, sequence=True), 3),
    "whole experts": (long(moe(LOSSES)), on(2, RING, expert=2, tensor=2, sequence=True, expert_tensor="whole"), 3),
    "experts, pipeline": (long(moe(LOSSES)), on(2, GATHER, pipeline=2, expert=2), 3),
}
"""Name -> model, layout, microbatches."""


def has_experts(model: DecoderConfig) -> bool:
    return any(hasattr(block.mlp, "experts") for block in model.stack.pattern)


def alone(model: DecoderConfig, microbatches: int = 2) -> Trained:
    """The run of the same model on one device."""
    return train(model, ONE, microbatches=microbatches, evaluated=False, draw=long_rows)


def compare(actual: Trained, expected: Trained) -> None:
    between = difference(actual, expected)
    np.testing.assert_allclose(actual.losses[0], expected.losses[0], rtol=TOLERANCE)
    assert max(between.norm, between.gradient) <= TOLERANCE, between
    assert between.loss <= RUN, between
    assert between.padding == 0, between


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_with_other_axes(name: str) -> None:
    """A step; test_layouts_matrix.py trains further combinations, context 2 x pipeline 2 x tensor 2 by default."""
    model, parallel, microbatches = TOGETHER[name]
    # Losses that balance experts are of a microbatch.
    count = microbatches if has_experts(model) else 2
    expected = differentiate(model, ONE, microbatches=count, draw=long_rows)
    actual = apart(differentiate(model, parallel, microbatches=microbatches, draw=long_rows), expected)
    assert max(actual.loss, actual.gradient) <= TOLERANCE, actual
    assert actual.padding == 0, actual


RUNS = {
    "fsdp": (long(llama()), on(4, RING, data=2, data_sharding="fsdp"), 2),
    "experts": (long(moe(LOSSES)), on(2, GATHER, expert=2, data=2), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_three_steps_with_other_axes(name: str) -> None:
    model, parallel, microbatches = RUNS[name]
    actual = train(model, parallel, microbatches=microbatches, evaluated=False, draw=long_rows)
    compare(actual, alone(model, microbatches if has_experts(model) else 2))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [GATHER, RING])
@pytest.mark.parametrize("average", ["tokens", "microbatches"])
def test_averages_and_evaluation(strategy: ContextStrategy, average: str) -> None:
    """Mean over tokens and of microbatches' means, in data 2 x context 2, with an evaluation before and after."""
    model, layout = long(llama()), on(2, strategy, data=2)
    count = 4 if average == "tokens" else 2 * layout.data
    options = {"average": average, "draw": long_rows}
    actual, expected = train(model, layout, microbatches=2, **options), train(model, ONE, microbatches=count, **options)
    compare(actual, expected)
    assert actual.tokens == expected.tokens
    np.testing.assert_allclose([actual.before], [expected.before], rtol=TOLERANCE)
    np.testing.assert_allclose([actual.evaluation], [expected.evaluation], rtol=RUN)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [GATHER, RING, HEADS])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_does_not_change_numbers(recompute: Recompute, strategy: ContextStrategy) -> None:
    model, layout = replace(windows(), recompute=recompute), on(4, strategy)
    compare(train(model, layout, microbatches=2, evaluated=False, draw=long_rows), alone(windows()))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [on(4, RING), on(2, GATHER, pipeline=2)], ids=["ring", "pipeline"])
def test_two_layers_are_recomputed_together(parallel: ParallelConfig) -> None:
    model = long(llama(repeats=4))
    actual = train(
        replace(model, recompute="full", layers_per_checkpoint=2),
        parallel,
        microbatches=4,
        evaluated=False,
        draw=long_rows,
    )
    compare(actual, alone(model))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [GATHER, RING, HEADS, GROUPS])
def test_bfloat16_computes_in_low_precision_in_every_strategy(strategy: ContextStrategy) -> None:
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
        pytest.param(on(4, RING), marks=pytest.mark.slow),
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (on(4, RING, 2), on(4, HEADS), on(4, GROUPS), on(4, GATHER, tensor=2), on(4, RING, tensor=2))
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
