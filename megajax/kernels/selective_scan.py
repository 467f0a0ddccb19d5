"""The recurrence of Mamba: a state for each channel, whose elements decay at rates of their own (Gu and Dao 2023).

    h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t        y_t = h_t c_t + skip x_t

B rows, S positions, I channels, Z state size; h is [I, Z]. A state starts from zero where a document starts, and a
document's results depend on no number of another one, to the last bit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


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
    """int32 [B, S]: number of the document in its row, see `megajax.kernels.ssd.runs_of`; None: one document."""
    state: Array | None = None
    """float32 [B, I, Z] before the first position; None: zeros."""


def selective_scan(scan: SelectiveScan, chunk: int) -> tuple[Array, Array]:
    """y [B, S, I] in x's dtype, and the last state [B, I, Z].

    States of that many positions exist at once, in float32: they are made by an associative scan, and again in the
    backward pass.
    """
    rows, length, channels = scan.x.shape
    chunk = min(chunk, length)
    state = scan.state
    if state is None:
        state = jnp.zeros((rows, channels, scan.a.shape[1]), jnp.float32)
    starts = jnp.zeros((rows, length), bool)
    if scan.runs is not None:
        starts = jnp.pad(scan.runs[:, 1:] != scan.runs[:, :-1], ((0, 0), (1, 0)))

    def in_chunks(x: Array) -> Array:
        """[B, S, ...] -> [chunks, B, L, ...]; positions behind the last have steps of 0, which change no state."""
        x = jnp.pad(x, ((0, 0), (0, -length % chunk), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    def advance(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        start, x, dt, b, c = at
        full = x.astype(jnp.float32)
        kept = jnp.exp(dt[..., None] * scan.a[None, None])
        kept = jnp.where(start[..., None, None], 0, kept)
        taken = (dt * full)[..., None] * b.astype(jnp.float32)[:, :, None]
        taken = jnp.concatenate([taken[:, :1] + kept[:, :1] * state[:, None], taken[:, 1:]], axis=1)
        states = lax.associative_scan(_both, (kept, taken), axis=1)[1]
        y = jnp.einsum("btiz,btz->bti", states, c.astype(jnp.float32)) + scan.skip[None, None] * full
        return states[:, -1], y.astype(x.dtype)

    inputs = tuple(in_chunks(each) for each in (starts, scan.x, scan.dt, scan.b, scan.c))
    state, y = lax.scan(jax.checkpoint(advance, prevent_cse=False), state, inputs)
    return jnp.moveaxis(y, 0, 1).reshape(rows, -1, channels)[:, :length], state


def _both(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """One piece of the recurrence after the other: each is a factor on the state, and what is added to it."""
    return first[0] * second[0], second[0] * first[1] + second[1]
