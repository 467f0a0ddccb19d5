"""The gated delta rule: a state per head that decays, and corrects what it returns for a key (Yang et al. 2024).

    h_t = exp(g_t) h_(t-1) + k_t u_t^T    u_t = beta_t (v_t - exp(g_t) h_(t-1)^T k_t)    y_t = h_t^T q_t / sqrt(K)

g_t is a number, or one for each channel of the key, which decays that row of h ("Kimi Linear", Kimi Team 2025).

B rows, S positions, N heads, V value size, G groups of N / G consecutive heads that share q and k, K key size. h is
[K, V]. The state is zero at the start of each document. `gated_delta_reference` is the recurrence as written,
`gated_delta` computes chunks of positions by matmuls.

With u_i of position i of a chunk, D_ij the decay after j up to i, and h the state before the chunk:

    u_i = beta_i (v_i - D_i h^T k_i - sum over j < i of D_ij (k_i k_j) u_j)

These equations have the matrix I + A, which is lower triangular with a diagonal of ones. Its inverse T gives u as a
term of the chunk alone and a product with h: U - W h (the WY representation, "Gated Delta Networks", section 3.3).

A document's results do not depend on other documents, to the last bit (see `chunks`): T has exact zeros between them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.ssm.chunks import BLOCK, Chunks, Sums, pad_end, pad_runs, starts_of


class DeltaRule(NamedTuple):
    """The inputs of the recurrence."""

    q: Array
    """[B, S, G, K], in compute dtype."""
    k: Array
    """[B, S, G, K], in compute dtype. The state stays bounded if beta |k|^2 is at most 2."""
    v: Array
    """[B, S, N, V], in compute dtype."""
    g: Array
    """float32 [B, S, N], or [B, S, N, K] for each channel: logarithms of decays, at most 0."""
    beta: Array
    """float32 [B, S, N]: the part of the error that is corrected, at least 0."""
    runs: Array | None = None
    """int32 [B, S]: number of the document in its row, see `runs_of`; None: a row is one document."""
    state: Array | None = None
    """float32 [B, N, K, V] before the first position; None: zeros."""

    def first_state(self) -> Array:
        """The state before the first position, float32 [B, N, K, V]."""
        if self.state is not None:
            return self.state
        (rows, _, heads, size), keys = self.v.shape, self.k.shape[-1]
        return jnp.zeros((rows, heads, keys, size), jnp.float32)


def unit_length(x: Array) -> Array:
    """x / sqrt(sum(x^2) + 1e-6) along the last dimension, in x's dtype: queries and keys of delta nets."""
    full = x.astype(jnp.float32)
    return (full * lax.rsqrt(jnp.square(full).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def gated_delta_step(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """One position: state float32 [B, N, K, V], q and k [B, G, K], v [B, N, V], g [B, N] or [B, N, K], beta [B, N]
    -> y, state."""
    heads = v.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), heads // x.shape[1], axis=1) for x in (q, k))
    state = jnp.exp(g).reshape(*g.shape[:2], -1, 1) * state
    error = v.astype(jnp.float32) - jnp.einsum("bnkv,bnk->bnv", state, k)
    state = state + k[..., None] * (beta[..., None] * error)[:, :, None]
    return (jnp.einsum("bnkv,bnk->bnv", state, q) * q.shape[-1] ** -0.5).astype(v.dtype), state


def gated_delta_reference(rule: DeltaRule) -> tuple[Array, Array]:
    """The recurrence, one position after another: y [B, S, N, V] in v's dtype, the last state [B, N, K, V]."""

    def advance(state: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        start, *inputs = at
        y, state = gated_delta_step(jnp.where(start[:, None, None, None], 0, state), *inputs)
        return state, y

    starts = starts_of(rule.runs, rule.v.shape[:2])
    by_position = tuple(jnp.moveaxis(x, 1, 0) for x in (starts, rule.q, rule.k, rule.v, rule.g, rule.beta))
    state, y = lax.scan(advance, rule.first_state(), by_position)
    return jnp.moveaxis(y, 0, 1), state


def gated_delta(rule: DeltaRule, chunk: int) -> tuple[Array, Array]:
    """The recurrence by matmuls over chunks of `chunk` positions: y [B, S, N, V] in v's dtype, the last state.

    Matmuls are in v's dtype with float32 sums; decays, T and states are float32. Only the inputs are saved for the
    backward pass: arrays of size chunk x chunk per head exist once, while a layer is computed.
    """
    length = rule.v.shape[1]
    if length == 1:
        # A row of one position is one document, regardless of `runs`.
        inputs = (x[:, 0] for x in (rule.q, rule.k, rule.v, rule.g, rule.beta))
        y, state = gated_delta_step(rule.first_state(), *inputs)
        return y[:, None], state
    y, state = jax.checkpoint(partial(_by_chunks, chunk), prevent_cse=False)(rule)
    return y[:, :length], state


def gated_delta_transition(rule: DeltaRule, chunk: int) -> tuple[Array, Array]:
    """The effect of a row on the state before it, h -> transition h + added; `rule.state` is not read.

    transition: float32 [B, N, K, K], 0 if a document starts after the first position; added: float32 [B, N, K, V].
    Only the inputs are saved for the backward pass.
    """
    return jax.checkpoint(partial(_transition, chunk), prevent_cse=False)(rule)


class Parts(NamedTuple):
    """What chunks are computed from. M chunks of L positions, R heads of a group."""

    scores: Array
    """float32 [B, M, G, R, L, L]: decayed products of the queries of i and the keys of j, up to i; 0 elsewhere."""
    reads: Array
    """[B, M, G, R, L, K], W: what the state before the chunk is read with."""
    written: Array
    """float32 [B, M, G, R, L, V], U: u for a state of zeros before the chunk."""
    queries: Array
    """[B, M, L, G, K]."""
    keys: Array
    """[B, M, L, G, K]."""
    opening: Array
    """float32 [B, M, G, R, L]: decay of the state before the chunk up to the position; 0 in later documents."""
    closing: Array
    """float32 [B, M, G, R, L]: decay after the position to the end of the chunk; 0 in earlier documents."""
    through: Array
    """float32 [B, M, G, R, K], or 1 for K: decay over the chunk; 0 if a document starts in it."""


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _parts(chunk: int, rule: DeltaRule) -> Parts:
    (rows, length, heads, size), (groups, keys), dtype = rule.v.shape, rule.k.shape[2:], rule.v.dtype
    chunk = min(chunk, -(-length // BLOCK) * BLOCK)
    pad, runs = partial(pad_end, behind=-length % chunk), pad_runs(rule.runs, -length % chunk)
    # The padding has g and beta of 0, which do not change the state.
    q, k = (pad(x).reshape(rows, -1, chunk, groups, keys) for x in (rule.q, rule.k))
    v = pad(rule.v).reshape(rows, -1, chunk, groups, heads // groups, size)
    g, beta = (
        pad(x).reshape(rows, -1, chunk, groups, heads // groups).transpose(0, 1, 3, 4, 2) for x in (rule.g, rule.beta)
    )
    sums, masks = Sums.of(g), Chunks.of(runs, rows, k.shape[1], chunk)
    opening = jnp.where(masks.opening[:, :, None, None], jnp.exp(sums.until), 0)
    decays = jnp.where(masks.pairs[:, :, None, None], jnp.exp(sums.between()), 0)
    among_keys, scores = (_product("bmigk,bmjgk->bmgij", x, k)[:, :, :, None] for x in (k, q))
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * decays * among_keys, -1)) * beta[..., None, :]
    return Parts(
        scores=decays * scores,
        reads=_product("bmgrij,bmjgk->bmgrik", (inverse * opening[..., None, :]).astype(dtype), k).astype(dtype),
        written=_product("bmgrij,bmjgrv->bmgriv", inverse.astype(dtype), v),
        queries=q,
        keys=k,
        opening=opening,
        closing=jnp.where(masks.closing[:, :, None, None], jnp.exp(sums.after), 0),
        through=jnp.where(masks.through[:, :, None, None], jnp.exp(sums.until[..., -1]), 0)[..., None],
    )


def _parts_by_channel(chunk: int, rule: DeltaRule) -> Parts:
    """`_parts` with a decay for each channel. Queries and keys contain the decays, and each head is a group."""
    (rows, length, heads), dtype = rule.v.shape[:3], rule.v.dtype
    chunk = min(chunk, -(-length // BLOCK) * BLOCK)
    runs = pad_runs(rule.runs, -length % chunk)

    def chunked(x: Array) -> Array:
        """[B, S, N, ...] -> [B, M, N, L, ...]."""
        x = pad_end(x, -length % chunk)
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 3, 2)

    q, k = (chunked(jnp.repeat(x, heads // x.shape[2], axis=2)) for x in (rule.q, rule.k))
    v, g, beta = (chunked(x) for x in (rule.v, rule.g, rule.beta))
    sums, masks = Sums.of(jnp.swapaxes(g, -1, -2)), Chunks.of(runs, rows, k.shape[1], chunk)
    opening, closing = (
        jnp.where(mask[:, :, None, :, None], jnp.exp(jnp.swapaxes(log, -1, -2)), 0)
        for mask, log in ((masks.opening, sums.until), (masks.closing, sums.after))
    )
    among_keys, scores = (jnp.where(masks.pairs[:, :, None], decayed_products(x, k, sums), 0) for x in (k, q))
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * among_keys, -1)) * beta[..., None, :]
    inverse, first_keys = inverse.astype(dtype), (opening * k).astype(dtype)
    ones = jnp.ones((*beta.shape[:3], 1, beta.shape[-1]), jnp.float32)
    through = jnp.where(masks.through[:, :, None, None, None], jnp.exp(sums.until[..., None, :, -1]), 0)
    return Parts(
        scores=scores[:, :, :, None],
        reads=_product("bmnij,bmnjk->bmnik", inverse, first_keys)[:, :, :, None].astype(dtype),
        written=_product("bmnij,bmnjv->bmniv", inverse, v)[:, :, :, None],
        queries=jnp.moveaxis((opening * q).astype(dtype), 2, 3),
        keys=jnp.moveaxis((closing * k).astype(dtype), 2, 3),
        opening=ones,
        closing=ones,
        through=through,
    )


def decayed_products(x: Array, y: Array, sums: Sums) -> Array:
    """float32 [..., L, L], at [i, j] for j <= i: the sum over channels of x_i y_j and the decay after j up to i.

    x, y [..., L, K]; sums: of logarithms [..., K, L]. Between blocks, matmuls of x with its decay from the start of its
    block, and y with the decay up to there; no factor is above 1. Within a block, products channel by channel.
    """
    *rest, count, block = sums.until_in_block.shape
    x, y = (array.reshape(*rest[:-1], count, block, rest[-1]) for array in (x, y))
    until, after = (jnp.moveaxis(log, -3, -1) for log in (sums.until_in_block, sums.after_in_block))
    # [..., i's block, j's block, j, K]
    before = jnp.exp(after[..., None, :, :, :] + jnp.moveaxis(sums.blocks_between, -3, -1)[..., :, :, None, :])
    apart = _product(
        "...iak,...ijbk->...iajb",
        (x * jnp.exp(until)).astype(x.dtype),
        (y[..., None, :, :, :] * before).astype(x.dtype),
    )
    within = jnp.exp(jnp.moveaxis(sums.between_in_block, -4, -1)) * x[..., :, None, :] * y[..., None, :, :]
    same_block = jnp.eye(count, dtype=bool)[:, None, :, None].reshape((1,) * (len(rest) - 1) + (count, 1, count, 1))
    products = jnp.where(same_block, within.sum(-1)[..., None, :], apart)
    return products.reshape(*rest[:-1], count * block, count * block)


def _parts_of(chunk: int, rule: DeltaRule) -> Parts:
    """The parts by the form of the decays."""
    return (_parts if rule.g.ndim == rule.beta.ndim else _parts_by_channel)(chunk, rule)


def _carried(parts: Parts, state: Array) -> tuple[Array, tuple[Array, Array]]:
    """The state [B, G, R, K, V] over all chunks: the last one, those before each chunk, and u [M, B, G, R, L, V]."""
    dtype = parts.reads.dtype

    def carry(state: Array, at: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        reads, written, keys, closing, through = at
        before = state.astype(dtype)
        updates = written - _product("bgrik,bgrkv->bgriv", reads, before)
        added = _product("bjgk,bgrjv->bgrkv", keys, (closing[..., None] * updates).astype(dtype))
        return through[..., None] * state + added, (before, updates.astype(dtype))

    by_chunk = (parts.reads, parts.written, parts.keys, parts.closing, parts.through)
    return lax.scan(carry, state, tuple(jnp.moveaxis(x, 1, 0) for x in by_chunk))


def _by_chunks(chunk: int, rule: DeltaRule) -> tuple[Array, Array]:
    """`gated_delta`, with the outputs of the padding."""
    rows, _, heads, size = rule.v.shape
    parts, first = _parts_of(chunk, rule), rule.first_state()
    grouped = first.reshape(rows, *parts.through.shape[2:4], *first.shape[2:])
    last, (before, updates) = _carried(parts, grouped)
    y = _product("bmigk,mbgrkv->bmigrv", parts.queries, before) * jnp.moveaxis(parts.opening, -1, 2)[..., None]
    y = y + _product("bmgrij,mbgrjv->bmigrv", parts.scores.astype(rule.v.dtype), updates)
    y = (y * rule.q.shape[-1] ** -0.5).astype(rule.v.dtype)
    return y.reshape(rows, -1, heads, size), last.reshape(first.shape)


def _transition(chunk: int, rule: DeltaRule) -> tuple[Array, Array]:
    """The state is carried for zeros and for the identity, side by side, as its columns do not affect one another."""
    parts, (rows, _, heads, size), keys = _parts_of(chunk, rule), rule.v.shape, rule.k.shape[-1]
    parts = parts._replace(written=jnp.pad(parts.written, [(0, 0)] * 5 + [(0, keys)]))
    columns = jnp.concatenate([jnp.zeros((keys, size), jnp.float32), jnp.eye(keys, dtype=jnp.float32)], axis=1)
    last, _ = _carried(parts, jnp.broadcast_to(columns, (rows, *parts.through.shape[2:4], *columns.shape)))
    last = last.reshape(rows, heads, *columns.shape)
    return last[..., size:], last[..., :size]


@jax.custom_vjp
def unit_lower_inverse(a: Array) -> Array:
    """(I + a)^-1 for strictly lower triangular a, float32 [..., L, L].

    Inverses of diagonal blocks of twice the size are made from those of the halves, as

        | P 0 |^-1   |     P^-1        0   |
        | C Q |    = | -Q^-1 C P^-1   Q^-1 |

    A series of powers of a would have terms up to 1e18 that cancel, where keys repeat. Zeros between documents stay.
    """
    *rest, length = a.shape[:-1]
    size = 1 << (length - 1).bit_length()
    a = jnp.pad(a, [(0, 0)] * len(rest) + [(0, size - length)] * 2)
    inverse, half = jnp.ones((*rest, size, 1, 1), a.dtype), 1
    while half < size:
        blocks = a.reshape(*rest, size // (2 * half), 2 * half, size // (2 * half), 2 * half)
        corner = jnp.moveaxis(jnp.diagonal(blocks[..., half:, :, :half], axis1=-4, axis2=-2), -1, -3)
        pairs = inverse.reshape(*rest, -1, 2, half, half)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        corner = -_exactly(second, _exactly(corner, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        half *= 2
    return inverse[..., 0, :length, :length]


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_exactly(transposed, _exactly(gradient, transposed)), -1),)


_exactly = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
"""Float32 products are not rounded to TF32: errors of the inverse are those of every later position of a chunk."""
unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
