"""Hybrids, whose layers differ and repeat no pattern, train on every layout as on one device."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import ONE, Trained, llama, train

from megajax.layers.config import AttentionConfig, FeedForwardBlockConfig, MixerBlockConfig, RopeConfig
from megajax.layers.segments import SegmentsConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.config import DecoderConfig

BLOCKS = {
    "M": MixerBlockConfig(mixer=AttentionConfig(heads=4, kv_heads=2, window=5, rope=RopeConfig()), dropout=0.1),
    "*": MixerBlockConfig(mixer=AttentionConfig(heads=8, kv_heads=4, rope=RopeConfig())),
    "-": FeedForwardBlockConfig(mlp=llama().stack.pattern[0].mlp),
}


def hybrid(pattern: str, **settings: object) -> DecoderConfig:
    return replace(llama(), stack=SegmentsConfig.of([BLOCKS[letter] for letter in pattern]), **settings)


MODEL = hybrid("M-M-M*-M-")


def same(actual: Trained, expected: Trained) -> None:
    np.testing.assert_allclose(actual.losses[0], expected.losses[0], rtol=1e-5)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-4)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-4)
    np.testing.assert_allclose([actual.before, actual.evaluation], [expected.before, expected.evaluation], rtol=1e-4)
    assert actual.gradients.keys() == expected.gradients.keys(), "the same arrays on every layout"
    for path, gradient in expected.gradients.items():
        np.testing.assert_allclose(actual.gradients[path], gradient, rtol=2e-4, atol=1e-5, err_msg=path)
    assert actual.padding == 0


PIPELINES = {
    "1f1b, tensor": ParallelConfig(pipeline=2, tensor=2, data=2, sequence=True),
    "interleaved": ParallelConfig(pipeline=2, virtual_stages=2, schedule="interleaved", data=1, tensor=2),
    "gpipe, uneven": ParallelConfig(pipeline=4, schedule="gpipe", layers=(1, 4, 1, 3), data=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PIPELINES.values(), ids=PIPELINES)
def test_pipelines_whose_stages_differ(parallel: ParallelConfig) -> None:
    same(train(MODEL, parallel, microbatches=4), train(MODEL, ONE, microbatches=4))
