"""The choice of the next token of each row, on the device, from logits whose vocabulary may be sharded.

R rows of logits: one for each row of a step, or D for each if rows have drafts. V ids of the vocabulary with padding or
of a device's shard, B edited ids of a row, W = ceil(V / 32) words of a mask, L tokens of the longest row, k most likely
tokens. Devices exchange sums and their few largest entries, never all
logits. The order of changes is that of vLLM (vllm/v1/sample/sampler.py, `Sampler`): allowed tokens, forbidden tokens
and biases, penalties; then temperature, min_p, top_k and top_p. All but those of sampling also act on greedy rows.
`transformers` applies min_p last; the two differ only where min_p and top_p are combined.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.cross_entropy import Normaliser, VocabularyShard
from megajax.mesh.layout import Layout

LOGITS, ROW, ROWS = ("batch", "vocab"), ("batch",), ("batch", None)
BITS = 32
WORD = 32
"""Bits of a word of a mask."""


class Choosing(IntEnum):
    """The compiled programs that choose tokens. Each includes the previous ones: a step runs the largest of its rows'.

    A row's token does not depend on the program.
    """

    GREEDY = 0
    """The first most likely token and its log-probability, without random numbers or filters."""
    SAMPLED = 1
    """Temperature, min_p, top_k, top_p."""
    FULL = 2
    """Allowed and forbidden tokens, biases, penalties; ranks and the most likely tokens."""


type Values = Any
"""An array; a numpy array while a step is packed."""


class Drawing(NamedTuple):
    """Sampling settings of rows."""

    temperature: Values
    """float32 [R]; 0: the first most likely token."""
    top_k: Values
    """int32 [R]; 0: all."""
    top_p: Values
    """float32 [R]; 1: all."""
    min_p: Values
    """float32 [R]; 0: all."""
    seed: Values
    """uint32 [R, 2]: upper and lower half of the seed."""
    number: Values
    """int32 [R]: number of generated tokens of the row before the chosen one."""


class Edits(NamedTuple):
    """Changes of rows' logits before a token is chosen."""

    allowed: Values
    """uint32 [R, W]: bit i % 32 of word i // 32 is set where id i is allowed."""
    tokens: Values
    """int32 [R, B]: ids with a bias; -1: unused."""
    biases: Values
    """float32 [R, B]: added to their logits; -inf forbids a token."""
    repetition: Values
    """float32 [R]; 1: no penalty."""
    presence: Values
    """float32 [R]; 0: no penalty."""
    frequency: Values
    """float32 [R]; 0: no penalty."""
    prompt: Values
    """int32 [R]: number of tokens of the prompt."""
    length: Values
    """int32 [R]: number of tokens of prompt and answer before the chosen one."""
    listed: Values
    """int32 [R, N]: ids whose log-probabilities are requested; -1: unused."""


class RowSampling(NamedTuple):
    """The settings of the rows of a step; None for those that the program does not read."""

    drawing: Drawing | None = None
    """Read by Choosing.SAMPLED and Choosing.FULL."""
    edits: Edits | None = None
    """Read by Choosing.FULL."""


class Chosen(NamedTuple):
    """The next tokens of rows."""

    token: Array
    """int32 [R]; -1 for a row with non-finite logits or without an allowed token."""
    logprob: Array
    """float32 [R]: its log-probability under the model, before any setting."""
    drawn: Array
    """float32 [R]: its log-probability in the distribution that it was drawn from, after all settings, renormalised;
    0 where the most likely token is chosen. Without settings the same bits as `logprob`."""
    finite: Array
    """bool [R]: whether all logits of the row are finite."""
    scores: "Scores | None" = None
    """Read by Choosing.FULL."""
    listed: Array | None = None
    """float32 [R, N]: log-probabilities of `Edits.listed` under the model; without meaning where it is -1."""


class Scores(NamedTuple):
    """Rank of a given token, and the most likely tokens, under the model, before any setting."""

    rank: Array
    """int32 [R]: 1 + number of more likely ids."""
    top: Array
    """int32 [R, k]: ids of the most likely tokens; equally likely ones by ascending id."""
    logprobs: Array
    """float32 [R, k]: their log-probabilities."""


def choose(
    layout: Layout,
    size: int,
    program: Choosing,
    k: int,
    logits: Array,
    rows: RowSampling,
    tokens: Array | None = None,
) -> Chosen:
    """The next token of each row and its log-probability; for Choosing.FULL, its rank and the k most likely tokens.

    size: number of ids in use; later columns are padding. logits: float32 [R, V], laid out (batch, vocab), V divisible
    by the devices of `vocab`. rows: must have what `program` reads. tokens: int32 [R / D, L], prompt, answer and draft
    of each row of the step; required for Choosing.FULL.

    Sampling uses the Gumbel-max method: a token is the argmax of logits / temperature + noise. The noise depends only
    on the row's seed, the number of the token and the id, so a row's token does not depend on other rows or on the
    sharding of the vocabulary.
    """
    noise = None if rows.drawing is None else layout.act(_noise(rows.drawing, logits.shape[1]), *LOGITS)
    axes = layout.free_axes("vocab")
    row: Any = ROW
    several: Any = ROWS
    out: Any = Chosen(row, row, row, row)
    if program == Choosing.FULL:
        out = out._replace(scores=Scores(row, several, several), listed=several)

    def local(logits: Array, noise: Array | None, rows: RowSampling, tokens: Array | None) -> Chosen:
        return _choose(shard_of(logits, size, axes), program, k, logits, noise, rows, tokens)

    ins = LOGITS, None if noise is None else LOGITS, jax.tree.map(_axes, rows), None if tokens is None else ROWS
    return layout.island(local, ins, out)(logits, noise, rows, tokens)


def shard_of(logits: Array, size: int, axes: tuple[str, ...]) -> VocabularyShard:
    """The columns of this device, inside an island."""
    return VocabularyShard(lax.axis_index(axes) * logits.shape[1] if axes else 0, size, axes)


def _axes(array: Array) -> tuple[str | None, ...]:
    return ("batch", *[None] * (array.ndim - 1))


def _choose(
    shard: VocabularyShard,
    program: Choosing,
    k: int,
    logits: Array,
    noise: Array | None,
    rows: RowSampling,
    tokens: Array | None,
) -> Chosen:
    used = (ids_of(shard, logits.shape[1]) < shard.size)[None]
    raw = jnp.where(used, logits, -jnp.inf)
    finite = shard.sum((used & ~jnp.isfinite(logits)).sum(-1, dtype=jnp.int32)) == 0
    x, listed = raw, None
    if program == Choosing.FULL:
        if rows.edits is None or tokens is None:
            raise ValueError("Choosing.FULL needs the edits and tokens of the rows")
        x = add_biases(mask_disallowed(x, rows.edits.allowed, shard), rows.edits, shard)
        x = apply_penalties(x, rows.edits, tokens, shard)
    top, first = best(x, 1, shard)
    token, drawn, as_is = first[:, 0], jnp.zeros(len(raw)), jnp.zeros(len(raw), bool)
    if program >= Choosing.SAMPLED:
        if rows.drawing is None or noise is None:
            raise ValueError(f"Program.{program.name} needs to know how the rows draw")
        sampled = rows.drawing.temperature > 0
        others, log_p = _sample_tokens(x, top, noise, rows.drawing, shard)
        token, drawn = jnp.where(sampled, others, token), jnp.where(sampled, log_p, drawn)
        as_is = _draws_as_is(rows.drawing) & (shard.sum((x != raw).sum(-1, dtype=jnp.int32)) == 0)
    normaliser = normaliser_of(raw, shard)
    logit = shard.sum(entries(raw, token, shard))
    scores = scores_of(raw, logit, normaliser, k, shard) if program == Choosing.FULL else None
    if program == Choosing.FULL and rows.edits is not None:
        listed = normaliser.log_p(shard.sum(entries_of(raw, rows.edits.listed, shard)))
    usable, log_p = finite & (top[:, 0] > -jnp.inf), normaliser.log_p(logit)
    return Chosen(jnp.where(usable, token, -1), log_p, jnp.where(as_is, log_p, drawn), finite, scores, listed)


def _sample_tokens(x: Array, top: Array, noise: Array, drawing: Drawing, shard: VocabularyShard) -> tuple[Array, Array]:
    """Tokens int32 [R] sampled from softmax(x / temperature) over the kept tokens, and their log-probabilities there.

    top: float32 [R, 1], max of x.
    """
    temperature = jnp.where(drawing.temperature > 0, drawing.temperature, 1)[:, None]
    # Subtract the maximum first: at a tiny temperature, the other quotients become -inf, and the maximum stays 0.
    scaled = jnp.where(x > -jnp.inf, (x - top) / temperature, -jnp.inf)
    keep = keep_mask(scaled, drawing, shard)
    _, ids = best(jnp.where(keep, scaled + noise, -jnp.inf), 1, shard)
    total = shard.sum(jnp.where(keep, jnp.exp(scaled), 0).sum(-1))
    return ids[:, 0], Normaliser(jnp.zeros(len(x)), total).log_p(shard.sum(entries(scaled, ids[:, 0], shard)))


def _draws_as_is(drawing: Drawing) -> Array:
    """bool [R]: whether a row draws from the softmax of its logits."""
    filters = (drawing.top_k > 0) | (drawing.top_p < 1) | (drawing.min_p > 0)
    return (drawing.temperature == 1) & ~filters


def _noise(drawing: Drawing, count: int) -> Array:
    """Standard Gumbel noise, float32 [R, V], a function of the key fold_in(seed, number) of each row and the id.

    The bits of an id are a keyed hash, with the finalizer of MurmurHash3 as its rounds; threefry for every id takes
    four times as long. They are mapped to -log(-log(1 - v)) of v in (0, 1), which is accurate in float32 for small v,
    where the noise is largest.
    """
    keys = jax.vmap(partial(jax.random.wrap_key_data, impl="threefry2x32"))(drawing.seed)
    data = jax.vmap(lambda key, number: jax.random.key_data(jax.random.fold_in(key, number)))(keys, drawing.number)
    ids = jnp.arange(count, dtype=jnp.uint32)[None]
    bits = _mixed(_mixed(ids ^ data[:, :1]) + data[:, 1:])
    v = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # XLA:CPU would fuse it into the argmax, where it is not vectorized: 60 instead of 20 ms for 2^20 ids.
    return lax.optimization_barrier(-jnp.log(-jnp.log1p(-v)))


def _mixed(x: Array) -> Array:
    """A bijection of uint32 in which every bit of x affects every bit of the result."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def normaliser_of(x: Array, shard: VocabularyShard) -> Normaliser:
    """That of each row of x [R, V] over all devices."""
    maximum = shard.max(x.max(-1))
    return Normaliser(maximum, shard.sum(jnp.exp(x - maximum[:, None]).sum(-1)))


def scores_of(x: Array, logit: Array, normaliser: Normaliser, k: int, shard: VocabularyShard) -> Scores:
    """Rank of the tokens with these logits [R] in the rows of x [R, V], and the k most likely tokens."""
    rank = 1 + shard.sum((x > logit[:, None]).sum(-1, dtype=jnp.int32))
    values, ids = best(x, k, shard)
    return Scores(rank, ids, normaliser.log_p(values))


def mask_disallowed(x: Array, allowed: Array, shard: VocabularyShard) -> Array:
    """x float32 [R, V], -inf for ids whose bit is not set in allowed, uint32 [R, W]."""
    ids = ids_of(shard, x.shape[1])
    mask_words = allowed[:, jnp.minimum(ids // WORD, allowed.shape[1] - 1)]
    bits = (mask_words >> (ids % WORD).astype(jnp.uint32)[None]) & 1
    return jnp.where((bits == 1) & (ids < allowed.shape[1] * WORD)[None], x, -jnp.inf)


def add_biases(x: Array, edits: Edits, shard: VocabularyShard) -> Array:
    """x float32 [R, V] with the biases added; -inf as a bias forbids a token."""
    return x.at[_rows(x), _columns(edits.tokens, shard, x.shape[1])].add(edits.biases, mode="drop")


def apply_penalties(x: Array, edits: Edits, tokens: Array, shard: VocabularyShard) -> Array:
    """x float32 [R, V] less the penalties of tokens that the row already has.

    tokens: int32 [R / D, L], each for D rows of x: prompt, answer and draft; those at or past `edits.length` are
    ignored.

    - repetition r (Keskar et al. 2019): the logit of a token of prompt or answer is divided by r if positive, else
      multiplied by it; as RepetitionPenaltyLogitsProcessor of `transformers`.
    - then frequency f and presence p: a logit is lowered by f times the number of times that the answer has the token,
      and by p if it has it; as in the API of OpenAI. The prompt does not count.

    Skipped if no row has a penalty.
    """
    penalized = (edits.repetition != 1) | (edits.presence != 0) | (edits.frequency != 0)
    return lax.cond(penalized.any(), lambda: _with_penalties(x, edits, tokens, shard), lambda: x)


def _with_penalties(x: Array, edits: Edits, tokens: Array, shard: VocabularyShard) -> Array:
    tokens = jnp.repeat(tokens, x.shape[0] // tokens.shape[0], axis=0)
    place = jnp.arange(tokens.shape[1])[None]
    present = place < edits.length[:, None]
    columns = _columns(jnp.where(present, tokens, -1), shard, x.shape[1])
    answer = present & (place >= edits.prompt[:, None])
    occurs = jnp.zeros(x.shape, bool).at[_rows(x), columns].set(True, mode="drop")
    counts = jnp.zeros(x.shape, jnp.int32).at[_rows(x), columns].add(answer.astype(jnp.int32), mode="drop")
    repetition = edits.repetition[:, None]
    x = jnp.where(occurs, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - edits.frequency[:, None] * counts.astype(x.dtype)
    return x - edits.presence[:, None] * (counts > 0).astype(x.dtype)


def _rows(x: Array) -> Array:
    return jnp.arange(x.shape[0])[:, None]


def _columns(tokens: Array, shard: VocabularyShard, count: int) -> Array:
    """Columns of ids on this device; `count`, which is dropped, for others and for -1."""
    columns = tokens - shard.first
    return jnp.where((tokens >= 0) & (columns >= 0) & (columns < count), columns, count)


def keep_mask(x: Array, drawing: Drawing, shard: VocabularyShard) -> Array:
    """Which tokens may be drawn, bool [R, V].

    x: float32 [R, V], logits divided by the temperature, less the largest of the row; -inf for forbidden tokens.

    - min_p (Nguyen et al. 2024): tokens at least min_p times as likely as the most likely one.
    - top_k: the k most likely of these; with more tokens equal to the k-th, those as well (as `transformers` does).
    - top_p (Holtzman et al. 2019): the smallest set of the most likely of these whose probabilities, renormalized over
      these, sum to at least p.

    The thresholds of top_k and top_p are found by bisection over the 32 bits of a float: 32 passes over the row that
    count or sum, instead of a sort. This is exact for any k and p, devices exchange one number per row and pass, and a
    sharded vocabulary is never gathered. Of equal logits, either all are kept or none. A filter that no row needs is
    skipped.
    """
    sampled = drawing.temperature > 0
    keep = (x >= jnp.log(drawing.min_p)[:, None]) & (x > -jnp.inf)
    top_k_rows = sampled & (drawing.top_k > 0) & (drawing.top_k < shard.size)
    keep = lax.cond(top_k_rows.any(), lambda: _top_k(x, keep, top_k_rows, drawing.top_k, shard), lambda: keep)
    nucleus = sampled & (drawing.top_p < 1)
    return lax.cond(nucleus.any(), lambda: _top_p(x, keep, nucleus, drawing.top_p, shard), lambda: keep)


def _top_k(x: Array, keep: Array, rows: Array, k: Array, shard: VocabularyShard) -> Array:
    order = order_of(x)
    lowest = threshold(order, lambda part: shard.sum((part & keep).sum(-1, dtype=jnp.int32)) >= k)
    return keep & (order >= jnp.where(rows, lowest, 0)[:, None])


def _top_p(x: Array, keep: Array, rows: Array, p: Array, shard: VocabularyShard) -> Array:
    order, weights = order_of(x), jnp.where(keep, jnp.exp(x), 0)
    # A p that is 0 in float32 keeps the most likely token as well.
    enough = jnp.maximum(p * shard.sum(weights.sum(-1)), jnp.finfo(x.dtype).tiny)
    lowest = threshold(order, lambda part: shard.sum(jnp.where(part, weights, 0).sum(-1)) >= enough)
    return keep & (order >= jnp.where(rows, lowest, 0)[:, None])


def ids_of(shard: VocabularyShard, count: int) -> Array:
    """Ids of the `count` columns of this device, int32 [V]."""
    return shard.first + jnp.arange(count, dtype=jnp.int32)


def best(x: Array, k: int, shard: VocabularyShard) -> tuple[Array, Array]:
    """The k largest entries of each row of x [R, V] over all devices, and their ids, int32: both [R, k].

    In descending order; equal entries by ascending id, like numpy.argmax.
    """
    if k == 1:
        places = jnp.argmax(x, -1).astype(jnp.int32)[:, None]
        values = jnp.take_along_axis(x, places, -1)
    else:
        values, places = lax.top_k(x, min(k, x.shape[1]))
    ids = ids_of(shard, x.shape[1])[places]
    if shard.axes:
        values, ids = (lax.all_gather(part, shard.axes, axis=1, tiled=True) for part in (values, ids))
        values, places = lax.top_k(values, min(k, values.shape[1]))
        ids = jnp.take_along_axis(ids, places, -1)
    return values, ids


def entries(x: Array, ids: Array, shard: VocabularyShard) -> Array:
    """x [R, V] at ids int32 [R], float32 [R]; see `entries_of`."""
    return entries_of(x, ids[:, None], shard)[:, 0]


def entries_of(x: Array, ids: Array, shard: VocabularyShard) -> Array:
    """x [R, V] at ids int32 [R, N], float32. 0 for ids of other devices, so the sum over devices is the entry."""
    place = ids - shard.first
    local = (place >= 0) & (place < x.shape[1])
    return jnp.where(local, jnp.take_along_axis(x, jnp.where(local, place, 0), -1), 0)


def order_of(x: Array) -> Array:
    """float32 -> uint32 with the same order; -0 and 0 are equal, NaN is not allowed."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> (BITS - 1) == 1, ~bits, bits | jnp.uint32(1 << (BITS - 1)))


def threshold(order: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest t with `enough(order >= t)`, uint32 [R]; 0 if there is none. A binary search, without a sort.

    order: uint32 [R, V]; enough: kept entries bool [R, V] -> bool [R], monotonic in the kept entries.
    """

    def step(bit: Array, t: Array) -> Array:
        higher = t | (jnp.uint32(1) << (BITS - 1 - bit).astype(jnp.uint32))
        return jnp.where(enough(order >= higher[:, None]), higher, t)

    return lax.fori_loop(0, BITS, step, jnp.zeros(order.shape[0], jnp.uint32))
