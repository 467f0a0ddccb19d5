"""Tokens on four devices reach their experts as on one: outputs, gradients, dropped tokens and counts."""

import re
from collections.abc import Callable
from functools import cache, partial
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.layers.moe.dispatch import (
    WAYS,
    CombinedTokens,
    Dispatch,
    ExchangedTokens,
    Ragged,
    RoutedTokens,
    placed,
    water_level,
)
from megajax.planning.compiled.devices import GPUS, Cluster, virtual_devices
from megajax.processes.xla_options import DEVICELESS, compiler_options

DEVICES, WIDTH = 4, 8
AXES = ("expert",)


type Outputs = Callable[[ExchangedTokens], Array]


def weighted_products(sent: ExchangedTokens, matrices: Array) -> Array:
    return grouped_matmul(sent.rows, matrices, sent.sizes, "reference") * sent.weights


def run(dispatch: Dispatch, outputs: Outputs, tokens: RoutedTokens) -> CombinedTokens:
    """The stages of a mixture of experts after its router."""

    def mixture(tokens: RoutedTokens) -> CombinedTokens:
        sent = dispatch.send(tokens)
        return dispatch.combine(sent, outputs(sent))

    return dispatch.run(mixture, tokens)


def dense(x: np.ndarray, weights: np.ndarray, experts: np.ndarray, matrices: np.ndarray) -> Array:
    """The same without any rows: every expert on every token. Expert number E stands for none."""
    outputs = jnp.einsum("td,edf->tef", x, matrices)
    one_hot = jax.nn.one_hot(experts, matrices.shape[0])
    return jnp.einsum("tk,tke,tef->tf", weights, one_hot, outputs)


def case(tokens: int, experts: int, k: int, seed: int = 0, every: int | None = None) -> tuple[np.ndarray, ...]:
    """(x, weights, experts, matrices). every: the first expert of every token."""
    rng = np.random.default_rng(seed)
    # The first experts are chosen more often than the last.
    routed = np.argsort(rng.random((tokens, experts)) * np.linspace(1, 3, experts), axis=1)[:, :k].astype(np.int32)
    if every is not None:
        routed = ((every + np.arange(k)) % experts + np.zeros((tokens, 1), int)).astype(np.int32)
    x, matrices = rng.normal(size=(tokens, WIDTH)), rng.normal(size=(experts, WIDTH, WIDTH))
    return x.astype(np.float32), rng.random((tokens, k)).astype(np.float32), routed, matrices.astype(np.float32)


@cache
def on_devices(dispatch: Dispatch, axes: tuple[str, ...] = AXES) -> Callable:
    """Jitted: (x, weights, experts, matrices, dy) -> (y, times each device dropped a token, gradients)."""
    sizes = (DEVICES,) if axes == AXES else (2, 2)
    names = AXES if axes == AXES else ("expert", "tensor")
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:DEVICES])
    tokens = P(names)
    over = P(dispatch.axes)

    def local(x: Array, weights: Array, experts: Array, matrices: Array, dy: Array) -> tuple:
        def combined(x: Array, weights: Array, matrices: Array) -> tuple[Array, Array]:
            outputs = partial(weighted_products, matrices=matrices)
            y, dropped = run(dispatch, outputs, RoutedTokens(x, weights, experts))
            return y, dropped

        y, back, dropped = jax.vjp(combined, x, weights, matrices, has_aux=True)
        dx, dweights, dmatrices = back(dy)
        replicated = tuple(name for name in names if name not in dispatch.axes)
        return y, dropped[None], dx, dweights, lax.psum(dmatrices, replicated) if replicated else dmatrices

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, over, tokens),
        out_specs=(tokens, tokens, tokens, tokens, over),
        check_vma=False,
    )
    return jax.jit(mapped)


@jax.jit
def on_one_device(x: Array, weights: Array, experts: Array, matrices: Array, dy: Array) -> tuple:
    y, back = jax.vjp(lambda x, w, m: dense(x, w, experts, m), x, weights, matrices)
    return y, *back(dy)


def check(dispatch: Dispatch, given: tuple[np.ndarray, ...], axes: tuple[str, ...] = AXES) -> None:
    dy = np.random.default_rng(9).normal(size=given[0].shape).astype(np.float32)
    y, dropped, *gradients = on_devices(dispatch, axes)(*given, dy)
    expected, *expected_gradients = on_one_device(*given, dy)
    np.testing.assert_array_equal(dropped, 0)
    pairs = zip(["y", "x", "weights", "matrices"], (y, *gradients), (expected, *expected_gradients), strict=True)
    for name, actual, reference in pairs:
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("way", ["gather", "ragged", pytest.param("capacity", marks=pytest.mark.slow)])
def test_every_way_equals_one_device(way):
    """Numbers of tokens that are no multiples of 8; then all tokens to one expert; then experts without any."""
    dispatch = WAYS[way](experts=8, top_k=2, axes=AXES)
    check(dispatch, case(4 * 13, 8, 2))
    check(dispatch, case(4 * 13, 8, 2, every=5))
    # Expert 8 of 8 stands for none: a token dropped earlier by a capacity.
    x, weights, experts, matrices = case(4 * 13, 8, 2)
    experts[::3, 1] = 8
    check(dispatch, (x, weights, experts, matrices))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "tokens", "experts", "k", "chunks"),
    [("gather", 4, 4, 4, 1), ("ragged", 28, 4, 3, 7), ("capacity", 32, 16, 5, 4)],
)
def test_all_sizes(way, tokens, experts, k, chunks):
    """Cases are top_k of all experts, one expert a device, one token a device, and chunks."""
    dispatch = WAYS[way](experts=experts, top_k=k, axes=AXES, chunks=chunks)
    check(dispatch, case(tokens, experts, k))
    check(dispatch, case(tokens, experts, k, every=experts - 1))


@pytest.mark.slow
def test_experts_over_two_axes_and_sharded_experts_with_their_tokens():
    axes = ("expert", "tensor")
    check(WAYS["gather"](experts=8, top_k=2, axes=axes), case(4 * 6, 8, 2), axes)


def kept_rows(requested: np.ndarray, room: int) -> np.ndarray:
    """Sizes [G], the fullest of them reduced to one number such that their sum is at most `room`."""
    level = next(level for level in range(int(requested.max()), -1, -1) if np.minimum(requested, level).sum() <= room)
    return np.minimum(requested, level)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=5, max_size=5), st.integers(0, 60))
def test_the_water_level_is_the_largest_that_fits(sizes, room):
    level = int(water_level(jnp.asarray(sizes), room))
    np.testing.assert_array_equal(np.minimum(sizes, level), kept_rows(np.array(sizes), room))


def test_rows_are_sorted_and_within_the_room():
    groups = np.array([[2, 0], [2, 1], [2, 3], [0, 2], [3, 2]], np.int32)  # 3 is none
    rows = placed(jnp.asarray(groups), 3, 4)
    np.testing.assert_array_equal(rows.sizes, kept_rows(np.array([2, 1, 5]), 4))
    np.testing.assert_array_equal(rows.sizes, [1, 1, 1])
    assert float(rows.dropped) == 5
    # Token 0's slot for group 0, token 1's for group 1, token 0's for group 2, and one empty row.
    np.testing.assert_array_equal(rows.source, [1, 3, 0, 10])
    np.testing.assert_array_equal(rows.place, [[2, 0], [4, 1], [4, 4], [4, 4], [4, 4]])


def limited(way: str, room: float, given: tuple[np.ndarray, ...], experts: int, k: int) -> tuple[np.ndarray, int]:
    """(which slots [T, k] have a row, rows that each device has room for), written out."""
    routed, local_experts = given[2], experts // DEVICES
    per_device = len(routed) // DEVICES
    keep = np.zeros(routed.shape, bool)

    def capped(slots: list[tuple[int, int]], most: int) -> None:
        numbers = np.array([routed[slot] for slot in slots], int)
        requested = np.bincount(numbers, minlength=experts)
        sizes = kept_rows(requested, most)
        for expert in range(experts):
            for slot in [slot for slot in slots if routed[slot] == expert][: sizes[expert]]:
                keep[slot] = True

    def up(rows: float) -> int:
        return -(-ceil(rows) // 8) * 8

    for device in range(DEVICES):
        experts_here = range(device * local_experts, (device + 1) * local_experts)
        slots = [(t, s) for t in range(len(routed)) for s in range(k) if routed[t, s] in experts_here]
        if way == "capacity":
            most = up(min(room * per_device * k / DEVICES, per_device * min(k, local_experts)))
            for sender in range(DEVICES):
                capped([slot for slot in slots if slot[0] // per_device == sender], most)
        else:
            capped(slots, up(min(room * per_device * k, per_device * DEVICES * min(k, local_experts))))
    return keep, per_device


@pytest.mark.parametrize(("way", "every"), [("gather", None), ("ragged", 3), ("capacity", None)])
def test_below_the_worst_case_the_fullest_experts_drop_their_last_tokens(way, every):
    """A slot without a row adds nothing to y and to no gradient; counts are exact; nothing else changes."""
    experts, k, tokens = 8, 2, 4 * 13
    inputs = case(tokens, experts, k, every=every)
    keep, per_device = limited(way, 1.0, inputs, experts, k)
    assert not keep.all()
    x, weights, routed, matrices = inputs
    dy = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
    dispatch = WAYS[way](experts=experts, top_k=k, axes=AXES, room=1.0)
    y, dropped, *gradients = on_devices(dispatch)(*inputs, dy)
    kept = np.where(keep, routed, experts).astype(np.int32)
    expected, *expected_gradients = on_one_device(x, weights, kept, matrices, dy)
    assert float(np.sum(dropped)) == (~keep).sum()
    if way == "gather":
        dropped_tokens = [(~keep)[np.isin(routed, [2 * n, 2 * n + 1])].sum() for n in range(DEVICES)]
    else:
        dropped_tokens = [(~keep)[n * per_device : (n + 1) * per_device].sum() for n in range(DEVICES)]
    np.testing.assert_array_equal(dropped, dropped_tokens)
    pairs = zip(["y", "x", "weights", "matrices"], (y, *gradients), (expected, *expected_gradients), strict=True)
    for name, actual, reference in pairs:
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.aot
def test_rows_travel_in_ragged_all_to_alls() -> None:
    """The collective is XLA's own, which CPUs lack."""
    gpus = virtual_devices(Cluster(GPUS["h100"], DEVICES, 8))
    mesh = Mesh(np.array(gpus), ("expert",), axis_types=(AxisType.Auto,))
    dispatch = Ragged(experts=8, top_k=2, axes=("expert",))

    def local(x: jax.Array, weights: jax.Array, experts: jax.Array, dy: jax.Array) -> tuple:
        def values(x: jax.Array, weights: jax.Array) -> jax.Array:
            tokens = RoutedTokens(x, weights, experts)
            return run(dispatch, lambda sent: jnp.sin(sent.rows) * sent.weights, tokens).values

        y, back = jax.vjp(values, x, weights)
        return y, *back(dy)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    rows, sharding = DEVICES * 64, NamedSharding(mesh, P("expert"))
    kinds = [((rows, 128), "float32"), ((rows, 2), "float32"), ((rows, 2), "int32"), ((rows, 128), "float32")]
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in kinds]
    with jax.set_mesh(mesh):
        lowered = jax.jit(mapped).lower(*abstract)
        text = lowered.compile(compiler_options=compiler_options(*DEVICELESS)).as_text()
    # Rows both ways, and their gradients; weights one way, and their gradients back.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) == 6
