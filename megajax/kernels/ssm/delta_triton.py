"""The gated delta rule's pass over chunks as Pallas Triton kernels, for NVIDIA GPUs from compute capability 8.0 on.

`carry` keeps the state of a head in registers from chunk to chunk. What plain JAX stores for each chunk (the products
of the inverse with keys and values, and states) is only stored in the backward pass, which has three kernels: the
states before each chunk, again in order; the gradients of those states, in reverse order; and then all other
gradients, for all chunks at once. Each applies `jax.vjp` to the formula of one chunk, `_chunk`. What does not depend on
the state is made by the kernels of `delta_pairs`.

B rows, M chunks of L positions, N heads with values of V, G groups of N / G consecutive heads, K key size. L and K are
powers of two from 16 on. Sums are in float32 in a fixed order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from megajax.kernels.ssm.delta_pairs import Chunk, Dot, Options, differentiable, dot_in, inverse, products, read
from megajax.kernels.ssm.gated_delta import DeltaRule, within_chunks, zeros_and_identity


class Pass(NamedTuple):
    """The inputs of the pass over chunks, except the state."""

    inverse: Array
    """[B, M, N, L, L]: of the equations of the corrections, see `megajax.kernels.ssm.gated_delta`."""
    scores: Array
    """[B, M, N, L, L]: decayed products of queries and keys."""
    q: Array
    """[B, M, L, G, K]."""
    keys: tuple[Array, ...]
    """[B, M, L, G, K]: those that read the state before the chunk, and those that write to the one after it, if they
    differ."""
    v: Array
    """[B, M, L, N, V]."""
    beta: Array
    """float32 [B, M, N, L], as are the next two."""
    opening: Array
    """Decay of the state before the chunk up to the position."""
    closing: Array
    """Decay after the position to the end of the chunk."""
    through: Array
    """float32 [B, M, N, K]: decay over the chunk."""


def _chunk(x: Pass, state: Array, dot: Dot) -> tuple[Array, Array]:
    """Outputs of one chunk and the state after it, float32. x: float32 values of one head without B, M and N.

    Columns of the state [K, V] and of values do not affect one another.
    """
    error = x.v - x.opening[:, None] * dot(x.keys[0], state)
    u = dot(x.inverse, x.beta[:, None] * error)
    y = x.opening[:, None] * dot(x.q, state) + dot(x.scores, u)
    return x.q.shape[-1] ** -0.5 * y, x.through[:, None] * state + dot(x.keys[-1].T, x.closing[:, None] * u)


def _states_kernel(x: Pass, state_ref: Any, out_ref: Any, last_ref: Any, *, dot: Dot, outputs: bool) -> None:
    """One head and some columns over all chunks. out_ref: for the outputs, or for the states before each chunk."""

    def step(i: Array, state: Array) -> Array:
        y, after = _chunk(read(x, i), state, dot)
        out_ref[i] = (y if outputs else state).astype(out_ref.dtype)
        return after

    last_ref[...] = lax.fori_loop(jnp.int32(0), jnp.int32(x.v.shape[0]), step, state_ref[...])


def _state_gradients_kernel(x: Pass, dy_ref: Any, dlast_ref: Any, after_ref: Any, first_ref: Any, *, dot: Dot) -> None:
    """Gradients of the states after each chunk, and of the first state, in reverse order."""
    count = x.v.shape[0]

    def step(i: Array, dstate: Array) -> Array:
        at = count - 1 - i
        after_ref[at] = dstate.astype(after_ref.dtype)
        # A chunk is linear in the state, so its gradient does not depend on the state.
        _, pull = jax.vjp(lambda state: _chunk(read(x, at), state, dot), jnp.zeros_like(dstate))
        return pull((read(dy_ref, at), dstate))[0]

    first_ref[...] = lax.fori_loop(jnp.int32(0), jnp.int32(count), step, dlast_ref[...])


def _gradients_kernel(
    x: Pass, before_ref: Any, after_ref: Any, dy_ref: Any, out: Pass, *, dot: Dot, columns: int
) -> None:
    """Gradients of one chunk of the heads of a group. before_ref, after_ref: states before, gradients after."""
    heads, size = x.inverse.shape[0], x.v.shape[-1]
    q, keys = read((x.q, x.keys), ...)

    def of_head(n: Array, sums: Any) -> Any:
        per_head = ("inverse", "scores", "beta", "opening", "closing", "through")
        shared = x._replace(q=q, keys=keys, **{name: read(getattr(x, name), n) for name in per_head}, v=jnp.float32(0))
        total = jax.tree.map(jnp.zeros_like, shared)
        for first in range(0, size, columns):
            at = pl.ds(first, columns)
            v, dy = read((x.v, dy_ref), slice(None), n, at)
            before, after = read((before_ref, after_ref), n, slice(None), at)
            _, pull = jax.vjp(lambda x, before=before: _chunk(x, before, dot), shared._replace(v=v))
            (gradient,) = pull((dy, after))
            out.v[:, n, at] = gradient.v.astype(out.v.dtype)
            total = jax.tree.map(jnp.add, total, gradient._replace(v=jnp.float32(0)))
        for name in per_head:
            ref = getattr(out, name)
            ref[n] = getattr(total, name).astype(ref.dtype)
        return jax.tree.map(jnp.add, sums, (total.q, total.keys))

    zeros = jax.tree.map(jnp.zeros_like, (q, keys))
    dq, dkeys = lax.fori_loop(jnp.int32(0), jnp.int32(heads), of_head, zeros)
    for ref, value in zip((out.q, *out.keys), (dq, *dkeys), strict=True):
        ref[...] = value.astype(ref.dtype)


def _all_chunks(shape: tuple[int, ...], heads: int, axis: int, columns: int | None = None) -> pl.BlockSpec:
    """All chunks of one head, for a grid of (columns, heads, rows). axis: the dimension of heads or groups."""
    share, last = heads // shape[axis], len(shape) - 1
    block: list[int | None] = list(shape)
    block[0] = block[axis] = None
    block[last] = columns or shape[-1]

    def index(column: Any, head: Any, row: Any) -> tuple[Any, ...]:
        places = {0: row, axis: lax.div(head, jnp.int32(share))} | ({last: column} if columns else {})
        return tuple(places.get(dimension, 0) for dimension in range(len(shape)))

    return pl.BlockSpec(tuple(block), index)


def _one_chunk(shape: tuple[int, ...], groups: int, axis: int) -> pl.BlockSpec:
    """One chunk of the heads of a group, for a grid of (chunks, groups, rows); of a group without its dimension."""
    block: list[int | None] = list(shape)
    block[0] = block[1] = None
    block[axis] = shape[axis] // groups

    def index(chunk: Any, group: Any, row: Any) -> tuple[Any, ...]:
        places = {0: row, 1: chunk, axis: group}
        return tuple(places.get(dimension, 0) for dimension in range(len(shape)))

    return pl.BlockSpec(tuple(block), index)


def _specs(x: Pass, spec: Callable[..., Any], columns: int | None = None) -> Pass:
    """Of every input; columns: of v."""
    wide = {"columns": columns} if columns else {}
    return Pass(
        **{name: spec(getattr(x, name).shape, axis=2) for name in ("inverse", "scores", "beta", "opening", "closing")},
        through=spec(x.through.shape, axis=2),
        q=spec(x.q.shape, axis=3),
        keys=tuple(spec(k.shape, axis=3) for k in x.keys),
        v=spec(x.v.shape, axis=3, **wide),
    )


def _states(options: Options, x: Pass, state: Array, *, outputs: bool) -> tuple[Array, Array]:
    """Outputs [B, M, L, N, V], or states before each chunk [B, M, N, K, V], in v's dtype; and the last state."""
    (rows, count, _, heads, size), keys = x.v.shape, x.q.shape[-1]
    of_chunks = x.v.shape if outputs else (rows, count, heads, keys, size)
    spec = partial(_all_chunks, heads=heads)
    first = _state_spec(keys, options.columns)
    return options.call(
        partial(_states_kernel, dot=dot_in(x.v.dtype), outputs=outputs),
        "delta_outputs" if outputs else "delta_states",
        grid=(size // options.columns, heads, rows),
        in_specs=[_specs(x, spec, options.columns), first],
        out_specs=[spec(of_chunks, axis=3 if outputs else 2, columns=options.columns), first],
        out_shape=[jax.ShapeDtypeStruct(of_chunks, x.v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)],
    )(x, state)


def _state_spec(keys: int, columns: int) -> pl.BlockSpec:
    """Of a state [B, N, K, V], for a grid of (columns, heads, rows)."""
    return pl.BlockSpec((None, None, keys, columns), lambda column, head, row: (row, head, 0, column))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def carry(options: Options, x: Pass, state: Array) -> tuple[Array, Array]:
    """The state, float32 [B, N, K, V], over all chunks: outputs [B, M, L, N, V] in v's dtype, and the last state.

    Saves its inputs for the backward pass.
    """
    return _states(options, x, state, outputs=True)


def _carry_backward(options: Options, saved: tuple[Pass, Array], gradients: tuple[Array, Array]) -> tuple[Pass, Array]:
    (x, state), (dy, dlast) = saved, gradients
    (rows, count, _, heads, size), groups, keys = x.v.shape, *x.q.shape[3:]
    before, _ = _states(options, x, state, outputs=False)
    dot, spec = differentiable(dot_in(x.v.dtype)), partial(_all_chunks, heads=heads)
    first = _state_spec(keys, options.columns)
    by_column = spec(before.shape, axis=2, columns=options.columns)
    after, dstate = options.call(
        partial(_state_gradients_kernel, dot=dot),
        "delta_state_gradients",
        grid=(size // options.columns, heads, rows),
        in_specs=[_specs(x, spec, options.columns), spec(dy.shape, axis=3, columns=options.columns), first],
        out_specs=[by_column, first],
        out_shape=[
            jax.ShapeDtypeStruct(before.shape, before.dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ],
    )(x, dy, dlast)
    spec = partial(_one_chunk, groups=groups)
    of_group, states = _specs(x, spec), spec(before.shape, axis=2)
    # A group has one key head: without the dimension.
    shared: Any = pl.BlockSpec(
        (None, None, x.q.shape[2], None, keys), lambda chunk, group, row: (row, chunk, 0, group, 0)
    )
    of_group = of_group._replace(q=shared, keys=tuple(shared for _ in x.keys))
    (dx,) = options.call(
        partial(_gradients_kernel, dot=dot, columns=options.columns),
        "delta_gradients",
        warps=8,
        grid=(count, groups, rows),
        in_specs=[of_group, states, states, of_group.v],
        out_specs=[of_group],
        out_shape=[jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), x)],
    )(x, before, after, dy)
    return dx, dstate


carry.defvjp(lambda options, x, state: (carry(options, x, state), (x, state)), _carry_backward)


def _pass(chunk: int, rule: DeltaRule, options: Options) -> Pass:
    """The inputs of the pass over chunks, by the other kernels."""

    def among(q: Array, k: Array, g: Array, beta: Array, runs: Array | None) -> tuple[Array, Array]:
        runs = jnp.zeros(q.shape[:3], jnp.int32) if runs is None else runs
        return products(options, Chunk(q, k, g, beta), runs)

    within = within_chunks(chunk, rule, among)
    through = jnp.broadcast_to(within.through, (*within.through.shape[:3], rule.k.shape[-1]))
    inverses = inverse(options, rule.v.dtype, within.below)
    return Pass(inverses, *within[1:-1], through)


def mix_by_kernels(chunk: int, rule: DeltaRule, *, interpret: bool = False) -> tuple[Array, Array]:
    """See `megajax.kernels.ssm.gated_delta.Form`. `interpret` runs the kernels on a CPU."""
    options = Options.of(rule.k.shape[-1], rule.v.shape[-1], interpret=interpret)
    y, last = carry(options, _pass(chunk, rule, options), rule.first_state())
    return y.reshape(y.shape[0], -1, *y.shape[3:]), last


def transition_by_kernels(chunk: int, rule: DeltaRule, *, interpret: bool = False) -> tuple[Array, Array]:
    """See `megajax.kernels.ssm.gated_delta.Form`; values are zeros for the columns of the identity."""
    size, keys = rule.v.shape[-1], rule.k.shape[-1]
    options = Options.of(keys, size + keys, interpret=interpret)
    inputs = _pass(chunk, rule, options)
    inputs = inputs._replace(v=jnp.pad(inputs.v, [(0, 0)] * 4 + [(0, keys)]))
    _, last = carry(options, inputs, zeros_and_identity(rule))
    return last[..., size:], last[..., :size]
