"""The recurrence of Mamba-2: one state per head, which decays and accumulates inputs (Dao and Gu 2024, SSD).

    h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t        y_t = h_t c_t + skip x_t

B rows, S positions, N heads, P head size, G groups of N / G heads that share b and c, Z state size. h is
[N, P, Z]. The state is zero at the start of each document. `ssd_reference` is the recurrence as written, `ssd` computes
chunks of positions by matmuls.

A document's results do not depend on other documents, to the last bit (see `chunks`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.ssm.chunks import BLOCK, Chunks, Sums, pad_end, pad_runs, shifted, starts_of

UNROLL = 8
"""Chunks per iteration of the loop that carries states from chunk to chunk."""


class Scan(NamedTuple):
    """The inputs of the recurrence."""

    x: Array
    """[B, S, N, P], in compute dtype."""
    dt: Array
    """float32 [B, S, N]: steps, at least 0."""
    a: Array
    """float32 [N], below 0."""
    b: Array
    """[B, S, G, Z], in compute dtype."""
    c: Array
    """[B, S, G, Z], in compute dtype."""
    skip: Array
    """float32 [N]."""
    runs: Array | None = None
    """int32 [B, S]: number of the document in its row, see `runs_of`; None: a row is one document."""
    state: Array | None = None
    """float32 [B, N, P, Z] before the first position; None: zeros."""


def first_state(scan: Scan) -> Array:
    """The state before the first position, float32 [B, N, P, Z]."""
    if scan.state is not None:
        return scan.state
    (rows, _, heads, size), states = scan.x.shape, scan.b.shape[-1]
    return jnp.zeros((rows, heads, size, states), jnp.float32)


def ssd_step(state: Array, x: Array, dt: Array, a: Array, b: Array, c: Array, skip: Array) -> tuple[Array, Array]:
    """One position: state float32 [B, N, P, Z], x [B, N, P], dt [B, N], b and c [B, G, Z] -> y [B, N, P], state."""
    full, heads = x.astype(jnp.float32), x.shape[1]
    b, c = (jnp.repeat(array.astype(jnp.float32), heads // b.shape[1], axis=1) for array in (b, c))
    update = jnp.einsum("bnp,bnz->bnpz", full * dt[..., None], b)
    state = jnp.exp(dt * a[None])[..., None, None] * state + update
    y = jnp.einsum("bnpz,bnz->bnp", state, c) + skip[None, :, None] * full
    return y.astype(x.dtype), state


def ssd_reference(scan: Scan) -> tuple[Array, Array]:
    """The recurrence, one position after another: y [B, S, N, P] in x's dtype, the last state [B, N, P, Z]."""

    def advance(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        start, x, dt, b, c = at
        state = jnp.where(start[:, None, None, None], 0, state)
        y, state = ssd_step(state, x, dt, scan.a, b, c, scan.skip)
        return state, y

    starts = starts_of(scan.runs, scan.x.shape[:2])
    by_position = tuple(jnp.moveaxis(array, 1, 0) for array in (starts, scan.x, scan.dt, scan.b, scan.c))
    state, y = lax.scan(advance, first_state(scan), by_position)
    return jnp.moveaxis(y, 0, 1), state


def ssd(scan: Scan, chunk: int) -> tuple[Array, Array]:
    """The recurrence by matmuls over chunks of `chunk` positions: y [B, S, N, P] in x's dtype, the last state.

    Matmuls are in x's dtype with float32 sums; steps, decays and states are float32. Only the inputs are saved for the
    backward pass: arrays of size chunk x chunk per head exist once, while a layer is computed.
    """
    length = scan.x.shape[1]
    if length == 1:
        # A row of one position is one document, regardless of `runs`.
        x, dt, b, c = (array[:, 0] for array in (scan.x, scan.dt, scan.b, scan.c))
        y, state = ssd_step(first_state(scan), x, dt, scan.a, b, c, scan.skip)
        return y[:, None], state
    chunk = min(chunk, -(-length // BLOCK) * BLOCK)
    scan = _padded(scan, -length % chunk)
    y, state = jax.checkpoint(partial(_by_chunks, chunk), prevent_cse=False)(scan)
    return y[:, :length], state


def ssd_transition(scan: Scan) -> tuple[Array, Array]:
    """The effect of a row on the state before it, h -> decay * h + added; `scan.state` is not read.

    decay: float32 [B, N], 0 if a document starts after the first position; added: float32 [B, N, P, Z]. Only the inputs
    are saved for the backward pass.
    """
    return jax.checkpoint(_transition, prevent_cse=False)(scan)


def _transition(scan: Scan) -> tuple[Array, Array]:
    (rows, length, heads, size), (groups, states) = scan.x.shape, scan.b.shape[2:]
    logs = scan.dt * scan.a[None, None]
    runs = jnp.zeros((rows, length), jnp.int32) if scan.runs is None else scan.runs
    closing, through = runs == runs[:, -1:], runs[:, 0] == runs[:, -1]
    after = lax.cumsum(shifted(logs, -1, axis=1), axis=1, reverse=True)
    input_weights = jnp.where(closing[..., None], jnp.exp(after), 0) * scan.dt
    input_weights = input_weights.reshape(rows, length, groups, -1, 1)
    weighted = (input_weights * scan.b[:, :, :, None].astype(jnp.float32)).astype(scan.x.dtype)
    x = scan.x.reshape(rows, length, groups, -1, size)
    added = jnp.einsum("bjgrp,bjgrz->bgrpz", x, weighted, preferred_element_type=jnp.float32)
    decay = jnp.where(through[:, None], jnp.exp(logs.sum(1)), 0)
    return decay, added.reshape(rows, heads, size, states)


def _padded(scan: Scan, behind: int) -> Scan:
    """Pads the end with positions whose steps are 0, which do not change the state."""
    padded = {name: pad_end(getattr(scan, name), behind) for name in ("x", "dt", "b", "c")}
    return scan._replace(**padded, runs=pad_runs(scan.runs, behind))


def _by_chunks(chunk: int, scan: Scan) -> tuple[Array, Array]:
    """`ssd` for rows of whole chunks. Letters: m chunk, i and j positions in it, g group, r head of a group."""
    (rows, length, heads, size), (groups, states) = scan.x.shape, scan.b.shape[2:]
    count, heads_per_group, dtype = length // chunk, heads // scan.b.shape[2], scan.x.dtype
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    x = scan.x.reshape(rows, count, chunk, groups, heads_per_group, size)
    b, c = (of.reshape(rows, count, chunk, groups, states) for of in (scan.b, scan.c))
    dt = scan.dt.reshape(rows, count, chunk, groups, heads_per_group).transpose(0, 1, 3, 4, 2)
    sums = Sums.of(dt * scan.a.reshape(1, 1, groups, heads_per_group, 1))
    parts = Chunks.of(scan.runs, rows, count, chunk)

    # Contributions within a chunk, of position j to position i.
    shared = product("bmigz,bmjgz->bmgij", c, b)[:, :, :, None]
    pair_weights = jax.checkpoint(partial(_pair_weights, dtype))(sums, shared, parts.pairs[:, :, None, None], dt)
    y = product("bmgrij,bmjgrp->bmigrp", pair_weights, x)

    # The states between chunks, from what each chunk adds to them.
    input_weights = jnp.where(parts.closing[:, :, None, None], jnp.exp(sums.after), 0) * dt
    weighted = (jnp.moveaxis(input_weights, -1, 2)[..., None] * b[:, :, :, :, None].astype(jnp.float32)).astype(dtype)
    added = product("bmjgrp,bmjgrz->mbgrpz", x, weighted)
    decay = jnp.where(parts.through[:, :, None, None], jnp.exp(sums.until[..., -1]), 0)

    def carry(state: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        decay, added = at
        return decay[..., None, None] * state + added, state

    first = first_state(scan).reshape(rows, groups, heads_per_group, size, states)
    last, before = lax.scan(carry, first, (jnp.moveaxis(decay, 1, 0), added), unroll=min(UNROLL, count))

    # Contributions of the state before the chunk to position i.
    state_decay = jnp.where(parts.opening[:, :, None, None], jnp.exp(sums.until), 0)
    y = y + product("bmigz,mbgrpz->bmigrp", c, before.astype(dtype)) * jnp.moveaxis(state_decay, -1, 2)[..., None]
    y = y + x.astype(jnp.float32) * scan.skip.reshape(1, 1, 1, groups, heads_per_group, 1)
    return y.astype(dtype).reshape(rows, length, heads, size), last.reshape(rows, heads, size, states)


def _pair_weights(dtype: jnp.dtype, sums: Sums, shared: Array, pairs: Array, dt: Array) -> Array:
    """Weights of the inputs of positions j in the outputs of i, [B, M, G, N / G, L, L]; recomputed, not saved."""
    return (jnp.where(pairs, jnp.exp(sums.between()) * shared, 0) * dt[..., None, :]).astype(dtype)


def gated_norm(
    y: Array,
    z: Array,
    gain: Array,
    *,
    groups: int,
    epsilon: float,
    before_gate: bool,
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Array:
    """Root-mean-square normalisation of y silu(z) within each group of heads, [B, S, N, P] -> the same in y's dtype.

    gain [N, P], or [1, P] for all heads. before_gate: y is normalised, and then multiplied by silu(z), or another
    function of z.
    """
    full, gate = y.astype(jnp.float32), activation(z.astype(jnp.float32))
    if not before_gate:
        full = full * gate
    heads = y.shape[2] // groups
    # Squares of each head first: if a group's heads are on several devices, only these sums are exchanged.
    squares = jnp.square(full).sum(-1).reshape(*y.shape[:2], groups, heads).sum(-1)
    scale = lax.rsqrt(squares / (heads * y.shape[3]) + epsilon)
    full = full * jnp.repeat(scale, heads, axis=2)[..., None] * gain.astype(jnp.float32)[None, None]
    return (full * gate if before_gate else full).astype(y.dtype)


def causal_conv(
    x: Array, kernel: Array, bias: Array | None = None, runs: Array | None = None, before: Array | None = None
) -> Array:
    """Depthwise convolution over the last K positions of a document, float32 [B, S, ...].

    x [B, S, ...]; kernel [K, ...], the last entry for the position itself; bias [...]; runs as in `Scan`;
    before [B, K - 1, ...]: the values before the first position in its document; None: zeros.
    """
    reach, length = kernel.shape[0] - 1, x.shape[1]
    if before is None:
        before = jnp.zeros((x.shape[0], reach, *x.shape[2:]), x.dtype)
    long = jnp.concatenate([before.astype(x.dtype), x], axis=1).astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for place in range(reach + 1):
        shifted = lax.slice_in_dim(long, place, place + length, axis=1)
        if runs is not None:
            same_document = jnp.pad(runs, ((0, 0), (reach - place, 0)), mode="edge")[:, :length] == runs
            shifted = jnp.where(jnp.reshape(same_document, (*runs.shape, *[1] * (x.ndim - 2))), shifted, 0)
        y = y + shifted * kernel[place].astype(jnp.float32)[None, None]
    return y
