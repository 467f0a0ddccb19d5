"""A forward of one microbatch beside a backward of another: the gradients of one after the other."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_pipeline_executor import grads_of
from tiny_runs import build_program, llama

from megajax.mesh.config import ParallelConfig
from megajax.pipeline.executor import tick_loops
from megajax.pipeline.schedule import build
from megajax.pipeline.side_by_side import full_ticks
from megajax.training.program import Program

PIPELINE = ParallelConfig(pipeline=2, data=2, tensor=2, sequence=True)


def two_of(one: Program) -> Program:
    return Program.of(one.cfg.but(batch=replace(one.cfg.batch, side_by_side=2)), one.mesh)


@pytest.mark.slow
def test_a_forward_beside_a_backward_has_the_gradients_of_one_after_the_other() -> None:
    """There are padding rows and NaN in every buffer: neither reads what the other writes."""
    one = build_program(llama("selective", repeats=5), PIPELINE, microbatches=6)
    two = two_of(one)
    assert full_ticks(one.schedule_of(6)) == range(3, 6)
    (expected,), (actual, filled) = grads_of(one, (0, 1)), grads_of(two, (0, 1), (np.nan, 1))
    jax.tree.map(np.testing.assert_array_equal, filled, actual)
    assert actual.metrics == expected.metrics
    for path, g in expected.grads.items():
        np.testing.assert_allclose(actual.grads[path], g, rtol=1e-5, atol=1e-6 * np.abs(g).max(), err_msg=path)


def test_ticks_with_both_kinds_on_every_stage_are_a_loop() -> None:
    schedule = build("1f1b", stages=4, microbatches=12, loss_wait=1)
    assert full_ticks(schedule) == range(7, 12)
    assert not full_ticks(build("1f1b", stages=4, microbatches=7, loss_wait=1))
    loops = tick_loops(schedule, (7, 12))
    (full,) = [loop for loop in loops if loop.start == 7]
    assert full.stop == 12 and full.busy(schedule.forward, None).all() and full.busy(schedule.backward, None).all()
    assert [loop.start for loop in loops[1:]] == [loop.stop for loop in loops[:-1]]
