"""The blocks of the families of 2025 on stages and on parts of rows: losses and gradients of one device."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import ONE, differentiate, llama

from megajax.layers.stack.config import SegmentsConfig
from megajax.mesh.config import ParallelConfig
from tests.layers.test_variant_layouts import FAMILIES

MODEL = replace(llama(), stack=SegmentsConfig.of(FAMILIES), logit_cap=3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data=1, pipeline=2, context=2),
        ParallelConfig(data=1, context=2, context_strategy="ring"),
        ParallelConfig(data=1, pipeline=2, tensor=2, sequence=True),
    ],
    ids=["pipeline and context", "ring", "pipeline and tensor"],
)
def test_losses_and_gradients_equal_those_of_one_device(parallel: ParallelConfig) -> None:
    expected, actual = (differentiate(MODEL, layout, microbatches=2) for layout in (ONE, parallel))
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    assert actual.gradients.keys() == expected.gradients.keys() and actual.padding == 0
    top = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    for path, gradient in expected.gradients.items():
        np.testing.assert_allclose(actual.gradients[path], gradient, atol=1e-5 * top, err_msg=path)
