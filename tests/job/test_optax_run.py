"""Optimizers of optax: how their state is sharded. Their runs on several layouts: test_stops_and_resumes.py."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from tiny_runs import build_program, llama

from megajax.mesh.config import ParallelConfig
from megajax.optim.config import OptaxConfig
from megajax.training.program import Program
from tests.docs.blocks import ROOT, blocks

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


def test_factored_state_is_sharded_over_stages_and_moments_like_their_weights() -> None:
    layout = ParallelConfig(data=2, pipeline=2, layers=(1, 2), data_sharding="zero1")
    program = build_program(llama(repeats=3), layout, microbatches=2)
    cfg = OptaxConfig(make="optax:adafactor", settings={"min_dim_size_to_factor": 4, "momentum": 0.9})
    program = Program.of(program.cfg.but(optimizer=cfg), program.mesh)
    like, weights = program.state_like().optimizer, program.state_like().params
    (row,), (moment,) = ([part for name, part in like.items() if name.endswith(end)] for end in ("v_row", "ema"))
    up = "stack.blocks.0.mlp.up"
    assert row[up].shape == (4, 32) and tuple(row[up].sharding.spec) == ("pipeline", None)
    assert all(moment[path].sharding == program.step_parts.gradient_shardings[path] for path in weights)
    assert tuple(moment[up].sharding.spec) == ("pipeline", ("data", "expert", "context"), "tensor")
