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
from typing import Any, NamedTuple

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


class Within(NamedTuple):
    """What a chunk's corrections depend on besides the state. M chunks of L positions; by channel, G = N."""

    below: Array
    """float32 [B, M, N, L, L]: A, strictly lower triangular."""
    scores: Array
    """float32 [B, M, N, L, L]: decayed products of the queries of i and the keys of j, up to i; 0 elsewhere."""
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
    """Decay of the state before the chunk up to the position; 0 in later documents."""
    closing: Array
    """Decay after the position to the end of the chunk; 0 in earlier documents."""
    through: Array
    """float32 [B, M, N, K], or 1 for K: decay over the chunk; 0 if a document starts in it."""


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _within_chunks(chunk: int, rule: DeltaRule) -> Within:
    """All inputs of the pass over chunks. Decays by channel are put into queries and keys."""
    (rows, length, heads), dtype, by_channel = rule.v.shape[:3], rule.v.dtype, rule.g.ndim > rule.beta.ndim
    chunk = min(chunk, -(-length // BLOCK) * BLOCK)
    behind = -length % chunk

    def cut(x: Array) -> Array:
        """[B, S, ...] -> [B, M, L, ...]. The padding has g and beta of 0, which do not change the state."""
        return pad_end(x, behind).reshape(rows, -1, chunk, *x.shape[2:])

    q, k, v, g, beta = (cut(x) for x in (rule.q, rule.k, rule.v, rule.g, rule.beta))
    runs, beta = pad_runs(rule.runs, behind), jnp.moveaxis(beta, 3, 2)
    masks = Chunks.of(runs, rows, q.shape[1], chunk)
    if by_channel:
        q, k = (jnp.repeat(x, heads // x.shape[3], axis=3) for x in (q, k))
    sums = Sums.of(jnp.moveaxis(g, 2, -1))
    g = g if by_channel else jnp.moveaxis(g, 3, 2)
    below, scores = _among(q, k, g, beta, masks.pairs[:, :, None])
    rest: dict[str, Any] = {"below": below, "scores": scores, "v": v, "beta": beta}
    if not by_channel:
        return Within(
            q=q,
            keys=(k,),
            opening=jnp.where(masks.opening[:, :, None], jnp.exp(sums.until), 0),
            closing=jnp.where(masks.closing[:, :, None], jnp.exp(sums.after), 0),
            through=jnp.where(masks.through[:, :, None], jnp.exp(sums.until[..., -1]), 0)[..., None],
            **rest,
        )
    opening, closing = (
        jnp.where(mask[..., None, None], jnp.exp(jnp.moveaxis(log, -1, 2)), 0)
        for mask, log in ((masks.opening, sums.until), (masks.closing, sums.after))
    )
    ones = jnp.ones_like(beta)
    return Within(
        q=(opening * q).astype(dtype),
        keys=((opening * k).astype(dtype), (closing * k).astype(dtype)),
        opening=ones,
        closing=ones,
        through=jnp.where(masks.through[:, :, None, None], jnp.exp(sums.until[..., -1]), 0),
        **rest,
    )


def _among(q: Array, k: Array, g: Array, beta: Array, pairs: Array) -> tuple[Array, Array]:
    """`below` and `scores` of `Within`.

    q, k [B, M, L, G, K], g [B, M, N, L] or by channel [B, M, L, N, K], beta [B, M, N, L]; pairs: see `Chunks`, with a
    dimension for heads.
    """
    chunk, groups = q.shape[2:4]
    if g.ndim > beta.ndim:
        sums = Sums.of(jnp.moveaxis(g, 2, -1))
        q, k = (jnp.moveaxis(x, 3, 2) for x in (q, k))
        among_keys, scores = (jnp.where(pairs, decayed_products(x, k, sums), 0) for x in (k, q))
    else:
        decays = _grouped(jnp.where(pairs, jnp.exp(Sums.of(g).between()), 0), groups)
        among_keys, scores = (
            (decays * _product("bmigk,bmjgk->bmgij", x, k)[:, :, :, None]).reshape(*beta.shape, chunk) for x in (k, q)
        )
    return jnp.tril(beta[..., None] * among_keys, -1), scores


def _grouped(x: Array, groups: int, axis: int = 2) -> Array:
    """[B, M, N, ...] -> [B, M, G, N / G, ...], or another axis of heads."""
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])


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


class Solved(NamedTuple):
    """The corrections of chunks as a product with the state before the chunk and a term of the chunk alone."""

    reads: Array
    """[B, M, G, R, L, K], W: what the state before the chunk is read with."""
    written: Array
    """float32 [B, M, G, R, L, V], U: u for a state of zeros before the chunk."""

    @classmethod
    def of(cls, within: Within) -> "Solved":
        """By the inverse in float32."""
        dtype, groups = within.v.dtype, within.q.shape[3]
        inverse = unit_lower_inverse(within.below) * within.beta[..., None, :]
        opened = _grouped((inverse * within.opening[..., None, :]).astype(dtype), groups)
        reads = _product("bmgrij,bmjgk->bmgrik", opened, within.keys[0]).astype(dtype)
        inverse, v = _grouped(inverse.astype(dtype), groups), _grouped(within.v, groups, axis=3)
        return cls(reads, _product("bmgrij,bmjgrv->bmgriv", inverse, v))


def _carried(within: Within, solved: Solved, state: Array) -> tuple[Array, tuple[Array, Array]]:
    """The state [B, N, K, V] over all chunks: the last one, those before each chunk [M, B, G, R, K, V], and u."""
    dtype, groups = solved.reads.dtype, within.q.shape[3]

    def carry(state: Array, at: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        reads, written, keys, closing, through = at
        before = state.astype(dtype)
        updates = written - _product("bgrik,bgrkv->bgriv", reads, before)
        added = _product("bjgk,bgrjv->bgrkv", keys, (closing[..., None] * updates).astype(dtype))
        return through[..., None] * state + added, (before, updates.astype(dtype))

    decays = (_grouped(x, groups) for x in (within.closing, within.through))
    by_chunk = (*solved, within.keys[-1], *decays)
    last, rest = lax.scan(carry, _grouped(state, groups, axis=1), tuple(jnp.moveaxis(x, 1, 0) for x in by_chunk))
    return last.reshape(state.shape), rest


def _by_chunks(chunk: int, rule: DeltaRule) -> tuple[Array, Array]:
    """`gated_delta`, with the outputs of the padding."""
    (rows, _, heads, size), within = rule.v.shape, _within_chunks(chunk, rule)
    groups = within.q.shape[3]
    last, (before, updates) = _carried(within, Solved.of(within), rule.first_state())
    opening = jnp.moveaxis(_grouped(within.opening, groups), -1, 2)
    y = _product("bmigk,mbgrkv->bmigrv", within.q, before) * opening[..., None]
    scores = _grouped(within.scores.astype(rule.v.dtype), groups)
    y = y + _product("bmgrij,mbgrjv->bmigrv", scores, updates)
    y = (y * rule.q.shape[-1] ** -0.5).astype(rule.v.dtype)
    return y.reshape(rows, -1, heads, size), last


def _zeros_and_identity(rule: DeltaRule) -> Array:
    """States float32 [B, N, K, V + K] whose columns are zeros and those of the identity.

    Columns of a state do not affect one another: carried over a row, they become `gated_delta_transition`.
    """
    (rows, _, heads, size), keys = rule.v.shape, rule.k.shape[-1]
    columns = jnp.concatenate([jnp.zeros((keys, size), jnp.float32), jnp.eye(keys, dtype=jnp.float32)], axis=1)
    return jnp.broadcast_to(columns, (rows, heads, *columns.shape))


def _transition(chunk: int, rule: DeltaRule) -> tuple[Array, Array]:
    within, size = _within_chunks(chunk, rule), rule.v.shape[-1]
    solved = Solved.of(within)
    solved = solved._replace(written=jnp.pad(solved.written, [(0, 0)] * 5 + [(0, rule.k.shape[-1])]))
    last, _ = _carried(within, solved, _zeros_and_identity(rule))
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
