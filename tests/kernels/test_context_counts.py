"""No device computes a block of scores that it may skip, and in zigzag all compute the same number.

The Pallas kernels visit a range of blocks of keys for each block of queries, and in the backward pass also a range of
blocks of queries for each block of keys: `pallas.visited`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.kernels.attention.mask import Mask
from megajax.kernels.attention.pallas import AttentionBlocks, visited
from megajax.kernels.context.ring import sources
from megajax.mesh.zigzag_order import SequenceSharding

LENGTH, BLOCKS = 4096, AttentionBlocks(32, 16, 4)
BORDERS = [7, 300, 301, 1024, 1400, 3000, 3001, 3900]
"""First positions of documents: inside chunks, on their borders, and one position long."""
DOCUMENTS = np.searchsorted(BORDERS, np.arange(LENGTH), side="right")


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
    blocks: AttentionBlocks,
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
    visible = visible_pairs(length, segments, window, causal)
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
            pairs = visible[np.ix_(local_places, keys)]
            total[2] += pairs.reshape(-1, blocks.queries, len(keys) // blocks.keys, blocks.keys).any((1, 3)).sum()
        rows.append(total)
    return Counted(*np.stack(rows, axis=1))


def visible_pairs(length: int, segments: np.ndarray | None, window: int | None, causal: bool) -> np.ndarray:
    """Whether each query of a row sees each key, bool [T, T]."""
    back = np.arange(length)[:, None] - np.arange(length)
    visible = (back >= 0 if causal else True) & (back <= (length if window is None else window))
    return visible if segments is None else visible & (segments[:, None] == segments)


@pytest.mark.parametrize(
    ("strategy", "exchanging", "rounds", "segments", "window"),
    [
        ("ring", 1, 1, None, None),
        ("ring", 1, 1, DOCUMENTS, 100),
        ("ring", 1, 4, DOCUMENTS, None),
        ("ring", 1, 4, None, 1000),
        ("all_to_all", 8, 1, DOCUMENTS, 1000),
        ("ring+all_to_all", 2, 1, DOCUMENTS, None),
        ("ring+all_to_all", 2, 4, None, 100),
    ],
)
def test_blocks_that_no_query_needs_are_skipped(strategy, exchanging, rounds, segments, window) -> None:
    sharding = SequenceSharding(8, rounds, strategy, exchanging)
    counts = blocks_of_devices(sharding, LENGTH, BLOCKS, segments=segments, window=window)
    np.testing.assert_array_equal(counts.by_query, counts.needed)
    np.testing.assert_array_equal(counts.by_key, counts.needed)


@pytest.mark.parametrize(
    ("strategy", "exchanging", "rounds"),
    [("all_gather", 1, 1), ("ring", 1, 2), ("all_to_all", 8, 1), ("ring+all_to_all", 2, 1)],
)
def test_in_zigzag_all_devices_have_the_same_work(strategy: str, exchanging: int, rounds: int) -> None:
    counts = blocks_of_devices(SequenceSharding(8, rounds, strategy, exchanging), LENGTH, BLOCKS)
    assert counts.imbalance() <= 1.05
    # In total as many as one device has for the row.
    unsharded = blocks_of_devices(SequenceSharding(), LENGTH, BLOCKS)
    assert counts.by_query.sum() == unsharded.needed.sum() == unsharded.by_query.sum()
    # In plain chunks the last device has nearly twice the mean.
    plain = blocks_of_devices(SequenceSharding(8, 0, "all_gather"), LENGTH, BLOCKS)
    assert plain.imbalance() > 1.8
