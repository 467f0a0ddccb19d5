"""Chunks of positions of a recurrence: sums of logarithms of decays, and masks by document.

A document's results do not depend on other documents, to the last bit. Decays are therefore sums of the terms between
two positions, never differences of cumulative sums, whose rounding would depend on earlier terms. All terms are at most
0 and do not cancel, so large decays cost no accuracy.
"""

from math import gcd
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 16
"""Positions whose decays are summed one by one; over longer distances, the sums of whole blocks are added."""


def runs_of(segments: Array) -> Array:
    """Segment ids, int32 [B, S] -> number of the document in its row: a new document starts wherever the id changes."""
    changed = segments[:, 1:] != segments[:, :-1]
    return jnp.cumsum(jnp.pad(changed, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)


def starts_of(runs: Array | None, shape: tuple[int, ...]) -> Array:
    """bool [B, S]: whether a document starts at the position; False for the first position. shape: (B, S)."""
    if runs is None:
        return jnp.zeros(shape, bool)
    return jnp.pad(runs[:, 1:] != runs[:, :-1], ((0, 0), (1, 0)))


def pad_end(x: Array, behind: int) -> Array:
    """[B, S, ...] with `behind` positions of zeros at the end."""
    return jnp.pad(x, ((0, 0), (0, behind), *[(0, 0)] * (x.ndim - 2))) if behind else x


def pad_runs(runs: Array | None, behind: int) -> Array | None:
    """Runs with `behind` positions at the end, which belong to the last document."""
    return None if runs is None else jnp.pad(runs, ((0, 0), (0, behind)), mode="edge")


class Sums(NamedTuple):
    """Sums of logarithms of decays, float32, in chunks of L positions: M blocks of K.

    Each sum contains only the named terms, in an order that depends on their places only.
    """

    until: Array
    """[..., L]: from the start of the chunk up to and including the position."""
    after: Array
    """[..., L]: after the position, to the end of the chunk."""
    until_in_block: Array
    """[..., M, K]: like `until`, from the start of the block."""
    after_in_block: Array
    """[..., M, K]: like `after`, to the end of the block."""
    blocks_between: Array
    """[..., M, M]: over the blocks between two, [block of i, block of j]."""
    between_in_block: Array
    """[..., M, K, K]: after position j, up to i in the same block; [i, j]."""

    @classmethod
    def of(cls, logs: Array) -> "Sums":
        """logs: float32 [..., L]."""
        *rest, length = logs.shape
        block = gcd(length, BLOCK)
        blocks = logs.reshape(*rest, length // block, block)
        until = jnp.cumsum(blocks, axis=-1)
        after = lax.cumsum(shifted(blocks, -1), axis=blocks.ndim - 1, reverse=True)
        totals = until[..., -1]
        blocks_before = jnp.cumsum(shifted(totals, 1), axis=-1)
        blocks_after = lax.cumsum(shifted(totals, -1), axis=totals.ndim - 1, reverse=True)
        return cls(
            (blocks_before[..., None] + until).reshape(logs.shape),
            (after + blocks_after[..., None]).reshape(logs.shape),
            until,
            after,
            shifted(_sums_behind(totals), 1, axis=-2),
            _sums_behind(blocks),
        )

    def between(self) -> Array:
        """[..., L, L]: after position j, up to position i; [i, j]. Above the diagonal: any number up to 0."""
        *rest, count, block = self.until_in_block.shape
        # [..., i's block, i, j's block, j]
        rows, columns = self.until_in_block[..., None, None], self.after_in_block[..., None, None, :, :]
        apart = rows + (self.blocks_between[..., :, None, :, None] + columns)
        number = jnp.arange(count)
        same_block = (number[:, None] == number[None]).reshape((1,) * len(rest) + (count, 1, count, 1))
        between = jnp.where(same_block, self.between_in_block[..., :, :, None, :], apart)
        return between.reshape(*rest, count * block, count * block)


def _sums_behind(terms: Array) -> Array:
    """[..., L] -> [..., L, L]: at [i, j] the sum of the terms after j, up to i."""
    place = jnp.arange(terms.shape[-1])
    behind = (place[:, None] > place[None]).reshape((1,) * (terms.ndim - 1) + (place.size, place.size))
    return jnp.cumsum(jnp.where(behind, terms[..., None], 0), axis=-2)


def shifted(x: Array, by: int, axis: int = -1) -> Array:
    """x shifted by one place towards the end (1) or the start (-1); the free place is 0."""
    axis, end = axis % x.ndim, x.shape[axis]
    pads = [((by, 0) if by > 0 else (0, -by)) if dimension == axis else (0, 0) for dimension in range(x.ndim)]
    return lax.slice_in_dim(jnp.pad(x, pads), 0 if by > 0 else -by, end if by > 0 else end - by, axis=axis)


class Chunks(NamedTuple):
    """Masks by document, bool, for M chunks of L positions."""

    pairs: Array
    """[B or 1, M or 1, L, L]: position i depends on the input of position j."""
    opening: Array
    """[B, M, L]: positions of the document at the end of the previous chunk."""
    closing: Array
    """[B, M, L]: positions of the document at the end of the chunk."""
    through: Array
    """[B, M]: the chunk lies in the document at the end of the previous chunk."""

    @classmethod
    def of(cls, runs: Array | None, rows: int, count: int, chunk: int) -> "Chunks":
        """runs: see `runs_of`; None: a row is one document."""
        causal = jnp.tril(jnp.ones((1, 1, chunk, chunk), bool))
        if runs is None:
            all_true = jnp.ones((rows, count, chunk), bool)
            return cls(causal, all_true, all_true, all_true[..., 0])
        runs = runs.reshape(rows, count, chunk)
        last = runs[..., -1]
        before = jnp.concatenate([runs[:, :1, 0], last[:, :-1]], axis=1)
        pairs = (runs[..., :, None] == runs[..., None, :]) & causal
        return cls(pairs, runs == before[..., None], runs == last[..., None], last == before)
