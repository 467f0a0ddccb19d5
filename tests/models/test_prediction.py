"""Heads that predict further ahead: what they see, and that a pipeline trains them like one device."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import gpt, llama, train

from megajax.mesh.config import ParallelConfig
from megajax.models.config import DecoderConfig, PredictionConfig
from megajax.models.prediction import ahead

MODELS = {
    "tied, dropout": replace(gpt(dropout=0.1), prediction=PredictionConfig(depth=2)),
    "untied": replace(llama(), prediction=PredictionConfig(depth=1, weight=0.3)),
}


def test_what_is_ahead_ends_with_the_row_and_the_document():
    x = jnp.asarray([[3, 4, 5, 6, 7]])
    np.testing.assert_array_equal(ahead(x, None), [[4, 5, 6, 7, 0]])
    apart = jnp.asarray([[0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(ahead(x, apart), [[4, 0, 6, 7, 0]])
    np.testing.assert_array_equal(ahead(ahead(x, apart), apart), [[0, 0, 7, 0, 0]])


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        pytest.param("tied, dropout", ParallelConfig(pipeline=2, data=1, schedule="1f1b"), marks=pytest.mark.slow),
        ("untied", ParallelConfig(pipeline=2, data=2, tensor=2, sequence=True, schedule="1f1b")),
    ],
)
def test_a_pipeline_trains_them_like_one_device(name, parallel):
    cfg: DecoderConfig = MODELS[name]
    expected, found = (train(cfg, each, microbatches=3, steps=1) for each in (ParallelConfig(data=1), parallel))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(found.evaluation, expected.evaluation, rtol=1e-5)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    top = max(np.abs(g).max() for g in expected.gradients.values())
    for path, g in expected.gradients.items():
        scale = max(np.abs(g).max(), 1e-3 * top)
        np.testing.assert_allclose(found.gradients[path], g, atol=1e-5 * scale, err_msg=path)
