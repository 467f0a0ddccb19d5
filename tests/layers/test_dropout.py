"""Dropout is the same on every layout and for any grouping of layers; recomputation draws the same masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.context import Context, dropout
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.param import LayerSettings, bind, specs
from megajax.layers.position.config import RopeConfig
from megajax.layers.recompute import Recomputing
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan

ROWS, LENGTH, HIDDEN = 4, 8, 16
BLOCK = BlockConfig(
    mixer=AttentionConfig(heads=4, kv_heads=2, rope=RopeConfig(), dropout=0.2),
    mlp=GatedMLPConfig(ffn=24),
    dropout=0.3,
)


def context(rows: int = ROWS, first: int = 0) -> Context:
    keys = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(jax.random.key(5), n)))(first + jnp.arange(rows))
    positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], (rows, LENGTH))
    return Context(positions, jnp.arange(LENGTH), None, keys)


def dropped(layout: Layout, ctx: Context, place: int = 1) -> jax.Array:
    return dropout(jnp.ones((len(ctx.positions), LENGTH, HIDDEN)), 0.25, ctx, place, layout)


def test_masks_are_the_same_on_every_layout():
    parallel = ParallelConfig(data=2, tensor=2, sequence=True)
    single, sharded = (Layout(Plan.of(config)) for config in (ParallelConfig(), parallel))
    with jax.set_mesh(build_mesh(parallel)):
        actual = jax.jit(lambda: dropped(sharded, context()))()
    assert len({str(shard.index) for shard in actual.addressable_shards}) == 4
    np.testing.assert_array_equal(actual, dropped(single, context()))


def test_masks_follow_the_row_and_differ_by_layer_and_position():
    layout = Layout(Plan.of(ParallelConfig()))
    masks = np.asarray(dropped(layout, context()))
    np.testing.assert_array_equal(masks[2:], dropped(layout, context(2, first=2)))
    assert len(np.unique(masks.reshape(-1, HIDDEN), axis=0)) > ROWS * LENGTH - 4
    contexts = [context().for_layer(0), context().for_layer(1)]
    actual = [masks, *[np.asarray(dropped(layout, ctx, place)) for ctx in contexts for place in (2, 3)]]
    for place, mask in enumerate(actual):
        np.testing.assert_allclose(np.unique(mask), [0, 1 / 0.75], rtol=1e-6)
        assert abs((mask == 0).mean() - 0.25) < 0.08
        assert not any(np.array_equal(mask, mask_before) for mask_before in actual[:place])


def test_without_keys_or_rate_nothing_is_dropped():
    layout, x = Layout(Plan.of(ParallelConfig())), jnp.ones((ROWS, LENGTH, HIDDEN))
    assert dropout(x, 0.5, context()._replace(row_keys=None), 0, layout) is x
    assert dropout(x, 0.0, context(), 0, layout) is x


def run(pattern: int, recompute: str, values: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Output of four layers, and the gradient at the input of its sum of squares."""
    stack = abstract(pattern, recompute)
    renamed = {path: values[path.split(".", 2)[2]][int(path.split(".")[1]) :: pattern] for path in specs(stack)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, LENGTH, HIDDEN)), jnp.float32)

    def total(x):
        y = bind(stack, renamed)(x, context())
        return jnp.sum(y * y), y

    (_, y), dx = jax.value_and_grad(total, has_aux=True)(x)
    return y, dx


def abstract(pattern: int, recompute: str) -> nnx.Module:
    settings = LayerSettings(layout=Layout(Plan.of(ParallelConfig())), hidden=HIDDEN, std=0.3, output_std=0.3)
    cfg = StackConfig(pattern=(BLOCK,) * pattern, repeats=4 // pattern)
    return nnx.eval_shape(lambda: cfg.build(settings, recomputing=Recomputing(recompute=recompute)))


@pytest.mark.slow  # Masks follow from keys, which the tests above cover.
def test_a_stack_is_the_same_for_any_grouping_and_recomputation():
    """With dropout: masks are drawn again in the recomputation and must be the same."""
    rng = np.random.default_rng(1)
    values = {
        path.split(".", 2)[2]: rng.normal(0, 0.3, spec.shape) for path, spec in specs(abstract(1, "none")).items()
    }
    values = {path: value.astype(np.float32) for path, value in values.items()}
    with jax.default_matmul_precision("highest"):
        runs = [jax.jit(lambda case=case: run(*case, values))() for case in ((1, "none"), (2, "full"))]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5 * np.abs(second).max())
