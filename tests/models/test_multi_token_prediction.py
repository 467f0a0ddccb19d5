"""Heads that predict further ahead: what they see. tests/layouts/test_context_models.py has their layouts."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.batch import Grads
from megajax.layers.embedding import VocabularyLoss
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.decoder.config import PredictionConfig
from megajax.models.decoder.module import DecoderLM
from megajax.models.decoder.multi_token_prediction import shifted
from megajax.models.reduction import LossReduction, quotient
from megajax.training.step import mean_gradients

LAYOUT = Layout(Plan.of(ParallelConfig()))
"""Without a mesh everything is on one device."""


def test_predictions_end_with_the_row_and_the_document():
    x = jnp.asarray([[3, 4, 5, 6, 7]])
    np.testing.assert_array_equal(shifted(LAYOUT, x, None), [[4, 5, 6, 7, 0]])
    apart = jnp.asarray([[0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(shifted(LAYOUT, x, apart), [[4, 0, 6, 7, 0]])
    np.testing.assert_array_equal(shifted(LAYOUT, shifted(LAYOUT, x, apart), apart), [[0, 0, 7, 0, 0]])


class Known:
    """A model with given losses of every token, [B, S] of its own head and of one ahead."""

    def __init__(self, main: np.ndarray, ahead: np.ndarray, reweighted: str):
        self.cfg = SimpleNamespace(prediction=PredictionConfig(weight=0.5, reweighted=reweighted))
        self.main, self.ahead, self.layout = main, ahead, LAYOUT

    def final_norm(self, x):
        return self.main

    def mtp_states(self, x, tokens, ctx):
        return [self.ahead]

    def token_loss(self, losses, batch, weights):
        return self.vocabulary_loss(losses, batch["labels"], weights)

    def vocabulary_loss(self, losses, labels, weights):
        total = jnp.sum(losses * weights)
        return VocabularyLoss(total, {"loss": total})


@pytest.mark.parametrize(
    ("average", "reweighted", "expected"),
    [
        # Row 0 counts 3 tokens, 2 of them one ahead; row 1 counts 2, one of them ahead.
        ("tokens", "rows", 5 + 0.5 * (10 * 2 * 3 / 2 + 100 * 1 * 2 / 1)),
        ("tokens", "microbatches", 5 + 0.5 * (10 * 2 + 100 * 1) * 5 / 3),
        ("microbatches", "rows", 5 / 5 + 0.5 * (10 * 2 + 100 * 1) / 3),
    ],
)
@pytest.mark.parametrize("factor", [1, 100, 0.01, 1e-9])
def test_tokens_without_a_target_are_compensated(average, reweighted, expected, factor):
    """A common factor of all weights changes neither the mean loss nor the metrics."""
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
    ahead = np.array([[10.0] * 4, [100.0] * 4], np.float32)
    zeros = np.zeros((2, 4), np.int32)
    batch = {"tokens": zeros, "labels": zeros, "loss_mask": mask * np.float32(factor)}
    model = Known(np.ones((2, 4), np.float32), ahead, reweighted)
    losses = DecoderLM.loss(model, None, batch, SimpleNamespace(segments=None), LossReduction(average))
    weight = 5 if average == "tokens" else 1
    assert float(losses.weight_sum) == pytest.approx(weight * (factor if average == "tokens" else 1), rel=1e-6)
    assert float(losses.loss_sum / losses.weight_sum) == pytest.approx(expected / weight, rel=1e-6)
    means = {name: float(total / counted) for name, (total, counted) in losses.metrics.items()}
    ahead = (10 * 3 + 100 * 2) / 5 if (average, reweighted) == ("tokens", "rows") else (10 * 2 + 100) / 3
    assert means == pytest.approx({"loss": 1, "loss_2_ahead": ahead}, rel=1e-5)


@pytest.mark.parametrize("average", ["tokens", "microbatches"])
def test_rows_without_labels_have_no_loss_and_no_part_in_it(average):
    reduction, losses = LossReduction(average), jnp.array([[2.0, 4.0]])
    for weights in (jnp.zeros((1, 2)), jnp.full((1, 2), 1e-12), jnp.ones((1, 2))):
        total, weight, metrics = reduction(losses, weights)
        means = mean_gradients(Grads(total, weight, {"w": total}, metrics, {}), jnp.float32(1))
        mean = quotient(*metrics["loss"])
        if weights.sum() == 0:
            assert float(means["w"]) == 0 and np.isnan(mean)
        else:
            assert float(means["w"]) == pytest.approx(3) and float(mean) == pytest.approx(3)
