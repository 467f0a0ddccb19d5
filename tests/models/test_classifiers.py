"""BERT and decoders with heads that classify texts: their numbers. tests/one_device.py has layouts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from tiny_encoders import CLASSES, HEADS, LAST, classifier, read_by, texts
from tiny_runs import LENGTH, ROWS

from megajax.config.compose import problems_of
from megajax.layers.param import bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.classifier.config import (
    TextClassifierConfig,
    with_text_head,
)
from megajax.models.classifier.module import POOLINGS
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import facts_of
from megajax.models.reduction import LossReduction


@pytest.mark.parametrize("name", HEADS)
def test_heads_have_the_loss_that_numpy_computes_from_their_scores(name):
    rows, model = read_by(name)(0), random_values(classifier(name))
    shape = (ROWS * model.cfg.head.sequences(), LENGTH, model.cfg.hidden)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    ctx = model.context(rows)
    sums = model.loss(x, rows, ctx, LossReduction()).metrics
    outputs = model.outputs(x, rows, ctx)
    scores, weights = np.asarray(outputs["scores"], np.float64), rows["loss_mask"]
    if name == "number":
        losses = (scores - rows["labels"]) ** 2
    elif name == "span":
        assert (scores[rows["segment_ids"] == 0] < -1e8).all()
        losses = sum(cross_entropy(scores[..., place], rows["starts"]) for place in (0, 1)) / 2
    else:
        losses = cross_entropy(scores, rows["labels"])
        correct = np.sum((scores.argmax(-1) == rows["labels"]) * weights)
        np.testing.assert_allclose(float(sums["accuracy"][0]), correct)
    np.testing.assert_allclose(outputs["losses"], losses, 1e-5)
    np.testing.assert_allclose(
        [float(total) for total in sums["loss"]], [np.sum(losses * weights), weights.sum()], 1e-5
    )


def abstract(cfg: TextClassifierConfig):
    return nnx.eval_shape(lambda: cfg.build(Layout(Plan.of(ParallelConfig()))))


def random_values(cfg: TextClassifierConfig):
    """The model with random weights, biases too."""
    model, rng = abstract(cfg), np.random.default_rng(0)
    values = {path: rng.normal(0, 0.06, spec.shape).astype(np.float32) for path, spec in specs(model).items()}
    return bind(model, jax.tree.map(jnp.asarray, values))


def cross_entropy(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    exponents = np.exp(scores - scores.max(-1, keepdims=True))
    return -np.log(np.take_along_axis(exponents, labels[:, None], 1)[:, 0] / exponents.sum(-1))


def test_padding_changes_nothing():
    model, rows = random_values(classifier("classes")), texts(0)
    forward = jax.jit(lambda tokens: model(tokens, segment_ids=rows["segment_ids"]))
    changed = np.where(rows["segment_ids"] > 0, rows["tokens"], 7)
    np.testing.assert_allclose(forward(rows["tokens"]), forward(changed), atol=1e-6)


def test_poolings_ignore_padding():
    x = jnp.arange(24.0).reshape(2, 4, 3)
    segments = jnp.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    for name, expected in {
        "first": [x[0, 0], x[1, 0]],
        "last": [x[0, 1], x[1, 3]],
        "mean": [x[0, :2].mean(0), x[1].mean(0)],
    }.items():
        np.testing.assert_allclose(POOLINGS[name](x, segments), np.stack(expected))


@pytest.mark.parametrize("name", [*HEADS, "decoder"])
def test_a_row_has_the_positions_of_all_its_sequences(name):
    cfg = classifier(name)
    assert facts_of(cfg) is cfg and cfg.row_positions() == LENGTH * cfg.head.sequences()


def test_problems_are_reported():
    decoder: DecoderConfig = tiny_runs.llama()
    messages = [str(problem) for problem in problems_of(with_text_head(decoder, CLASSES))]
    assert len(messages) == 1 and "the first token of a causal model sees no other token" in messages[0]
    assert not problems_of(with_text_head(decoder, LAST))
    assert not classifier("classes").allows_context() and not with_text_head(decoder, LAST).allows_context()
    for head, place in ((replace(CLASSES, classes=1), "classes"), (replace(CLASSES, dropout=1.0), "dropout")):
        assert [problem.setting for problem in problems_of(head)] == [place]
