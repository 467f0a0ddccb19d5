"""Attention over sharded rows, by each strategy, against the reference on one device."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded_rows import Case, check, documents, texts

from megajax.kernels.attention import pallas as pallas_attention
from megajax.kernels.attention.attention import Passes
from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.pallas import AttentionBlocks
from megajax.kernels.context.collectives import from_before
from megajax.kernels.context.ring import sources
from megajax.mesh.zigzag_order import SequenceSharding

DOCUMENTS, LATENT = {"segments": documents()}, {"size": 24, "wide": 16}
PADDED = {"padded": True, "segments": texts([40, 0])}
PADDED_BOTH_WAYS = {"padded": True, "segments": texts(), "causal": False}
COVERING = [
    Case(context=2, **DOCUMENTS, window=20, rounds=4, groups=2, sink=True, **LATENT),
    Case(context=8, **PADDED_BOTH_WAYS, groups=2, sink=True, **LATENT, rate=0.3),
    Case(strategy="all_to_all", **DOCUMENTS, context=2, tensor=2, window=3, rounds=0, groups=2, **LATENT),
    Case(strategy="all_to_all", **PADDED, context=8, window=20, rounds=4, sink=True, **LATENT, rate=0.3),
    Case(strategy="ring", context=2, tensor=2, **PADDED, window=3, rounds=4, groups=2, sink=True, **LATENT, rate=0.3),
    Case(strategy="ring", context=2, tensor=2, causal=False, heads=8, groups=2, **LATENT, rate=0.3),
    Case(strategy="ring+all_to_all", context=2, tensor=2, **PADDED_BOTH_WAYS, **LATENT),
    Case(strategy="ring+all_to_all", **PADDED, context=8, window=3, rounds=2, sink=True, **LATENT, rate=0.3),
]
"""Each strategy with padding or with documents, on few and on many devices, with a window below or above a chunk."""
SLOW = pytest.mark.slow
EVERYTHING = Case(**DOCUMENTS, **LATENT, window=9, sink=True, groups=2)
FIRST = [("all_gather", 4, 1), ("ring", 4, 1), ("all_to_all", 2, 2), ("ring+all_to_all", 4, 1)]


def laid_out(case: Case) -> Case:
    """With as many heads as the layout needs."""
    exchanging = {"all_to_all": case.context, "ring+all_to_all": case.exchanging}.get(case.strategy, 1)
    times = -(-exchanging * case.tensor // case.heads)
    groups = case.groups * (times if case.tensor > case.groups else 1)
    return replace(case, heads=case.heads * times, groups=groups)


def described(case: Case) -> str:
    values = {name: getattr(case, name) for name in case.__dataclass_fields__ if name != "segments"}
    return " ".join(f"{name}={value}" for name, value in values.items() if value != getattr(Case, name))


@pytest.mark.parametrize(("strategy", "context", "tensor"), FIRST)
def test_every_strategy_equals_one_device(strategy: str, context: int, tensor: int) -> None:
    """With documents across chunks, on their borders and one position long, a window, sinks, GQA and MLA together."""
    check(laid_out(replace(EVERYTHING, strategy=strategy, context=context, tensor=tensor)))


@SLOW
@pytest.mark.parametrize("case", COVERING, ids=described)
def test_combinations_equal_one_device(case: Case) -> None:
    check(laid_out(case))


def test_dropout_in_a_ring_equals_that_of_whole_rows() -> None:
    """Its random numbers follow positions in the row, wherever keys are stored."""
    check(Case(strategy="ring", context=2, rate=0.3, window=9, length=32))


@SLOW
@pytest.mark.parametrize("strategy", ["all_gather", "ring+all_to_all"])
def test_in_16_bits_results_round_like_inputs(strategy: str) -> None:
    """bfloat16 keeps 8 bits, so rounding a number once changes it by up to 2^-9 of itself."""
    check(laid_out(replace(EVERYTHING, dtype=jnp.bfloat16, strategy=strategy)), most=2**-7)


INTERPRETED = {"interpret": True, "blocks": AttentionBlocks(16, 16, 4)}
PALLAS = Passes(partial(pallas_attention.forward, **INTERPRETED), partial(pallas_attention.backward, **INTERPRETED))


@SLOW
def test_the_pallas_kernels_take_positions_in_zigzag() -> None:
    check(replace(EVERYTHING, size=32, strategy="ring", context=2), PALLAS)


def test_a_ring_skips_devices_whose_keys_no_window_reaches() -> None:
    index = jnp.arange(8)
    mask = Mask(index, index, None, None)
    for devices, rounds, window, expected in (
        (8, 1, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 1, 0, [0]),
        (8, 1, 1, [0, 1, 7]),
        (8, 1, 4, [0, 1, 7]),
        (8, 1, 5, [0, 1, 2, 6, 7]),
        (2, 1, 3, [0, 1]),
        (8, 2, 2, [0, 1, 7]),
        (8, 0, 8, [0, 1]),
        (8, 0, 9, [0, 1, 2]),
    ):
        assert sources(SequenceSharding(devices, rounds, "ring"), 8, mask._replace(window=window)) == expected
    assert sources(SequenceSharding(4, 0, "ring"), 8, mask._replace(window=1, causal=False)) == [0, 1, 2, 3]


def mesh_of(pipeline: int, context: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: pipeline * context]
    return jax.make_mesh((pipeline, context), ("pipeline", "context"), (AxisType.Auto,) * 2, devices=devices)


def around(sharding: SequenceSharding, places: int, x: Array) -> Array:
    """Of a device's x [1, 1]: what arrives around the ring, once on the first stage and twice on the second."""

    def turn(_: Array, x: Array) -> Array:
        return from_before(sharding, x, places)

    return lax.fori_loop(0, 1 + lax.axis_index("pipeline"), turn, x)


@pytest.mark.parametrize(("devices", "stride"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_stages_send_at_different_times(devices: int, stride: int) -> None:
    sharding, total = SequenceSharding(devices, 1, "ring", stride=stride), devices * stride
    x = jnp.arange(2.0 * total).reshape(2, total)
    specs = P("pipeline", "context")
    for places in range(1, devices):
        send = partial(around, sharding, places)
        with jax.set_mesh(mesh_of(2, total)):
            mapped = jax.jit(jax.shard_map(send, in_specs=specs, out_specs=specs, check_vma=False))
            actual = np.asarray(mapped(x))
            text = str(mapped.trace(x).jaxpr)
        for stage in range(2):
            expected = np.roll(x[stage], (1 + stage) * places * stride)
            np.testing.assert_array_equal(actual[stage], expected)
        assert "ppermute" not in text


def test_without_a_pipeline_a_ring_permutes() -> None:
    sharding, specs = SequenceSharding(4, 1, "ring"), P("pipeline", "context")
    with jax.set_mesh(mesh_of(1, 4)):
        send = partial(from_before, sharding, places=1)
        mapped = jax.jit(jax.shard_map(send, in_specs=specs, out_specs=specs, check_vma=False))
        assert "ppermute" in str(mapped.trace(jnp.zeros((1, 4))).jaxpr)
