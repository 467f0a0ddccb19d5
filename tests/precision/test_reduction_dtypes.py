"""The dtypes in which gradients are computed, accumulated and sent, by layout."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import QUICK, build_program, llama, place, rows, start, within

from megajax.batch import Grads, Params
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
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
        params, batch = start(program).params, place(program, rows())
        lowered = jax.jit(lambda: program.grad_fn()(params, batch, np.float32(1))).lower()
        return jax.device_get(lowered.compile(compiler_options=dict(QUICK))())


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


def test_fsdp_sends_gradients_in_float32(once_a_step: tuple[Params, Program]) -> None:
    """Layer by layer, and yet as precise as one reduction a step: 2.6e-3 off where those sums are in bfloat16."""
    layer_by_layer, program = gradients("fsdp")
    assert distance(layer_by_layer, once_a_step[0], program) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["reduce", "gradients"])
def test_fsdp_sends_gradients_in_the_configured_dtype(setting: str, once_a_step: tuple[Params, Program]) -> None:
    rounded, program = gradients("fsdp", **{setting: "bfloat16"})
    assert 1e-4 < distance(rounded, once_a_step[0], program) < 2e-2


def test_weights_are_not_rounded_to_the_dtype_of_gradients() -> None:
    """The training loss equals that of evaluation; 2e-5 off where weights are rounded to bfloat16."""
    program = with_precision("zero1", compute="float32", gradients="bfloat16")
    actual = summed(program)
    with within(program):
        loss, weight = program.eval_step(start(program).params, place(program, rows()))["loss"]
    np.testing.assert_allclose(actual.loss_sum / actual.weight_sum, loss / weight, rtol=1e-6)
