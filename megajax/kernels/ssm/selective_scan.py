"""The recurrence of Mamba: one state per channel, and each of its elements has its own decay rate (Gu and Dao 2023).

    h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t        y_t = h_t c_t + skip x_t

B rows, S positions, I channels, Z state size; h is [I, Z]. The state is zero at the start of each document, and a
document's results do not depend on other documents, to the last bit.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.ssm.chunks import pad_end, starts_of


class SelectiveScan(NamedTuple):
    """The inputs of the recurrence."""

    x: Array
    """[B, S, I], in compute dtype."""
    dt: Array
    """float32 [B, S, I]: steps, at least 0."""
    a: Array
    """float32 [I, Z], below 0."""
    b: Array
    """[B, S, Z], in compute dtype."""
    c: Array
    """[B, S, Z], in compute dtype."""
    skip: Array
    """float32 [I]."""
    runs: Array | None = None
    """int32 [B, S]: number of the document in its row, see `megajax.kernels.ssm.chunks.runs_of`; None: one document."""
    state: Array | None = None
    """float32 [B, I, Z] before the first position; None: zeros."""


def selective_scan(scan: SelectiveScan, chunk: int) -> tuple[Array, Array]:
    """y [B, S, I] in x's dtype, and the last state [B, I, Z].

    The float32 states of `chunk` positions exist at once: an associative scan computes them, and the backward pass
    computes them again.
    """
    rows, length, channels = scan.x.shape
    chunk = min(chunk, length)
    state = scan.state
    if state is None:
        state = jnp.zeros((rows, channels, scan.a.shape[1]), jnp.float32)
    starts = starts_of(scan.runs, scan.x.shape[:2])

    def advance(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        start, x, dt, b, c = at
        full = x.astype(jnp.float32)
        decay = jnp.exp(dt[..., None] * scan.a[None, None])
        decay = jnp.where(start[..., None, None], 0, decay)
        updates = (dt * full)[..., None] * b.astype(jnp.float32)[:, :, None]
        updates = jnp.concatenate([updates[:, :1] + decay[:, :1] * state[:, None], updates[:, 1:]], axis=1)
        states = lax.associative_scan(compose_transitions, (decay, updates), axis=1)[1]
        y = jnp.einsum("btiz,btz->bti", states, c.astype(jnp.float32)) + scan.skip[None, None] * full
        return states[:, -1], y.astype(x.dtype)

    inputs = tuple(_in_chunks(array, chunk) for array in (starts, scan.x, scan.dt, scan.b, scan.c))
    state, y = lax.scan(jax.checkpoint(advance, prevent_cse=False), state, inputs)
    return jnp.moveaxis(y, 0, 1).reshape(rows, -1, channels)[:, :length], state


def selective_transition(scan: SelectiveScan, chunk: int) -> tuple[Array, Array]:
    """The effect of a row on the state before it, h -> decay * h + added; `scan.state` is not read.

    decay: float32 [B, I, Z], 0 if a document starts after the first position; added: float32 [B, I, Z]. Each chunk of
    positions is one sum, without the states between them. Only the inputs are saved for the backward pass.
    """
    return jax.checkpoint(partial(_transition, min(chunk, scan.x.shape[1])), prevent_cse=False)(scan)


def _transition(chunk: int, scan: SelectiveScan) -> tuple[Array, Array]:
    def advance(transition: tuple[Array, Array], at: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        start, x, dt, b = at
        # Positions of the chunk's last document: no other document starts at them or after them.
        closing = lax.cumsum(jnp.pad(start[:, 1:], ((0, 0), (0, 1))).astype(jnp.int32), axis=1, reverse=True) == 0
        after = lax.cumsum(jnp.pad(dt[:, 1:], ((0, 0), (0, 1), (0, 0))), axis=1, reverse=True)
        scaled_x = jnp.where(closing[..., None], dt * x.astype(jnp.float32), 0)
        decays = jnp.exp(after[..., None] * scan.a[None, None])
        added = (decays * scaled_x[..., None] * b.astype(jnp.float32)[:, :, None]).sum(1)
        decay = jnp.exp(dt.sum(1)[..., None] * scan.a[None])
        decay = jnp.where(start.any(1)[:, None, None], 0, decay)
        return compose_transitions(transition, (decay, added)), None

    shape = (scan.x.shape[0], *scan.a.shape)
    nothing = jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    inputs = tuple(
        _in_chunks(array, chunk) for array in (starts_of(scan.runs, scan.x.shape[:2]), scan.x, scan.dt, scan.b)
    )
    return lax.scan(jax.checkpoint(advance, prevent_cse=False), nothing, inputs)[0]


def _in_chunks(x: Array, chunk: int) -> Array:
    """[B, S, ...] -> [chunks, B, L, ...]; the padding has steps of 0, which do not change the state."""
    x = pad_end(x, -x.shape[1] % chunk)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def compose_transitions(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two transitions of a state, `first` and then `second`; each is (decay, added): h -> decay * h + added."""
    return first[0] * second[0], second[0] * first[1] + second[1]
