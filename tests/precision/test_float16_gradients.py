"""Gradients in float16: the loss scale multiplies them before they are rounded."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from tiny_runs import ONE, QUICK, VOCABULARY, build_program, llama, place, rows, start, within

from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import PredictionConfig

LARGE = 16_000
"""Rows of the head. At 192 tokens in a microbatch a softmax of them, times 1 / 192, is 3e-7, of which float16 keeps 2
bits; the loss scale moves it to where it keeps 11."""
SCALE = 2.0**14


AHEAD = PredictionConfig(weight=0.3)


@cache
def gradients(
    parallel: ParallelConfig, compute: str, average: str, scale: float, prediction: PredictionConfig | None
) -> dict[str, np.ndarray]:
    """Of the mean loss, by path, from weights representable in float16; in both programs the scale is on the mean."""
    model = replace(llama(), vocabulary_size=LARGE, loss_chunk=192, prediction=prediction)
    run = build_program(model, parallel, microbatches=2, average=average, compute=compute)
    with within(run):
        params = {path: np.float32(np.float16(w)) for path, w in start(run).params.items()}
        params, batch = jax.device_put(params, run.shardings.params), place(run, rows())
        scale *= 1.0 if average == "microbatches" else 2.0**-8
        arguments = params, batch, np.float32(scale)
        out = jax.jit(run.grad_fn()).lower(*arguments).compile(compiler_options=dict(QUICK))(*arguments)
        return {path: np.asarray(g) / (scale * float(out.weight_sum)) for path, g in out.grads.items()}


def off(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    "parallel",
    [ONE, pytest.param(ParallelConfig(pipeline=2, data=1), marks=pytest.mark.slow)],
    ids=["one device", "pipeline"],
)
@pytest.mark.parametrize("average", ["microbatches", pytest.param("tokens", marks=pytest.mark.slow)])
@pytest.mark.parametrize("prediction", [None, pytest.param(AHEAD, marks=pytest.mark.slow)], ids=["next", "ahead"])
def test_the_scale_comes_before_the_rounding(parallel, average, prediction):
    """Of rows of the head without a label, whose gradients are the smallest, and of everything behind them."""
    expected = gradients(ONE, "float32", average, 1.0, prediction)
    actual = gradients(parallel, "float16", average, SCALE, prediction)
    # Rounding to 11 bits is off by at most 2^-12; these are sums of rounded numbers.
    assert off(actual["head"][VOCABULARY:LARGE], expected["head"][VOCABULARY:LARGE]) < 2**-10
    for path, g in expected.items():
        assert off(actual[path], g) < 2**-7, path
