"""The dtypes in which gradients are computed, accumulated and sent, by layout; the loss scale of float16."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import ONE, QUICK, VOCABULARY, build_program, llama, place, rows, start, within

from megajax.batch import Grads, Params
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.decoder.config import PredictionConfig
from megajax.training.program import Program


def with_precision(data_sharding: Any, **precision: Any) -> Program:
    """Two microbatches on two devices, computed in bfloat16, with gradients in float32 by default."""
    parallel = ParallelConfig(data=2, data_sharding=data_sharding)
    cfg = build_program(llama(), parallel, microbatches=2, compute="bfloat16").cfg
    cfg = cfg.but(precision=replace(cfg.precision, **precision))
    return Program.of(cfg, build_mesh(parallel, jax.devices()[:2]))


def summed(program: Program) -> Grads:
    """Loss and gradients at the start."""
    with within(program):
        arguments = start(program).params, place(program, rows()), np.float32(1)
        lowered = jax.jit(program.grad_fn()).lower(*arguments)
        return jax.device_get(lowered.compile(compiler_options=dict(QUICK))(*arguments))


def gradients(data_sharding: Any, **precision: Any) -> tuple[Params, Program]:
    """See `with_precision`."""
    program = with_precision(data_sharding, **precision)
    return summed(program).grads, program


def distance(first: Params, second: Params, program: Program) -> float:
    """Largest difference between gradients of a layer's matrices, over the largest gradient of the matrix."""
    matrices = [path for path, spec in program.declared.items() if spec.role == "weight" and spec.layers]
    return max(float(np.abs(first[path] - second[path]).max() / np.abs(second[path]).max()) for path in matrices)


@pytest.fixture(scope="module")
def once_a_step() -> tuple[Params, Program]:
    return gradients("zero1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "least", "most"), [("", 0, 1e-6), ("reduce", 1e-4, 2e-2), ("gradients", 1e-4, 2e-2)]
)
def test_fsdp_sends_gradients_in_the_configured_dtype(
    setting: str, least: float, most: float, once_a_step: tuple[Params, Program]
) -> None:
    """In float32 as precise as one reduction a step: 2.6e-3 off where the sums of layers are in bfloat16."""
    layer_by_layer, program = gradients("fsdp", **({setting: "bfloat16"} if setting else {}))
    assert least <= distance(layer_by_layer, once_a_step[0], program) < most


def test_weights_are_not_rounded_to_the_dtype_of_gradients() -> None:
    """The training loss equals that of evaluation; 2e-5 off where weights are rounded to bfloat16."""
    program = with_precision("zero1", compute="float32", gradients="bfloat16")
    actual = summed(program)
    with within(program):
        loss, weight = program.eval_step(start(program).params, place(program, rows()))["loss"]
    np.testing.assert_allclose(actual.loss_sum / actual.weight_sum, loss / weight, rtol=1e-6)


LARGE = 16_000
"""Rows of the head. At 192 tokens in a microbatch a softmax of them, times 1 / 192, is 3e-7, of which float16 keeps 2
bits; the loss scale moves it to where it keeps 11."""
SCALE = 2.0**14

AHEAD, PIPELINE = PredictionConfig(weight=0.3), ParallelConfig(pipeline=2, data=1)


@cache
def mean_gradients(
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
    ("parallel", "average", "prediction"),
    [
        (ONE, "microbatches", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(ONE, "tokens", AHEAD), (PIPELINE, "microbatches", AHEAD), (PIPELINE, "tokens", None)]
        ),
    ],
)
def test_the_scale_comes_before_the_rounding(parallel, average, prediction):
    """Of rows of the head without a label, whose gradients are the smallest, and of everything behind them."""
    expected = mean_gradients(ONE, "float32", average, 1.0, prediction)
    actual = mean_gradients(parallel, "float16", average, SCALE, prediction)
    # Rounding to 11 bits is off by at most 2^-12; these are sums of rounded numbers.
    assert off(actual["head"][VOCABULARY:LARGE], expected["head"][VOCABULARY:LARGE]) < 2**-10
    for path, g in expected.items():
        assert off(actual[path], g) < 2**-7, path
