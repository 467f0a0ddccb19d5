"""Shardings by logical axes: with a mesh, inside manual code and without either; and copies of key-value heads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.mesh.collectives import gather_shards, moved_axes, reduce_shards
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout, exact, exact_on_cpus
from megajax.mesh.mesh import build_mesh, free_axes, manual_axes
from megajax.mesh.replicated_heads import copy_heads, sum_copies
from megajax.mesh.sharding_rules import Plan

PARALLEL = ParallelConfig(data=2, tensor=2, data_sharding="fsdp", sequence=True)
LAYOUT, PLAN = Layout(Plan.of(PARALLEL)), Plan.of(PARALLEL)
AXES = ("embed", "mlp")
X = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)


def test_without_a_mesh_everything_is_the_identity():
    x = jnp.asarray(X)
    assert LAYOUT.act(x, "batch", "seq_residual", "embed") is x
    assert LAYOUT.gather(x[0], AXES) is x[0] or np.array_equal(LAYOUT.gather(x[0], AXES), x[0])
    assert LAYOUT.free_axes("batch", "vocab") == ()
    np.testing.assert_array_equal(LAYOUT.island(lambda a: a + 1, (AXES,), AXES)(x[0]), x[0] + 1)
    assert LAYOUT.zeros((2, 3), jnp.int32, "batch", None).dtype == jnp.int32
    assert free_axes() == manual_axes() == {}


def test_an_array_needs_an_axis_for_each_dimension():
    with pytest.raises(ValueError, match=r"2 logical axes .* shape \(4, 6, 8\)"):
        LAYOUT.act(jnp.asarray(X), "batch", "embed")


def test_act_constrains_the_sharding():
    with jax.set_mesh(build_mesh(PARALLEL)):
        assert LAYOUT.free_axes("batch", "vocab") == ("data", "tensor")
        constrained = jax.jit(lambda x: LAYOUT.act(x, "batch", "seq_residual", "embed"))(X)
    assert constrained.addressable_shards[0].data.shape == (2, 3, 8)
    np.testing.assert_array_equal(constrained, X)


def test_manual_axes_are_dropped():
    mesh = build_mesh(PARALLEL)

    def local(x):
        assert manual_axes() == {"data": 2}
        assert "data" not in free_axes()
        assert LAYOUT.free_axes("batch", "vocab") == ("tensor",)
        inner = LAYOUT.island(
            lambda part: part * jnp.float32(part.size),
            (("batch", "seq_residual", "embed"),),
            ("batch", "seq_residual", "embed"),
        )
        return inner(LAYOUT.act(x, "batch", "seq_residual", "embed"))

    mapped = jax.shard_map(
        local, mesh=mesh, axis_names={"data"}, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    with jax.set_mesh(mesh):
        actual = jax.jit(mapped)(X)
    # Each device of the island has half the rows and half the sequence.
    np.testing.assert_array_equal(actual, X * (2 * 3 * 8))


def test_gather_and_reduce_are_inverse():
    """embed [6] over data: gathered it is whole, and its transpose sums the cotangents of both copies."""
    mesh = build_mesh(PARALLEL)
    w, dy = X[0], np.stack([X[1], X[2]])

    def local(w, dy):
        y, pull = jax.vjp(lambda w: LAYOUT.gather(w, AXES), w)
        return y[None], pull(dy[0])[0]

    specs = PLAN.params.spec(AXES, keep=("data",))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        axis_names={"data", "expert", "context"},
        in_specs=(specs, P("data")),
        out_specs=(P("data"), specs),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        y, dw = jax.jit(mapped)(w, dy)
    np.testing.assert_array_equal(y, np.stack([w, w]))
    np.testing.assert_array_equal(dw, dy.sum(0))


def test_explicit_moves():
    moves = moved_axes(PLAN.params, PLAN.compute, ("layer", "embed", "mlp"))
    assert moves == ((1, "data"), (1, "expert"), (1, "context"))
    assert moved_axes(PLAN.compute, PLAN.params, AXES) == ()
    mesh = build_mesh(ParallelConfig(data=2, tensor=2))
    shard_moves = ((0, "data"), (0, "tensor"), (1, "context"))

    def local(x):
        gathered = gather_shards(x, shard_moves)
        return (
            gathered[None],
            reduce_shards(gathered, ((0, "data"), (0, "tensor"))),
            reduce_shards(x, (), also=("data", "tensor")),
        )

    out = (P(("data", "tensor")), P(("data", "tensor")), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(("data", "tensor")), out_specs=out, check_vma=False)
    gathered, summed, total = jax.jit(mapped)(X)
    np.testing.assert_array_equal(gathered, np.stack([X] * 4))
    np.testing.assert_array_equal(summed, 4 * X)
    np.testing.assert_array_equal(total, X.sum(0, keepdims=True))


COPYING = ParallelConfig(data=2, tensor=4, data_sharding="zero1")
COPIES = Layout(Plan.of(COPYING))
HEADS = ("layer", "embed", "kv_heads_copied", "head_dim")
HEADS_OF_TWO = np.random.default_rng(0).normal(size=(2, 6, 2, 3)).astype(np.float32)


def test_the_plan_names_the_axis_of_heads():
    plan = COPIES.plan
    assert [plan.kv_heads(heads) for heads in (1, 2, 4, 8)] == ["kv_heads_copied"] * 2 + ["kv_heads"] * 2
    assert plan.axes_in_step(HEADS) == ("layer", "embed", "kv_heads", "head_dim")
    assert plan.params.spec(HEADS) == P("pipeline", ("data", "expert", "context"), None, None)


def test_devices_that_share_a_head_are_neighbours():
    with jax.set_mesh(build_mesh(COPYING)):
        copies = jax.jit(lambda w: copy_heads(COPIES, w, HEADS))(HEADS_OF_TWO)
        unchanged = jax.jit(lambda w: copy_heads(COPIES, w, HEADS))(copies)
    assert copies.sharding.shard_shape(copies.shape) == (2, 6, 1, 3)
    np.testing.assert_array_equal(copies, np.repeat(HEADS_OF_TWO, 2, axis=2))
    np.testing.assert_array_equal(unchanged, copies)
    assert copy_heads(COPIES, HEADS_OF_TWO, HEADS) is HEADS_OF_TWO, "without a mesh"


def test_gradients_of_copies_are_summed_explicitly_and_by_autodiff():
    g = np.random.default_rng(1).normal(size=(2, 6, 4, 3)).astype(np.float32)
    expected = g.reshape(2, 6, 2, 2, 3).sum(3)
    with jax.set_mesh(build_mesh(COPYING)):
        summed = jax.jit(lambda g: sum_copies(COPIES, g, HEADS, 2))(g)
        _, pull = jax.vjp(jax.jit(lambda w: copy_heads(COPIES, w, HEADS)), jnp.asarray(HEADS_OF_TWO))
        np.testing.assert_allclose(pull(jnp.asarray(g))[0], expected, rtol=1e-6)
    assert summed.sharding.is_fully_replicated
    np.testing.assert_allclose(summed, expected, rtol=1e-6)
    assert sum_copies(COPIES, summed, HEADS, 2) is summed, "without a mesh"


def test_a_barrier_on_cpus_leaves_gradients_as_they_are():
    """Programs of `exact`, which GPUs run, have none."""

    def loss(product, x, w):
        return jnp.square(product("bsd,df->bsf", jax.nn.silu(x), w)).sum()

    inputs = jnp.asarray(X / 100), jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)
    steps = [jax.jit(jax.grad(partial(loss, product), (0, 1))) for product in (exact, exact_on_cpus)]
    assert [step.lower(*inputs).as_text().count("optimization_barrier") for step in steps] == [0, 1]
    for plain, apart in zip(*(step(*inputs) for step in steps), strict=True):
        np.testing.assert_array_equal(plain, apart)
