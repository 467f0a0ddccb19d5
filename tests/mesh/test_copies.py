"""Key-value heads on more devices of `tensor` than there are heads: which device has which, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.replicated_heads import copy_heads, sum_copies
from megajax.mesh.rules import Plan

PARALLEL = ParallelConfig(data=2, tensor=4, data_sharding="zero1")
LAYOUT = Layout(Plan.of(PARALLEL))
AXES = ("layer", "embed", "kv_heads_copied", "head_dim")
W = np.random.default_rng(0).normal(size=(2, 6, 2, 3)).astype(np.float32)


def test_the_plan_names_the_axis_of_heads():
    plan = LAYOUT.plan
    assert [plan.kv_heads(heads) for heads in (1, 2, 4, 8)] == ["kv_heads_copied"] * 2 + ["kv_heads"] * 2
    assert plan.axes_in_step(AXES) == ("layer", "embed", "kv_heads", "head_dim")
    assert plan.params.spec(AXES) == PartitionSpec("pipeline", ("data", "expert", "context"), None, None)


def test_devices_that_share_a_head_are_neighbours():
    with jax.set_mesh(build_mesh(PARALLEL)):
        copies = jax.jit(lambda w: copy_heads(LAYOUT, w, AXES))(W)
        unchanged = jax.jit(lambda w: copy_heads(LAYOUT, w, AXES))(copies)
    assert copies.sharding.shard_shape(copies.shape) == (2, 6, 1, 3)
    np.testing.assert_array_equal(copies, np.repeat(W, 2, axis=2))
    np.testing.assert_array_equal(unchanged, copies)
    assert copy_heads(LAYOUT, W, AXES) is W, "without a mesh"


def test_gradients_of_copies_are_summed_explicitly_and_by_autodiff():
    g = np.random.default_rng(1).normal(size=(2, 6, 4, 3)).astype(np.float32)
    expected = g.reshape(2, 6, 2, 2, 3).sum(3)
    with jax.set_mesh(build_mesh(PARALLEL)):
        summed = jax.jit(lambda g: sum_copies(LAYOUT, g, AXES, 2))(g)
        _, pull = jax.vjp(jax.jit(lambda w: copy_heads(LAYOUT, w, AXES)), jnp.asarray(W))
        np.testing.assert_allclose(pull(jnp.asarray(g))[0], expected, rtol=1e-6)
    assert summed.sharding.is_fully_replicated
    np.testing.assert_allclose(summed, expected, rtol=1e-6)
    assert sum_copies(LAYOUT, summed, AXES, 2) is summed, "without a mesh"
