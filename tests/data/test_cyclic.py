"""A different random order in each pass, compared with the samplers of PyTorch and Megatron-LM."""

from types import MappingProxyType

import numpy as np
import pytest
from user_errors import user_error

from megajax.data.rows.config import CyclicConfig
from megajax.data.rows.cyclic import CyclicRows, permutation


def cyclic(total: int, *, rows: int = 1000, shards: int, micro: int, buckets: bool) -> CyclicRows:
    config = CyclicConfig(buckets=buckets)
    return CyclicRows(config, source=range(total), rows=rows, shards=shards, micro_rows=micro * shards)


def test_permutations_are_pytorchs() -> None:
    assert permutation(10, 0).tolist() == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]
    assert permutation(2, 5).tolist() == [1, 0] and permutation(1, 0).tolist() == [0]
    long = permutation(700, 3).tolist()
    assert (long[:8], long[-4:]) == ([586, 114, 257, 160, 572, 320, 536, 648], [245, 149, 551, 332])


MEGATRON = [
    (40, 120, 1, True, [[6, 0, 3, 7, 8, 5, 1, 9, 2, 4], [16, 10, 13, 17, 18, 15, 11, 19, 12, 14],
                        [26, 20, 23, 27, 28, 25, 21, 29, 22, 24], [36, 30, 33, 37, 38, 35, 31, 39, 32, 34]]),
    (53, 48, 4, False, [[45, 26, 35, 1, 19, 42, 11, 23, 9, 18, 50, 17, 47, 25, 33, 36, 14, 41, 43, 21, 49, 13, 51, 0],
                        [27, 6, 30, 48, 46, 7, 24, 31, 12, 38, 4, 3, 34, 29, 39, 5, 32, 10, 15, 28, 40, 22, 16, 44]]),
    (10, 0, 3, False, [[8, 3, 4], [0, 7, 5], [2, 1, 6]]),
    (7, 0, 1, False, [[4, 0, 5, 3, 2, 6, 1]]),
]  # fmt: skip
"""Rows, rows consumed, rows of a microbatch on a shard, buckets, and the rows of each shard to the end of a pass."""


@pytest.mark.parametrize(("total", "consumed", "micro", "buckets", "expected"), MEGATRON)
def test_shards_read_what_megatrons_ranks_read(
    total: int, consumed: int, micro: int, buckets: bool, expected: list[list[int]]
) -> None:
    shards = len(expected)
    rows = cyclic(total, shards=shards, micro=micro, buckets=buckets)
    numbers = [rows[consumed + place] for place in range(len(expected[0]) * shards)]
    actual = np.array(numbers).reshape(-1, shards, micro).swapaxes(0, 1).reshape(shards, -1)
    assert actual.tolist() == expected


def test_attributes_of_the_source_are_reported() -> None:
    class Source:
        passes, skipped = 2, MappingProxyType({"corrupt": 3})

        def __len__(self) -> int:
            return 10

        def order(self) -> str:
            return "x"

    orders = set()
    for shards, buckets in ((1, True), (2, True), (2, False)):
        rows = CyclicRows(CyclicConfig(buckets=buckets), source=Source(), rows=25, shards=shards, micro_rows=2)
        orders.add(rows.order())
        assert rows.skipped == {"corrupt": 3} and rows.passes == 6
    assert len(orders) == 3 and all(order.endswith("-x") for order in orders)
    with user_error("data.loader.cyclic"):
        cyclic(10, shards=3, micro=4, buckets=True)
    with pytest.raises(IndexError):
        cyclic(10, rows=30, shards=1, micro=1, buckets=True)[30]
