"""Weights of experts, sharded over `expert`, under every data sharding: layout at rest, and gradients."""

from itertools import chain
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from megajax.layers.param import Normal, ParamSpec
from megajax.mesh.collectives import token_axes
from megajax.mesh.config import MESH_AXES, ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.rules import Plan
from megajax.precision.config import PrecisionConfig
from megajax.training.gradients.grads import MANUAL, Weights

pytestmark = pytest.mark.smoke

LAYERS, EXPERTS, TOKENS, HIDDEN, FFN = 2, 4, 16, 16, 8
AXES = ("layer", "expert", "embed", "mlp")
SHAPE = (LAYERS, EXPERTS, HIDDEN, FFN)
SPEC = ParamSpec("up", SHAPE, AXES, Normal(1.0), "weight", "up", tuple(range(LAYERS)))
PARALLEL = {"expert 2": {"expert": 2, "data": 2, "tensor": 2}, "expert 4": {"expert": 4, "data": 2}}
W = np.random.default_rng(0).integers(-3, 4, SHAPE).astype(np.float32)
X = np.random.default_rng(1).integers(-3, 4, (TOKENS, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("sizes", PARALLEL.values(), ids=PARALLEL)
@pytest.mark.parametrize("sharding", ["replicate", "zero1", "fsdp"])
def test_gradients_of_experts_equal_one_device_and_their_weights_are_sharded(
    sharding: Any, sizes: dict[str, int]
) -> None:
    """Every expert sees every token: half the sum of squares of x w has the gradient x^T x w."""
    parallel = ParallelConfig(data_sharding=sharding, **sizes)
    plan, kinds = Plan.of(parallel), (AxisType.Auto,) * len(MESH_AXES)
    mesh = jax.make_mesh([sizes.get(axis, 1) for axis in MESH_AXES], MESH_AXES, axis_types=kinds)
    layout = Layout(plan)
    weights = Weights(None, {"up": SPEC}, {}, layout, PrecisionConfig(compute="float32"))

    def local(params: dict[str, Array], x: Array) -> tuple[Array, dict[str, Array]]:
        in_step = weights.gather_all_for_step(params, jnp.ones(()))

        def every_token(x: Array) -> Array:
            return lax.all_gather(x, "expert", tiled=True)

        def loss(w: Array) -> Array:
            tokens = layout.island(every_token, ((None, "embed"),), (None, "embed"))
            used = [layout.gather(row, AXES[1:]) for row in w]
            products = [jnp.einsum("td,edf->etf", tokens(x), row) for row in used]
            return sum(jnp.square(y).sum() for y in products) / 2

        value, gradient = jax.value_and_grad(loss)(in_step["up"])
        return lax.psum(value, token_axes()), weights.reduce_all({"up": gradient})

    at_rest = plan.params.spec(AXES)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        axis_names=set(MANUAL),
        check_vma=False,
        in_specs=({"up": plan.params.spec(AXES, keep=MANUAL)}, plan.compute.spec(("batch", "embed"), keep=MANUAL)),
        out_specs=(PartitionSpec(), weights.reduced_specs()),
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(W, NamedSharding(mesh, at_rest))
        value, gradients = jax.jit(mapped)({"up": placed}, X)

    products = np.einsum("td,ledf->letf", X, W)
    assert value == np.square(products).sum() / 2
    np.testing.assert_array_equal(gradients["up"], np.einsum("td,letf->ledf", X, products))
    for spec in (at_rest, plan.optimizer.spec(AXES)):
        axes = [*chain.from_iterable((entry,) if isinstance(entry, str) else entry or () for entry in spec)]
        assert len(axes) == len(set(axes))
    shards = prod(sizes.values()) if sharding != "replicate" else prod(sizes.values()) // sizes["data"]
    assert placed.addressable_shards[0].data.nbytes == W.nbytes // shards
    assert gradients["up"].addressable_shards[0].data.nbytes == W.nbytes // shards
