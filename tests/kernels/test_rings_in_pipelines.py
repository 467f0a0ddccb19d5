"""What a ring sends in a pipeline, whose stages compute layers in different ticks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from megajax.kernels.context.collectives import from_before
from megajax.mesh.zigzag_order import SequenceSharding


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
    specs = PartitionSpec("pipeline", "context")
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
    sharding, specs = SequenceSharding(4, 1, "ring"), PartitionSpec("pipeline", "context")
    with jax.set_mesh(mesh_of(1, 4)):
        send = partial(from_before, sharding, places=1)
        mapped = jax.jit(jax.shard_map(send, in_specs=specs, out_specs=specs, check_vma=False))
        assert "ppermute" in str(mapped.trace(jnp.zeros((1, 4))).jaxpr)
