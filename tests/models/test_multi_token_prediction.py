"""Heads that predict further ahead: what they see. tests/layouts/test_context_models.py has their layouts."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.embedding import VocabularyLoss
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan
from megajax.models.decoder.config import PredictionConfig
from megajax.models.decoder.module import DecoderLM
from megajax.models.decoder.multi_token_prediction import shifted
from megajax.models.reduction import LossReduction

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
def test_tokens_without_a_target_are_compensated(average, reweighted, expected):
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
    ahead = np.array([[10.0] * 4, [100.0] * 4], np.float32)
    zeros = np.zeros((2, 4), np.int32)
    batch = {"tokens": zeros, "labels": zeros, "loss_mask": mask}
    model = Known(np.ones((2, 4), np.float32), ahead, reweighted)
    losses = DecoderLM.loss(model, None, batch, SimpleNamespace(segments=None), LossReduction(average))
    assert float(losses.loss_sum) == pytest.approx(expected, rel=1e-6)
