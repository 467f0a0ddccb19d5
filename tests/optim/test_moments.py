"""Moments stored as float16, their rounding and range over twenty updates; and moments in host memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.layers.param import Normal, ParamSpec
from megajax.optim.config import AdamWConfig, LionConfig, MuonConfig
from megajax.optim.moments import HOST, in_host_memory
from megajax.optim.optimizer import constant_rates
from megajax.precision.cast import from_float16, to_float16

SHAPES = {"b": (6, 40), "a": (64,), "never": (3, 3)}
DECLARED = {
    path: ParamSpec(path, shape, ("embed", "mlp")[: len(shape)], Normal(0.02), "weight", path, ())
    for path, shape in SHAPES.items()
}
LR, STEPS = 1e-2, 20


def gradients(step: int, orders: int) -> dict[str, np.ndarray]:
    """Elements of a weight differ in size by up to so many orders of magnitude; those of one weight are 0."""
    size, noise = np.random.default_rng(0), np.random.default_rng(1 + step)
    weights = {}
    for path, shape in SHAPES.items():
        scale = 10.0 ** size.uniform(1 - orders, 1, shape)
        weights[path] = (scale * (0.5 + noise.normal(size=shape))).astype(np.float32)
    weights["never"][:] = 0
    return weights


def run(cfg, steps: int = STEPS, orders: int = 7):
    optimizer = cfg.build(DECLARED)
    params = {path: jnp.zeros(shape) for path, shape in SHAPES.items()}
    state, path = optimizer.init(params), []
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p, rates=constant_rates(LR)))
    for step in range(steps):
        params, state = update(gradients(step, orders), state, params)
        path.append(params)
    return path, state


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_twenty_updates_follow_those_with_float32_moments(beta2):
    settings = {"beta2": beta2, "epsilon": 1e-15, "weight_decay": 0.0}
    exact, _ = run(AdamWConfig(**settings))
    weights, state = run(AdamWConfig(moments="float16", **settings))
    for step, (now, wanted) in enumerate(zip(weights, exact, strict=True), start=1):
        for path in SHAPES:
            # Each of two moments is rounded by up to 2^-11 a step, which an average forgets after about ten steps; an
            # update is about one learning rate.
            off = np.abs(np.asarray(now[path]) - wanted[path]).max() / LR
            assert off < 1e-3 * step, (path, step, off)
    assert np.median(np.abs(np.asarray(exact[-1]["b"]))) > LR
    np.testing.assert_array_equal(weights[-1]["never"], 0)
    assert state["first_moment"]["b"].dtype == state["second_moment"]["b"].dtype == jnp.float16
    assert state["second_moment_scale"].dtype == jnp.float32 and state["second_moment_scale"].shape == (3,)


def test_float16_holds_twelve_orders_of_magnitude_and_any_size():
    x = np.float32([1.0, -3.3e-12, 2.7e-5, 0.0])
    for size in (1e-20, 1e-8, 1.0, 6e4, 1e30):
        packed_values, scale = jax.jit(to_float16)(x * np.float32(size))
        assert packed_values.dtype == jnp.float16 and 2**14 <= float(packed_values.max()) < 2**15
        back = np.asarray(from_float16(packed_values, scale)) / np.float32(size)
        np.testing.assert_allclose(back, x, rtol=2**-11, atol=2**-39)
        # Powers of two: another rounding changes nothing, whatever the largest is.
        repacked, other_scale = to_float16(jnp.asarray(back[1:] * np.float32(size)))
        assert float(other_scale) < float(scale)
        if size == 1.0:
            np.testing.assert_array_equal(from_float16(repacked, other_scale), back[1:])
    zero, scale = to_float16(jnp.zeros(3))
    assert not zero.any() and 0 < float(scale) < np.inf


def test_elements_beyond_the_range_do_not_diverge():
    """A quarter of them are below the resolution of float16 beside the largest, and epsilon has no effect."""
    cfg = AdamWConfig(beta2=0.95, epsilon=1e-25, weight_decay=0.0)
    exact, _ = run(cfg, orders=16)
    weights, state = run(replace(cfg, moments="float16"), orders=16)
    before = {path: np.zeros(shape) for path, shape in SHAPES.items()}
    for now in weights:
        assert all(np.abs(np.asarray(now[path]) - before[path]).max() < 4 * LR for path in SHAPES)
        before = {path: np.asarray(p) for path, p in now.items()}
    assert max(np.abs(np.asarray(p)).max() for p in exact[-1].values()) < STEPS * LR
    assert (np.asarray(state["first_moment"]["b"]) == 0).mean() > 0.1
    assert (np.asarray(state["second_moment"]["b"]) > 0).all()


@pytest.mark.parametrize("cfg", [LionConfig(moments="float16"), MuonConfig(moments="float16")], ids=["lion", "muon"])
def test_other_averages_can_be_stored_so_too(cfg):
    weights, state = run(cfg, 2)
    kind = next(name for name in state if name.endswith("_scale")).removesuffix("_scale")
    assert all(moment.dtype == jnp.float16 for moment in state[kind].values())
    assert np.isfinite(np.asarray(weights[-1]["b"])).all()


def test_the_largest_moments_move_to_the_host_until_the_fraction_is_reached():
    where = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    sizes = {"a": 10, "b": 50, "c": 40}
    shapes = {path: jax.ShapeDtypeStruct((n,), "float32") for path, n in sizes.items()}
    shardings = {"count": where, "first": dict.fromkeys(sizes, where)}

    def moved(share: float) -> set[str]:
        moved = in_host_memory(shardings, {"count": None, "first": shapes}, share)
        assert moved["count"] is where
        return {path for path, sharding in moved["first"].items() if sharding.memory_kind == HOST}

    assert [moved(share) for share in (0, 0.5, 0.6, 0.9, 1)] == [set(), {"b"}, {"b", "c"}, {"b", "c"}, set(sizes)]
