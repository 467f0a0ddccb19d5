"""State-space layers and delta nets on rows sharded over `context`: outputs, gradients, isolated documents."""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from tiny_runs import ONE, QUICK

from megajax.layers.context import Context
from megajax.layers.delta.config import GatedDeltaNetConfig
from megajax.layers.linear.config import LightningAttentionConfig, ShortConvConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.param import LayerSettings, bind, initial_values, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.mesh.zigzag_order import SequenceSharding

HIDDEN, ROWS = 16, 2
LAYERS = {
    "mamba 2": Mamba2Config(heads=3, head_dim=6, state=5, groups=3, chunk=8, bias=True),
    "mamba 2, one group": Mamba2Config(heads=4, head_dim=5, state=3, groups=1, chunk=8),
    "mamba 1": Mamba1Config(inner=22, rank=3, state=5, chunk=3, bias=True),
    "delta net": GatedDeltaNetConfig(heads=6, key_heads=3, head_dim=4, key_dim=5, chunk=16),
    "short convolution": ShortConvConfig(channels=22, conv_kernel=4, bias=True, conv_bias=True),
    "lightning": LightningAttentionConfig(heads=3, head_dim=6, layers=5, chunk=8),
}
SHORT = 16, ParallelConfig(data=1, context=4)
"""Chunks shorter than the reach of a convolution."""
ROUNDS = 48, ParallelConfig(data=1, context=2, context_rounds=2)
DEFAULT = {"mamba 2": ROUNDS, "mamba 1": SHORT, "delta net": ROUNDS}
CASES = [
    ("mamba 2", *ROUNDS, True),
    ("mamba 1", *SHORT, True),
    ("delta net", *ROUNDS, True),
    pytest.param("short convolution", *SHORT, True, marks=pytest.mark.slow),
    pytest.param("lightning", *ROUNDS, True, marks=pytest.mark.slow),
    pytest.param("mamba 2, one group", *ROUNDS, False, marks=pytest.mark.slow),
]


def segments(length: int) -> np.ndarray:
    """Documents across borders of chunks, on them, and of one position; a repeated id."""
    row, second_row = np.zeros((2, length), np.int32)
    row[3:] = 1
    row[length // 4 :] = 2
    row[length // 4 + 1 :] = 1
    row[length // 2 : length - 2] = 5
    second_row[length - 1 :] = 1
    return np.stack([row, second_row])


def random_values(length: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, length, HIDDEN)).astype(np.float32)


@cache
def layer(name: str, parallel: ParallelConfig) -> nnx.Module:
    """With the same random weights on every layout."""
    layout = Layout(Plan.of(parallel), rows=SequenceSharding.of(parallel, causal=True))
    settings = LayerSettings(layout=layout, hidden=HIDDEN, std=0.3, output_std=0.3)
    abstract = nnx.eval_shape(lambda: LAYERS[name].build(settings))
    rng = np.random.default_rng(1)
    like = jax.eval_shape(lambda: initial_values(specs(abstract), 0))
    return bind(abstract, jax.tree.map(lambda leaf: rng.normal(0.3, 0.3, leaf.shape).astype(np.float32), like))


def applied(
    weights: nnx.State, x: Array, ids: Array | None, *, graph: nnx.GraphDef, sharding: SequenceSharding
) -> Array:
    """The layer on a device's part of rows."""
    index = sharding.local_index(x.shape[1])
    ctx = Context(jnp.broadcast_to(index[None], x.shape[:2]), index, ids, layer=2)
    return nnx.merge(graph, weights)(x, ctx)


def pulled(f, weights, x, ids, weighting):
    """Output, and the gradients of a weighted sum of it by weights and x."""

    def total(weights, x):
        y = f(weights, x, ids)
        return (y * weighting).sum(), y

    (_, y), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(weights, x)
    return y, gradients


def on_devices(run, parallel: ParallelConfig):
    """(weights, x, ids) of whole rows, by what `run` does on each device of `context`."""
    if parallel.context == 1:
        return run
    rows = PartitionSpec(None, "context")
    return jax.shard_map(
        run,
        mesh=build_mesh(parallel),
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=rows,
        axis_names={"context"},
        check_vma=False,
    )


@cache
def compiled(name: str, parallel: ParallelConfig, length: int, isolated: bool):
    """(weights, x, ids, weighting) -> see `pulled`, on the devices of the layout; rows device by device."""
    graph, weights = nnx.split(layer(name, parallel))
    run = on_devices(partial(applied, graph=graph, sharding=SequenceSharding.of(parallel, causal=True)), parallel)
    x, ids = random_values(length), segments(length) if isolated else None
    with jax.default_matmul_precision("highest"):
        return jax.jit(partial(pulled, run)).lower(weights, x, ids, x).compile(compiler_options=dict(QUICK))


def results(name: str, parallel: ParallelConfig, x: np.ndarray, ids: np.ndarray | None):
    """Output [B, T, D] and gradients in the row's order, by a layer on the devices of the layout."""
    weights, length = nnx.split(layer(name, parallel))[1], x.shape[1]
    places = SequenceSharding.of(parallel, causal=True).places(length)
    weighting = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    moved = x[:, places], None if ids is None else ids[:, places], weighting[:, places]
    y, (of_weights, of_x) = jax.device_get(compiled(name, parallel, length, ids is not None)(weights, *moved))
    order = np.argsort(places)
    gradients = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(of_weights)}
    return y[:, order], {**gradients, "x": of_x[:, order]}


def alike(actual, expected, what: str) -> None:
    """To 1e-5 of the largest number."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=what)


@pytest.mark.parametrize(("name", "length", "parallel", "isolated"), CASES)
def test_layers_on_sharded_rows_equal_those_on_whole_rows(name, length, parallel, isolated) -> None:
    ids, x = segments(length) if isolated else None, random_values(length)
    y, gradients = results(name, parallel, x, ids)
    expected, expected_gradients = results(name, ONE, x, ids)
    alike(y, expected, "output")
    assert gradients.keys() == expected_gradients.keys()
    for path, gradient in expected_gradients.items():
        alike(gradients[path], gradient, path)


@pytest.mark.parametrize("name", DEFAULT)
def test_a_document_is_bitwise_independent_of_its_neighbours(name) -> None:
    length, parallel = DEFAULT[name]
    ids, x = segments(length), random_values(length)
    changed = (np.arange(ROWS) == 0)[:, None] & (ids == 5)
    before, after = (results(name, parallel, np.where(changed[..., None], factor * x, x), ids) for factor in (1, -3))
    for first, second in ((before[0], after[0]), (before[1]["x"], after[1]["x"])):
        assert (first[changed] != second[changed]).all()
        np.testing.assert_array_equal(first[~changed], second[~changed])


def test_plain_jit_shards_rows_into_chunks_in_order() -> None:
    name, parallel, x, ids = "mamba 2", ParallelConfig(data=1, context=2, tensor=1), random_values(12), segments(12)
    unsplit = results(name, ONE, x, ids)[0]
    graph, weights = nnx.split(layer(name, parallel))
    with jax.set_mesh(build_mesh(parallel)), jax.default_matmul_precision("highest"):
        run = jax.jit(partial(applied, graph=graph, sharding=SequenceSharding()))
        y = run.lower(weights, x, ids).compile(compiler_options=dict(QUICK))(weights, x, ids)
    alike(y, unsplit, "output")


def traffic_of(name: str, length: int, parallel: ParallelConfig) -> dict[str, int]:
    """Elements that a device receives, by the kind of exchange."""
    sharding, (graph, weights) = SequenceSharding.of(parallel, causal=True), nnx.split(layer(name, parallel))
    run = on_devices(partial(applied, graph=graph, sharding=sharding), parallel)
    text = jax.jit(run).lower(weights, random_values(length), segments(length)).as_text(dialect="hlo")
    traffic = {"all-to-all": 0, "all-gather": 0}
    for shape, operation in re.findall(r"= \w+\[([\d,]+)\]\S* (all-to-all|all-gather)\(", text):
        traffic[operation] += math.prod(map(int, shape.split(",")))
    return traffic


def test_devices_send_matrices_of_delta_nets_and_no_rows() -> None:
    """They exchange two states and a transition for each chunk, last inputs, and ids of documents."""
    (length, parallel), cfg = ROUNDS, LAYERS["delta net"]
    chunks, states = parallel.context * 2 * parallel.context_rounds, cfg.heads * cfg.key_dim
    traffic = traffic_of("delta net", length, parallel)
    assert traffic["all-to-all"] == ROWS * chunks // parallel.context * states * (cfg.key_dim + 2 * cfg.head_dim)
    assert traffic["all-gather"] == ROWS * (chunks * (cfg.conv_kernel - 1) * (2 * cfg.keys + cfg.inner) + length)


@pytest.mark.parametrize("name", ["mamba 2", "mamba 1"])
def test_devices_send_states_and_no_rows(name) -> None:
    """A device receives two or three exchanges of a state a chunk, last inputs, factors and ids of documents."""
    (length, parallel), cfg = ROUNDS, LAYERS[name]
    sharding, traffic = SequenceSharding.of(parallel, causal=True), traffic_of(name, length, parallel)
    mamba1, chunks = name == "mamba 1", sharding.devices * sharding.chunks
    channels = cfg.inner if mamba1 else cfg.heads * cfg.head_dim
    # The elements of a head's or channel's state are sharded over two devices: 5 are padded to 6, 6 x 5 are not.
    state = ROWS * sharding.chunks * channels * (6 if mamba1 else cfg.state)
    convolved = channels if mamba1 else channels + 2 * cfg.groups * cfg.state
    boundary_inputs, ids, factors = chunks * (cfg.conv_kernel - 1) * convolved, length, chunks * cfg.heads
    # Factors of channels differ by element, and are exchanged like states. Mamba reads ids in two islands.
    assert traffic["all-to-all"] == (3 if mamba1 else 2) * state
    assert traffic["all-gather"] == ROWS * (boundary_inputs + (2 * ids if mamba1 else ids + factors))
