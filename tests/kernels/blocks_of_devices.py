"""Number of blocks of scores that each device computes for a row, and of those that hold a needed score.

The Pallas kernels visit a range of blocks of keys for each block of queries, and in the backward pass also a range of
blocks of queries for each block of keys: `pallas_attention.visited`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.pallas import Blocks, visited
from megajax.kernels.context.ring import sources
from megajax.mesh.zigzag_order import SequenceSharding


class Counted(NamedTuple):
    """Blocks of each device for one head, int [C]."""

    by_query: np.ndarray
    """Visited by the kernels that loop over the keys of a block of queries."""
    by_key: np.ndarray
    """Visited by the kernel that loops over the queries of a block of keys."""
    needed: np.ndarray
    """With a score that a query needs."""

    def imbalance(self) -> float:
        """Of the busiest device over the mean."""
        return float(self.by_query.max() / self.by_query.mean())


def blocks_of_devices(
    sharding: SequenceSharding,
    length: int,
    blocks: Blocks,
    *,
    segments: np.ndarray | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Counted:
    """The blocks of one row of `length` positions; segments: int [T], ascending, None for one document.

    Where devices exchange heads, the counts are of each group, whose devices have different heads.
    """
    sharding = sharding.exchanged() if sharding.exchanging > 1 else sharding
    places = sharding.places(length).reshape(sharding.devices, -1)
    first, last = visible_range(np.arange(length), segments, window, causal)
    rows = []
    for rank, local_places in enumerate(places):
        key_places = [np.arange(length)]
        if "ring" in sharding.strategy and sharding.devices > 1:
            local = jnp.asarray(local_places)
            steps = sources(sharding, len(local_places), Mask(local, local, None, None, window, causal))
            key_places = [places[(rank - source) % sharding.devices] for source in steps]
        total = np.zeros(3, np.int64)
        for keys in key_places:
            ids = [None if segments is None else jnp.asarray(segments[index])[None] for index in (local_places, keys)]
            mask = Mask(jnp.asarray(local_places), jnp.asarray(keys), ids[0], ids[1], window, causal)
            total[:2] += [int(count.sum()) for count in visited(mask, 1, blocks)]
            total[2] += _needed(keys, first[local_places], last[local_places], blocks)
        rows.append(total)
    return Counted(*np.stack(rows, axis=1))


def visible_range(
    queries: np.ndarray, segments: np.ndarray | None, window: int | None, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position that each query sees, of a row of ascending segments."""
    first, last = np.zeros_like(queries), np.full_like(queries, len(queries) - 1)
    if segments is not None:
        first = np.searchsorted(segments, segments[queries])
        last = np.searchsorted(segments, segments[queries], side="right") - 1
    if window is not None:
        first = np.maximum(first, queries - window)
    return first, np.minimum(last, queries) if causal else last


def _needed(keys: np.ndarray, first: np.ndarray, last: np.ndarray, blocks: Blocks) -> int:
    """Pairs of blocks in which a query sees a key. keys: positions, ascending; first, last: seen by each query."""
    begin, end = np.searchsorted(keys, first), np.searchsorted(keys, last, side="right")
    total = 0
    for start in range(0, len(first), blocks.queries):
        rows = slice(start, start + blocks.queries)
        change = np.zeros(-(-len(keys) // blocks.keys) + 1, np.int64)
        nonempty = end[rows] > begin[rows]
        np.add.at(change, begin[rows][nonempty] // blocks.keys, 1)
        np.add.at(change, (end[rows][nonempty] - 1) // blocks.keys + 1, -1)
        total += int((change.cumsum() > 0).sum())
    return total
