"""Moments in host memory: which, that no number changes, and that steps leave them there."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_runs import build_program, llama, place, rows, start, within

from megajax.mesh.config import ParallelConfig
from megajax.optim.config import AdamWConfig, OptimizerConfig
from megajax.optim.moments import HOST, in_host_memory
from megajax.training.program import Program
from megajax.training.state import TrainState

PARALLEL = ParallelConfig(data=2, tensor=2, data_sharding="zero1")


def made(optimizer: OptimizerConfig) -> Program:
    program = build_program(llama(), PARALLEL, microbatches=2)
    return Program.of(replace(program.cfg, optimizer=optimizer), program.mesh)


def trained(run: Program) -> TrainState:
    with within(run):
        state = start(run)
        for seed in (1, 2):
            state, _ = run.train_step(state, place(run, rows(seed)))
    return state


def test_the_largest_moments_move_until_the_fraction_is_reached():
    where = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    sizes = {"a": 10, "b": 50, "c": 40}
    shapes = {path: jax.ShapeDtypeStruct((n,), "float32") for path, n in sizes.items()}
    shardings = {"count": where, "first": dict.fromkeys(sizes, where)}

    def moved(share: float) -> set[str]:
        moved = in_host_memory(shardings, {"count": None, "first": shapes}, share)
        assert moved["count"] is where
        return {path for path, sharding in moved["first"].items() if sharding.memory_kind == HOST}

    assert [moved(share) for share in (0, 0.5, 0.6, 0.9, 1)] == [set(), {"b"}, {"b", "c"}, {"b", "c"}, set(sizes)]


@pytest.mark.slow
def test_training_is_bitwise_the_same():
    on_device, away = (trained(made(AdamWConfig(offload=share))) for share in (0.0, 1.0))
    kinds = {
        leaf.sharding.memory_kind for name, part in away.optimizer.items() if name != "count" for leaf in part.values()
    }
    assert kinds == {HOST}
    assert {leaf.sharding.memory_kind for leaf in away.params.values()} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(away), jax.device_get(on_device))


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_fraction_is_from_0_to_1(share):
    assert [problem.setting for problem in AdamWConfig(offload=share).problems()] == ["offload"]
