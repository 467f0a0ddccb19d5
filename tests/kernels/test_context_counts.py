"""No device computes a block of scores that it may skip, and in zigzag all compute the same number."""

import numpy as np
import pytest
from blocks_of_devices import blocks_of_devices, visible_range

from megajax.kernels.attention.pallas import Blocks
from megajax.mesh.zigzag_order import SequenceSharding

LENGTH, BLOCKS = 4096, Blocks(32, 16, 4)
BORDERS = [7, 300, 301, 1024, 1400, 3000, 3001, 3900]
"""First positions of documents: inside chunks, on their borders, and one position long."""
DOCUMENTS = np.searchsorted(BORDERS, np.arange(LENGTH), side="right")
STRATEGIES = [("all_gather", 1), ("ring", 1), ("all_to_all", 8), ("ring+all_to_all", 2)]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("window", [None, 100, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("segments", [None, DOCUMENTS], ids=["whole rows", "documents"])
@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize(
    ("strategy", "exchanging"),
    [STRATEGIES[1], *(pytest.param(*case, marks=SLOW) for case in STRATEGIES if case[1] > 1)],
)
def test_blocks_that_no_query_needs_are_skipped(strategy, exchanging, rounds, segments, window) -> None:
    sharding = SequenceSharding(8, rounds, strategy, exchanging)
    counts = blocks_of_devices(sharding, LENGTH, BLOCKS, segments=segments, window=window)
    np.testing.assert_array_equal(counts.by_query, counts.needed)
    np.testing.assert_array_equal(counts.by_key, counts.needed)


@pytest.mark.parametrize(("strategy", "exchanging"), STRATEGIES)
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=SLOW)])
def test_in_zigzag_all_devices_have_the_same_work(strategy: str, exchanging: int, rounds: int) -> None:
    counts = blocks_of_devices(SequenceSharding(8, rounds, strategy, exchanging), LENGTH, BLOCKS)
    assert counts.imbalance() <= 1.05
    # In total as many as one device has for the row.
    unsharded = blocks_of_devices(SequenceSharding(), LENGTH, BLOCKS)
    assert counts.by_query.sum() == unsharded.needed.sum() == unsharded.by_query.sum()
    # In plain chunks the last device has nearly twice the mean.
    plain = blocks_of_devices(SequenceSharding(8, 0, "all_gather"), LENGTH, BLOCKS)
    assert plain.imbalance() > 1.8


def test_more_rounds_balance_documents_better() -> None:
    one_round, four, sixteen = (
        blocks_of_devices(SequenceSharding(8, rounds), LENGTH, BLOCKS, segments=DOCUMENTS).imbalance()
        for rounds in (1, 4, 16)
    )
    assert one_round > 1.2 > four > sixteen


def test_needed_blocks_have_a_visible_score() -> None:
    """The count itself, against all scores of a small row."""
    length, blocks, sharding = 256, Blocks(16, 16, 4), SequenceSharding(4, 1)
    segments = np.searchsorted([3, 64, 65, 200], np.arange(length), side="right")
    place = np.arange(length)
    visible = (place[:, None] >= place) & (place[:, None] - place <= 30) & (segments[:, None] == segments)
    first, last = visible_range(place, segments, 30, True)
    np.testing.assert_array_equal(visible.sum(1), last - first + 1)
    expected = [
        visible[places].reshape(-1, 16, length // 16, 16).any((1, 3)).sum()
        for places in sharding.places(length).reshape(4, -1)
    ]
    counts = blocks_of_devices(sharding, length, blocks, segments=segments, window=30)
    np.testing.assert_array_equal(counts.needed, expected)


@SLOW
def test_bidirectional_rows_need_all_blocks() -> None:
    for strategy in ("all_gather", "ring"):
        counts = blocks_of_devices(SequenceSharding(8, 0, strategy), LENGTH, BLOCKS, causal=False)
        assert (counts.by_query == LENGTH // 8 // 32 * (LENGTH // 16)).all()
        np.testing.assert_array_equal(counts.by_query, counts.needed)
