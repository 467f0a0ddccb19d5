"""Weights of experts, sharded over `expert`, under every data sharding: layout at rest, and gradients."""

from dataclasses import replace
from itertools import chain, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from tiny_decoders import ROUTERS, moe
from tiny_runs import build_program

from megajax.layers.param import Normal, ParamSpec
from megajax.mesh.collectives import token_axes
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.precision.config import PrecisionConfig
from megajax.training.gradients.grads import MANUAL, Weights

pytestmark = pytest.mark.smoke

LAYERS, EXPERTS, TOKENS, HIDDEN, FFN = 2, 4, 16, 16, 8
AXES = ("layer", "expert", "embed", "mlp")
SHAPE = (LAYERS, EXPERTS, HIDDEN, FFN)
SPEC = ParamSpec("up", SHAPE, AXES, Normal(1.0), "weight", "up", tuple(range(LAYERS)))
PARALLEL = {
    "expert 2": ParallelConfig(expert=2, data=2, tensor=2),
    "two groups": ParallelConfig(expert=2, data=4, shards=2),
    "four groups": ParallelConfig(expert=2, data=4, shards=1),
}
CASES = {
    f"{name}, {sharding}": replace(parallel, data_sharding=sharding)
    for (name, parallel), sharding in product(PARALLEL.items(), ("replicate", "zero1", "fsdp"))
    if parallel.shards is None or sharding != "replicate"
}
W = np.random.default_rng(0).integers(-3, 4, SHAPE).astype(np.float32)
X = np.random.default_rng(1).integers(-3, 4, (TOKENS, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("parallel", CASES.values(), ids=CASES)
def test_gradients_of_experts_equal_one_device_and_their_weights_are_sharded(parallel: ParallelConfig) -> None:
    """Every expert sees every token: half the sum of squares of x w has the gradient x^T x w."""
    plan, mesh = Plan.of(parallel), build_mesh(parallel)
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
    sharded = parallel.expert if parallel.data_sharding == "replicate" else parallel.sharding_devices(1)
    shards = sharded * parallel.tensor
    assert placed.addressable_shards[0].data.nbytes == W.nbytes // shards
    assert gradients["up"].addressable_shards[0].data.nbytes == W.nbytes // shards


def test_weights_of_experts_and_their_moments_are_sharded() -> None:
    """They are sharded over `expert`, and over `data` where the layout shards master weights or all weights."""
    path = "stack.blocks.0.mlp.experts.up"
    for sharding, parts in (("zero1", 8), ("fsdp", 8), ("replicate", 4)):
        parallel = ParallelConfig(data=2, expert=4, data_sharding=sharding)
        program = build_program(moe(ROUTERS["biased"]), parallel, microbatches=3)
        shape = program.declared[path].shape
        for shardings in (program.shardings.params, program.shardings.optimizer["first_moment"]):
            assert np.prod(shape) == parts * np.prod(shardings[path].shard_shape(shape))
