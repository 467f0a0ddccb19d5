"""The context of layers: facts about the tokens other than activations; and dropout, which derives from it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import LogicalAxes


class Context(NamedTuple):
    """Facts about the rows of one microbatch; a pytree, so it passes through scan and recompute."""

    positions: Array
    """int32 [B, S]: position of each token, for learned positions and RoPE."""
    index: Array
    """int32 [S]: index of each token in its row, independent of its position."""
    segments: Array | None = None
    """int32 [B, S]: number of the document; None when a row is one document."""
    row_keys: Array | None = None
    """uint32 [B, 2]: random key of each row; None for a deterministic forward."""
    bias: Array | None = None
    """[buckets, N]: a table of relative biases that all layers share; a weight, set where gradients are taken."""
    memory: Array | None = None
    """Output of the preceding section, such as [B, T, D] of an encoder; set where gradients are taken."""
    memory_segments: Array | None = None
    """int32 [B, T]: a position attends to the tokens of `memory` with its number in `segments`; None: to all."""
    splice: Array | None = None
    """int32 [B, S]: index in `memory` of the state that replaces the token at a position; -1: the token stays."""
    rotary: Array | None = None
    """int32 [B, S, A]: positions along several axes for RoPE, such as time, rows and columns; None: `positions`."""
    experts: Array | None = None
    """int16 [B, S, L, k]: 1 + the experts that steps of decoding chose for each token in each layer of the stack, which
    the routers take. 0: the router chooses; None: routers choose for all tokens."""
    layer: Array | int | None = None
    """Number of the layer in its stack, int32 []; None outside stacks."""
    padding: Array | None = None
    """bool [B, S]: positions without text, which are routed to no expert; None: there are none."""
    rows: Any = None
    """In a decoding step, the rows of the tokens: a `megajax.layers.decoding.StepRows`."""

    def for_layer(self, layer: Array | int) -> "Context":
        """The context with the number of the layer, which is also folded into each row's key."""
        keys = None if self.row_keys is None else fold_rows(self.row_keys, layer)
        return self._replace(row_keys=keys, layer=layer)


def spliced(ctx: Context, number: Array | int, hidden: int) -> Array | None:
    """The states [B, S, hidden] that `memory` has at the positions of `splice`, zeros elsewhere; None without them.

    number: of the state, if `memory` has several for each position: [B, T, states * hidden].
    """
    if ctx.memory is None or ctx.splice is None:
        return None
    states = ctx.memory.reshape(*ctx.memory.shape[:2], -1, hidden)
    states = jax.lax.dynamic_index_in_dim(states, number, 2, keepdims=False)
    places = jnp.clip(ctx.splice, 0, states.shape[1] - 1)
    return jnp.where(ctx.splice[..., None] >= 0, jnp.take_along_axis(states, places[..., None], axis=1), 0)


def keys_of_rows(key: Array, samples: Array) -> Array:
    """Random key of a run, sample numbers uint32 [B] -> a key for each row, uint32 [B, 2]."""
    return jax.vmap(lambda sample: jax.random.key_data(jax.random.fold_in(key, sample)))(samples)


def fold_rows(row_keys: Array, number: Array | int) -> Array:
    """uint32 [B, 2] -> uint32 [B, 2]: a new key for each row."""

    def fold(row: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(row), number))

    return jax.vmap(fold)(row_keys)


def dropout(
    x: Array,
    rate: float,
    ctx: Context,
    place: int,
    layout: Layout,
    axes: LogicalAxes = ("batch", "seq_residual", "embed"),
) -> Array:
    """Zero a share `rate` of x [B, S, ...] and scale up the rest; the identity without keys or at rate 0.

    Every token has a key of its own, from (seed, row, layer, place, index): the mask is the same on every layout.
    axes: logical axes of x.
    """
    if rate == 0 or ctx.row_keys is None:
        return x

    def draw(row: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(row), index)
        return jax.random.bernoulli(key, 1 - rate, x.shape[2:])

    keep = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(fold_rows(ctx.row_keys, place), ctx.index)
    keep = layout.act(keep, *axes)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
