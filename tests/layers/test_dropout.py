"""Masks of dropout; tests/one_device.py has them on layouts, test_segments.py groups layers."""

import jax
import jax.numpy as jnp
import numpy as np

from megajax.layers.context import Context, dropout
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

ROWS, LENGTH, HIDDEN = 4, 8, 16


def context(rows: int = ROWS, first: int = 0) -> Context:
    keys = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(jax.random.key(5), n)))(first + jnp.arange(rows))
    positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], (rows, LENGTH))
    return Context(positions, jnp.arange(LENGTH), None, keys)


def dropped(layout: Layout, ctx: Context, place: int = 1) -> jax.Array:
    return dropout(jnp.ones((len(ctx.positions), LENGTH, HIDDEN)), 0.25, ctx, place, layout)


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
