"""Runs whose optimizer is an optax transformation: the same on any layout. Stops: test_stops_and_resumes.py."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_runs import ONE, QUICK, build_program, in_order, llama, place, rows, start, within

from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.optim.config import OptaxConfig
from megajax.training.program import Program
from tests.docs.blocks import ROOT, blocks

FILE = str(Path(__file__))
LAYOUTS = {
    "uneven pipeline": ParallelConfig(data=2, pipeline=2, layers=(1, 2), data_sharding="zero1"),
    "fsdp": ParallelConfig(data=2, data_sharding="fsdp"),
    "tensor and sequence": ParallelConfig(data=1, tensor=2, sequence=True),
}


printed: dict[str, Any] = {}
exec(next(block.text for block in blocks(ROOT / "docs/optimizers.md") if "my_optimizer.py" in block.text[:20]), printed)
muon = printed["muon"]
"""The one in the docs."""


def normed_momentum(learning_rate: Any) -> optax.GradientTransformation:
    """An example of a user's own: momentum, divided by its norm in each weight."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree.map(lambda m: -learning_rate * m / jnp.sqrt(jnp.sum(jnp.square(m))), state), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "adafactor": OptaxConfig(make="optax:adafactor", settings={"min_dim_size_to_factor": 4}, weight_decay=0.1),
    "muon": OptaxConfig(make=f"{FILE}:muon", offload=0.5),
    "a user's": OptaxConfig(make=f"{FILE}:normed_momentum", trainable=("*.mixer.*", "*gain", "head")),
}


@cache
def trained(name: str, parallel: ParallelConfig) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of three steps and weights in the order of layers.

    Rows that are no layer stay zeros, and a fourth step without a finite loss changes nothing.
    """
    cfg = build_program(llama(repeats=3), parallel, microbatches=2).cfg.but(optimizer=OPTIMIZERS[name])
    program = Program.of(cfg, build_mesh(parallel))
    with within(program):
        state = start(program)
        first = program.optimizer.init({path: state.params[path] for path in program.optimizer.declared})
        state = replace(state, optimizer=jax.device_put(first, program.shardings.optimizer))
        batch = place(program, rows())
        step: Any = program.train_step
        step = step.lower(state, batch).compile(compiler_options=dict(QUICK))
        reported = []
        for _ in range(3):
            state, metrics = step(state, batch)
            reported.append(float(metrics["loss"]))
        before = jax.device_get((state.params, state.optimizer))
        state, metrics = step(state, {**batch, "loss_mask": batch["loss_mask"] * np.nan})
    assert metrics["skipped"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.optimizer)), before)
    assert all(in_order(program, part)[1] == 0 for part in state.optimizer.values() if isinstance(part, dict))
    weights, padding = in_order(program, state.params)
    assert padding == 0
    return reported, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("adafactor", "uneven pipeline"),
        ("adafactor", "fsdp"),
        ("muon", "tensor and sequence"),
        ("a user's", "uneven pipeline"),
    ],
)
def test_training_is_the_same_on_any_layout(name: str, layout: str) -> None:
    (expected_losses, expected), (actual, weights) = trained(name, ONE), trained(name, LAYOUTS[layout])
    np.testing.assert_allclose(actual, expected_losses, rtol=1e-5)
    assert len(set(actual)) == 3
    for path, x in weights.items():
        np.testing.assert_allclose(x, expected[path], rtol=0, atol=1e-5 * np.abs(expected[path]).max(), err_msg=path)


def test_factored_state_is_sharded_over_stages_and_moments_like_their_weights() -> None:
    program = build_program(llama(repeats=3), LAYOUTS["uneven pipeline"], microbatches=2)
    cfg = replace(OPTIMIZERS["adafactor"], settings={"min_dim_size_to_factor": 4, "momentum": 0.9})
    program = Program.of(program.cfg.but(optimizer=cfg), program.mesh)
    like, weights = program.state_like().optimizer, program.state_like().params
    (row,), (moment,) = ([part for name, part in like.items() if name.endswith(end)] for end in ("v_row", "ema"))
    up = "stack.blocks.0.mlp.up"
    assert row[up].shape == (4, 32) and tuple(row[up].sharding.spec) == ("pipeline", None)
    assert all(moment[path].sharding == program.step_parts.gradient_shardings[path] for path in weights)
    assert tuple(moment[up].sharding.spec) == ("pipeline", ("data", "expert", "context"), "tensor")
