"""Models of two sections, the second of which reads the first, have the gradients of plain differentiation.

Their layouts are in tests/one_device.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from tiny_encoders import llava, rows_with_images, t5
from tiny_runs import ONE, QUICK, assert_close, build_program, by_plain_differentiation, place, rows, start, within

from megajax.batch import Batch
from megajax.layers.param import bind
from megajax.models.protocol import ModelConfig
from megajax.models.reduction import LossReduction
from megajax.training.gradients.staged import forward


@pytest.mark.slow
@pytest.mark.parametrize(("model", "draw"), [(t5("full"), rows), (llava(), rows_with_images)], ids=["T5", "LLaVA"])
def test_gradients_and_evaluation_equal_plain_differentiation(model: ModelConfig, draw: Callable[[int], Batch]) -> None:
    program = build_program(model, ONE, microbatches=2)

    def plain(params: Any, piece: Any) -> tuple[jax.Array, None]:
        return forward(bind(program.abstract, params), piece, None, LossReduction()).loss_sum, None

    with within(program):
        params, batch = start(program).params, place(program, draw(0))
        actual = jax.jit(program.grad_fn(), compiler_options=dict(QUICK))(params, batch, np.float32(1))
        (total, _), gradients = by_plain_differentiation(plain, params, batch)
        evaluated = jax.device_get(program.eval_step(params, batch)["loss"])
    np.testing.assert_allclose([actual.loss_sum, evaluated[0]], [total, total], rtol=1e-6)
    assert all(gradient.any() for gradient in gradients.values())
    assert_close(actual.grads, gradients, floor=1e-3)
