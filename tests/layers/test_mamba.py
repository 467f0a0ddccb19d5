"""State-space layers and gated delta nets: steps, isolated documents, initial values, decay, refusals."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.config.compose import problems_of
from megajax.layers.context import Context
from megajax.layers.decoding import StepRows
from megajax.layers.delta.config import GatedDeltaNetConfig, KimiDeltaConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.param import LayerSettings, bind, initial_values, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.optim.groups import has_decay
from megajax.optim.muon import matrices

HIDDEN, LENGTH = 16, 12
LAYERS = {
    "mamba 2": Mamba2Config(heads=4, head_dim=6, state=5, groups=2, chunk=8, bias=True),
    "mamba 1": Mamba1Config(inner=24, rank=3, state=4, chunk=5, bias=True, inner_norm=RMSNormConfig()),
    "delta net": GatedDeltaNetConfig(heads=4, key_heads=2, head_dim=6, key_dim=5, chunk=16),
    "kimi delta": KimiDeltaConfig(heads=4, head_dim=6, key_dim=5, gate_rank=3, chunk=16),
}


@cache
def layer(name: str) -> nnx.Module:
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=HIDDEN, std=0.3, output_std=0.3)
    abstract = nnx.eval_shape(lambda: LAYERS[name].build(settings))
    return bind(abstract, jax.jit(lambda: initial_values(specs(abstract), 0))())


def context(segments: Any) -> Context:
    index = jnp.arange(LENGTH)
    return Context(jnp.broadcast_to(index, (2, LENGTH)), index, segments)


@cache
def whole_rows(name: str) -> Any:
    """(x, numbers of documents) -> outputs of the layer."""
    return jax.jit(lambda x, ids: layer(name)(x, context(ids)))


def inputs(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, LENGTH, HIDDEN)).astype(np.float32)


def rows_of_step(width: int, counts: list[int], slots: list[int], first: int) -> Context:
    """Two rows with `width` tokens each, of which `counts` count, at the positions from `first` on."""
    positions = first + jnp.tile(jnp.arange(width), 2)[:, None]
    rows = StepRows(
        groups=((2, width),),
        kernel="reference",
        slots=jnp.zeros(2 * width, jnp.int32),
        tables=(jnp.zeros((2, 1), jnp.int32),),
        counts=(jnp.asarray(counts),),
        states=(jnp.asarray(slots),),
        layer=jnp.int32(1),
    )
    return Context(positions, jnp.zeros(1, jnp.int32), rows=rows)


@pytest.mark.parametrize(
    "name",
    ["mamba 2", "kimi delta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba 1", "delta net"))],
)
def test_steps_equal_the_whole_row(name):
    """Prompts of 7 and 5 positions are read into slots that others have left, then one position after another."""
    mixer, x, slots = layer(name), inputs(0), [2, 0]
    full_row = whole_rows(name)(x, np.zeros((2, LENGTH), np.int32))
    leaves = mixer.cfg.cache_leaves(HIDDEN, 1)
    cache = {leaf.name: jnp.full((2, 3, *leaf.shape), 9.0, leaf.dtype) for leaf in leaves}
    flat, lengths = x[:, :7].reshape(14, 1, HIDDEN), [7, 5]
    y, cache = jax.jit(lambda x, cache: mixer.step(x, cache, rows_of_step(7, lengths, slots, 0)))(flat, cache)
    rows = [[outputs[:count]] for outputs, count in zip(y.reshape(2, 7, HIDDEN), lengths, strict=True)]
    step = jax.jit(lambda x, cache, ctx: mixer.step(x, cache, ctx))
    while min(lengths) < LENGTH:
        # Where a row has ended, no row takes its place.
        runs, at = [count < LENGTH for count in lengths], [min(count, LENGTH - 1) for count in lengths]
        ctx = rows_of_step(1, runs, [slot if run else 99 + slot for slot, run in zip(slots, runs, strict=True)], 0)
        ctx = ctx._replace(positions=jnp.asarray(at)[:, None])
        y, cache = step(x[np.arange(2), at][:, None], cache, ctx)
        for number, run in enumerate(runs):
            rows[number] += [y[number]] * run
            lengths[number] += run
    np.testing.assert_allclose([np.concatenate(row) for row in rows], full_row, rtol=1e-5, atol=1e-5)
    for leaf in cache.values():
        assert np.all(leaf[0] == 9) and np.all(leaf[1, 1] == 9), "another layer or slot was written"


@pytest.mark.parametrize("name", LAYERS)
def test_a_document_is_bitwise_independent_of_its_neighbours(name):
    run, x = whole_rows(name), inputs(0)
    ids = np.array([[3] * 4 + [4] * 5 + [5] * 3] * 2, np.int32)
    other_ids = np.array([[8] * 2 + [9] * 2 + [4] * 5 + [3] * 2 + [6]] * 2, np.int32)
    first, another = run(x, ids), run(np.where((ids == 4)[..., None], x, 50 * inputs(1)), other_ids)
    np.testing.assert_array_equal(first[:, 4:9], another[:, 4:9])
    assert np.any(first[:, :4] != another[:, :4])
    # At the start of a row nothing is before it.
    moved = run(np.roll(x, -4, axis=1), np.roll(ids, -4, axis=1))
    np.testing.assert_allclose(first[:, 4:9], moved[:, :5], rtol=1e-5, atol=1e-5)


def test_initial_values_are_those_of_the_paper():
    cfg = Mamba2Config(heads=512, head_dim=1, state=2)
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=2, std=0.02, output_std=0.01)
    declared = specs(nnx.eval_shape(lambda: cfg.build(settings)))
    kept = {path: declared[path] for path in ("a_log", "dt_bias", "skip", "conv_x.kernel")}
    values = jax.device_get(jax.jit(lambda: initial_values(kept, 0))())
    rates, steps = np.exp(values["a_log"]), np.log1p(np.exp(values["dt_bias"].astype(np.float64)))
    assert 1 <= rates.min() < 1.2 and 15.8 < rates.max() <= 16.001
    assert 0.000999 < steps.min() < 0.0011 and 0.09 < steps.max() < 0.1001
    # Uniform in their logarithm: half of them are below the geometric mean.
    assert abs(np.mean(steps < 0.01) - 0.5) < 0.08
    assert np.all(values["skip"] == 1)
    assert 0.45 < np.abs(values["conv_x.kernel"]).max() <= 0.5


@pytest.mark.parametrize("name", LAYERS)
def test_rates_do_not_decay_and_filters_are_no_matrices(name):
    declared = specs(layer(name))
    frozen = {path for path, spec in declared.items() if not has_decay(spec)}
    delta = {"a_log", "dt_bias", "norm_gain"}
    nets = ("delta net", "kimi delta")
    assert (delta if name in nets else {"a_log", "dt_bias", "skip", "in_z_bias", "conv_x.bias"}) <= frozen
    inner = {"in_v", "conv_v.kernel"} if name in nets else {"in_x", "conv_x.kernel"}
    assert {"z_up" if name == "kimi delta" else "in_z", "output", *inner} <= declared.keys() - frozen
    assert all(matrices(spec) is None for path, spec in declared.items() if path.startswith("conv_"))


@pytest.mark.parametrize(
    ("cfg", "sizes", "setting", "message"),
    [
        (Mamba2Config(heads=6, groups=4), {}, "groups", "heads=6 is not a multiple of groups=4"),
        (Mamba2Config(heads=6, dt_min=0.2), {}, "dt_min", "0.2 is above dt_max=0.1"),
        (Mamba2Config(heads=6, decay_min=20.0), {}, "decay_min", "20.0 is above decay_max=16.0"),
        (Mamba2Config(heads=6, state=0), {}, "state", "must be at least 1, got 0"),
        (Mamba2Config(heads=6, dt_limit=(1.0, 0.5)), {}, "dt_limit", "must be two numbers, the first lower"),
        (Mamba2Config(heads=6), {"tensor": 4}, "heads", "heads=6 is not divisible by parallel.tensor=4"),
        (Mamba2Config(heads=12, groups=2), {"tensor": 3}, "groups", "groups=2 and parallel.tensor=3: one must be"),
        (GatedDeltaNetConfig(heads=6, key_heads=4), {}, "key_heads", "heads=6 is not a multiple of key_heads=4"),
        (GatedDeltaNetConfig(heads=6, key_dim=0), {}, "key_dim", "must be at least 1, got 0"),
        (GatedDeltaNetConfig(heads=6, decay_min=20.0), {}, "decay_min", "20.0 is above decay_max=16.0"),
        (GatedDeltaNetConfig(heads=12, key_heads=2), {"tensor": 3}, "key_heads", "key_heads=2 and parallel.tensor=3"),
        (Mamba1Config(inner=9, rank=1), {"tensor": 2}, "inner", "inner=9 is not divisible by parallel.tensor=2"),
        (Mamba1Config(inner=9, rank=0), {}, "rank", "must be at least 1, got 0"),
    ],
)
def test_refusals(cfg, sizes, setting, message):
    (problem,) = problems_of(cfg) or list(cfg.mesh_problems({"tensor": 1} | sizes))
    assert problem.setting == setting
    assert message in problem.message
