"""The ragged exchange compiled for virtual GPUs: XLA's own collective, which CPUs lack."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config.errors import UserError
from megajax.layers.moe.dispatch import Dispatch, dispatched
from megajax.layers.moe.router import Routing
from megajax.mesh.xla import DEVICELESS, compiler_options
from megajax.planning import virtual_devices as devices
from megajax.planning.virtual_devices import GPUS, Cluster

TOKENS, WIDTH, EXPERTS, K = 64, 128, 8, 2


@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_rows_travel_in_ragged_all_to_alls(number: int) -> None:
    try:
        devices.prepare()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])
    gpus = devices.virtual_devices(Cluster(GPUS["h100"], 1, 8))
    mesh = Mesh(np.array(gpus[:number]), ("expert",), axis_types=(AxisType.Auto,))
    dispatch = Dispatch(experts=EXPERTS, top_k=K, axes=("expert",))

    def local(x: jax.Array, weights: jax.Array, experts: jax.Array, dy: jax.Array) -> tuple:
        def run(x: jax.Array, weights: jax.Array) -> jax.Array:
            return dispatched("ragged", x, Routing(weights, experts), lambda rows, _, w: jnp.sin(rows) * w, dispatch)[0]

        y, back = jax.vjp(run, x, weights)
        return y, *back(dy)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    rows, sharding = number * TOKENS, NamedSharding(mesh, P("expert"))
    kinds = [((rows, WIDTH), "float32"), ((rows, K), "float32"), ((rows, K), "int32"), ((rows, WIDTH), "float32")]
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in kinds]
    with jax.set_mesh(mesh):
        lowered = jax.jit(mapped).lower(*abstract)
        text = lowered.compile(compiler_options=compiler_options(*DEVICELESS)).as_text()
    # Rows both ways, and their gradients; weights one way, and their gradients back.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) == 6
