"""Parts other than attention that look along a row sharded over `context`. tests/one_device.py has whole models."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from tiny_runs import LENGTH, ONE, QUICK, VOCABULARY, build_program, llama

from megajax.batch import Leaf
from megajax.job.notebook import set_up
from megajax.layers.moe.config import CapacityConfig, RouterConfig
from megajax.layers.moe.router import Routing, TokenAxes, choose, within_capacity
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.models.classifier.config import ClassHeadConfig, with_text_head
from megajax.models.decoder.multi_token_prediction import shifted
from megajax.models.presets.encoders import bert
from megajax.models.presets.vit import llava, vit, vit_tower
from megajax.models.protocol import ModelConfig
from megajax.processes.xla_options import XlaConfig
from megajax.tasks.end_of_run_samples import sample
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.training.config import EvaluationConfig

TWO = ParallelConfig(data=1, context=2)


def on_devices(sharding: SequenceSharding, local: Callable, *arrays: np.ndarray) -> list[np.ndarray]:
    """`local` of each device's part of arrays [B, T, ...] -> its results as whole rows."""
    mesh = jax.make_mesh(
        (sharding.devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[: sharding.devices]
    )
    spec = PartitionSpec(None, "context")
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    axes = (None, "seq")
    with jax.set_mesh(mesh):
        results = mapped(*(sharding.arranged(array, (*axes, *[None] * (array.ndim - 2))) for array in arrays))
    places = np.argsort(sharding.places(arrays[0].shape[1]))
    return [np.asarray(result)[:, places] for result in results]


@pytest.mark.parametrize(
    "sharding", [SequenceSharding(4), SequenceSharding(2, 1), SequenceSharding(4, 2)], ids=["plain", "zigzag", "rounds"]
)
def test_the_next_position_follows_the_row(sharding: SequenceSharding) -> None:
    draw = np.random.default_rng(0)
    x, segments = draw.integers(1, 9, (2, 32)), np.sort(draw.integers(0, 6, (2, 32)), axis=1)
    segments[:, 16:] += segments[:, 15:16] - segments[:, 16:17] + np.array([[0], [1]])  # On a border, and across it.
    layout = Layout(Plan.of(ParallelConfig(context=sharding.devices)), rows=sharding)

    def local(x: jax.Array, segments: jax.Array) -> tuple[jax.Array, ...]:
        once = shifted(layout, x, segments)
        return once, shifted(layout, once, segments), shifted(layout, x, None)

    expected = local_layout_free(x, segments)
    for actual, reference in zip(on_devices(sharding, local, x, segments), expected, strict=True):
        np.testing.assert_array_equal(actual, reference)


def local_layout_free(x: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, ...]:
    """The values one and two positions on within the document, and one on in the row."""

    def ahead(count: int, apart: np.ndarray) -> np.ndarray:
        moved = np.zeros_like(x)
        moved[:, :-count] = np.where(apart[:, count:] == apart[:, :-count], x[:, count:], 0)
        return moved

    return ahead(1, segments), ahead(2, segments), ahead(1, np.zeros_like(segments))


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_experts_count_tokens_in_the_order_of_the_row(drop: str) -> None:
    sharding, rows, experts, k = SequenceSharding(2, 1), 2, 4, 2
    router, capacity = RouterConfig(force_balance=True), CapacityConfig(factor=0.6, drop=drop)
    logits = np.random.default_rng(0).normal(size=(rows, 12, experts)).astype(np.float32)

    def local(axes: TokenAxes, logits: jax.Array) -> list[jax.Array]:
        index = axes.rows.local_index(logits.shape[1])
        flat, bias = logits.reshape(-1, experts), np.zeros(experts, np.float32)
        turns = choose(router, flat, k, bias, axes, training=True, index=index)
        best = choose(RouterConfig(), flat, k, bias, axes, training=True)
        limited: Routing = within_capacity(capacity, best, rows, experts, axes)
        return [array.reshape(rows, -1, k) for array in (turns.experts, limited.experts, limited.weights)]

    expected = jax.jit(partial(local, TokenAxes()))(logits)
    actual = on_devices(sharding, partial(local, TokenAxes(seq=("context",), rows=sharding)), logits)
    assert (np.asarray(expected[1]) == experts).any()
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])
    np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)


def ask_scores(parallel: ParallelConfig) -> tuple[list[np.ndarray], float, str | None]:
    """Logits of rows of several lengths, the loss of an evaluation, and a text, by fresh weights."""
    cfg = build_program(llama(repeats=2), parallel, microbatches=2).cfg
    tokenizer = NullTokenizerConfig(vocabulary_size=VOCABULARY)
    cfg = replace(cfg, tokenizer=tokenizer, xla=XlaConfig(options=dict(QUICK)), evaluation=EvaluationConfig(batches=1))
    run = set_up(cfg, devices=jax.devices()[: parallel.without_data()])
    draw = np.random.default_rng(0)
    logits = [run.model(draw.integers(0, VOCABULARY, (3, length))) for length in (1, 7, LENGTH)]
    answers = logits, run.evaluate(run.parts.splits.valid), sample(run, Path())
    run.close()
    return answers


@pytest.mark.slow
def test_a_run_answers_in_a_notebook() -> None:
    """Outside a step the compiler shards rows, in plain chunks of any length."""
    actual, expected = ask_scores(replace(TWO, pipeline=2, context_strategy="ring")), ask_scores(ONE)
    for scores, expected_scores in zip(actual[0], expected[0], strict=True):
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
    # A text has a time limit, so that the other may be longer.
    assert actual[2] is not None and expected[2] is not None and actual[2][:120] == expected[2][:120]


CLASSES = ClassHeadConfig(classes=3, pooling="last")


@dataclass(frozen=True, kw_only=True)
class OwnConfig(ModelConfig):
    """A user's model, which does not declare `allows_context`."""

    stack: StackConfig = field(default_factory=lambda: llama().stack)

    def schema(self) -> dict[str, Leaf]:
        return {"tokens": Leaf("int32", (LENGTH,), ("seq",))}

    def build(self, layout: Layout) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    "model",
    [
        vit("b16"),
        llava(llama(), vit_tower("b16"), image_token=0),
        with_text_head(bert("base"), CLASSES),
        with_text_head(llama(), CLASSES),
        OwnConfig(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_that_read_whole_rows_are_refused_by_name(model: ModelConfig) -> None:
    name = type(model).__name__
    cfg = replace(build_program(llama(), ONE, microbatches=1).cfg, model=model, parallel=TWO)
    about = [problem for problem in cfg.problems(2) if "context" in str(problem)]
    assert [problem.setting for problem in about] == ["parallel.context"]
    assert about[0].message == f"{name} needs whole rows, and parallel.context=2 cuts them"
