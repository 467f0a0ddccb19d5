"""Attention work of rows, counted score by score, and the balancing of a step's rows over data groups."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import tokenizer, write_random

from megajax.data.rows.balancing import (
    Imbalance,
    RowWork,
    balance_rows,
    device_scores,
    document_lengths,
    imbalance,
    lengths_of_row,
)
from megajax.data.rows.config import CyclicConfig
from megajax.data.rows.splits import Rows
from megajax.data.text.config import BlendConfig, FillInMiddleConfig, MockConfig
from megajax.layers.multiply_adds import VisibleKeys
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.models.decoder.config import text_schema

pytestmark = pytest.mark.smoke

CUTS = [SequenceSharding(), *(SequenceSharding(devices, rounds) for devices in (2, 4) for rounds in (0, 1, 2))]


def mask_of(segments: np.ndarray, keys: VisibleKeys) -> np.ndarray:
    """bool [S, S]: whether the query of a row sees the key of a column."""
    index = np.arange(len(segments))
    place = index - np.searchsorted(segments, segments)
    distance = index[:, None] - index[None]
    visible = (distance >= 0) & (segments[:, None] == segments[None])
    if keys.chunk is not None:
        visible &= (place // keys.chunk)[:, None] == (place // keys.chunk)[None]
    return visible if keys.window is None else visible & (distance <= keys.window)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 48), min_size=1, max_size=48),
    sharding=st.sampled_from(CUTS),
    window=st.none() | st.integers(0, 48),
    chunk=st.none() | st.integers(1, 48),
)
def test_scores_of_each_device(
    lengths: list[int], sharding: SequenceSharding, window: int | None, chunk: int | None
) -> None:
    """Counted in the mask of a row of 48 tokens."""
    keys = VisibleKeys(True, window) if chunk is None else VisibleKeys(True, chunk=chunk)
    segments = np.resize(np.repeat(np.arange(len(lengths)), lengths), 48) if sum(lengths) >= 48 else np.zeros(48, int)
    visible = mask_of(segments, keys).sum(1)
    expected = visible[sharding.places(48)].reshape(sharding.devices, -1).sum(1)
    found = document_lengths(segments)
    np.testing.assert_array_equal(device_scores(found, sharding, keys), expected)
    assert keys.pairs(found).sum() == visible.sum() == device_scores(found, visible=keys).item()


def test_devices_that_exchange_heads_have_equal_shares() -> None:
    lengths, ring = np.array([30, 2, 16]), SequenceSharding(2, 1)
    combined = SequenceSharding(4, 1, "ring+all_to_all", exchanging=2)
    np.testing.assert_array_equal(device_scores(lengths, combined), np.repeat(device_scores(lengths, ring) / 2, 2))
    all_to_all = SequenceSharding(4, 1, "all_to_all", exchanging=4)
    assert imbalance(device_scores(lengths, all_to_all)) == 1


def test_work_is_of_positions_and_of_scores_by_window() -> None:
    windowed = VisibleKeys(True, window=3)
    work, lengths = RowWork(10.0, ((VisibleKeys(True), 2.0), (windowed, 1.0))), np.array([5, 11])
    sharding = SequenceSharding(2, 1)
    expected = 10 * 16 / 2 + 2 * device_scores(lengths, sharding) + device_scores(lengths, sharding, windowed)
    np.testing.assert_array_equal(work.of_devices(lengths, sharding), expected)
    assert work.of_row(lengths, sharding) == expected.max()
    # 15 + 66 scores, and 14 + 38 within a window of 3.
    assert work.of_row(lengths) == 10 * 16 + 2 * 81 + 52


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("groups", "microbatches", "group_rows"), [(2, 1, 2), (2, 4, 1), (4, 3, 2), (8, 8, 1), (1, 2, 3)]
)
def test_each_row_has_one_place(groups: int, microbatches: int, group_rows: int, across: bool) -> None:
    work = np.random.default_rng(0).lognormal(0, 1, groups * microbatches * group_rows)
    places = balance_rows(work, groups, microbatches, across=across)
    assert sorted(places.tolist()) == list(range(len(work)))
    in_order, balanced = (Imbalance.of(values, groups, microbatches) for values in (work, work[places]))
    assert 1 <= balanced.step <= in_order.step and balanced.microbatch <= in_order.microbatch + 1e-12
    same_microbatch = [set(micro) == set(range(n * groups * group_rows, (n + 1) * groups * group_rows))
            for n, micro in enumerate(places.reshape(microbatches, -1).tolist())]  # fmt: skip
    assert across or all(same_microbatch)
    if across:
        micro = work[places].reshape(microbatches, -1)
        assert (micro[:-1].min(1) >= micro[1:].max(1)).all(), "neighbours have like work"


@settings(max_examples=60, deadline=None)
@given(work=st.lists(st.floats(0.01, 100), min_size=6, max_size=6))
def test_rows_of_a_microbatch_are_assigned_nearly_optimally(work: list[float]) -> None:
    """Longest processing time first is at most 4/3 of the optimum (Graham 1969)."""
    sizes = np.array(work)
    best = min(Imbalance.of(sizes[list(order)], 3, 1).step for order in permutations(range(6)))
    assert Imbalance.of(sizes[balance_rows(sizes, 3, 1, across=False)], 3, 1).step <= 4 / 3 * best + 1e-9


def test_ties_go_to_the_first() -> None:
    assert balance_rows(np.ones(8), 2, 2, across=True).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


class Unread:
    """A source whose rows must not be read."""

    def __init__(self, source: Any):
        self.document_lengths = source.document_lengths


SOURCES = {
    "whole rows": (BlendConfig, {}, False),
    "documents": (BlendConfig, {"isolate_documents": True}, False),
    "end tokens": (BlendConfig, {"reset_attention_mask": True}, True),
    "both": (BlendConfig, {"reset_attention_mask": True, "isolate_documents": True}, True),
    "padded": (BlendConfig, {"isolate_documents": True, "extra_token": False}, False),
    "middle": (FillInMiddleConfig, {"isolate_documents": True, "rate": 1.0, "prefix_token": "p", "middle_token": "m",
                                    "suffix_token": "s"}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_sources_know_their_documents(tmp_path: Path, name: str) -> None:
    kind, options, positions = SOURCES[name]
    prefixes = [str(write_random(tmp_path / each, documents=60, seed=seed)) for seed, each in enumerate("ab")]
    instance = tokenizer()
    instance.token_id = instance.encode = None
    if kind is FillInMiddleConfig:
        instance.token_id = "pms".index
        instance.encode = lambda text: np.full(len(text), 7, np.int32)
        instance.decode = lambda tokens: "x" * len(tokens)
    for paths in (prefixes[:1], ["0.5", prefixes[0], "0.5", prefixes[1]]):
        config = kind(paths=tuple(paths), split="1", cache_dir=str(tmp_path), **options)
        rows = config.build(tokenizer=instance, schema=text_schema(48, 100), rows=Rows(30), seed=5).train
        rows = CyclicConfig(buckets=False).build(source=rows, rows=30, shards=2, micro_rows=4)
        for row in range(30):
            expected = document_lengths(rows[row]["segment_ids"])
            np.testing.assert_array_equal(lengths_of_row(rows if positions else Unread(rows), row), expected)


def test_synthetic_documents_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    config, schema = MockConfig(isolate_documents=True), text_schema(20_000, 100)
    rows = config.build(tokenizer=tokenizer(), schema=schema, rows=Rows(3), seed=5).train
    expected = [document_lengths(rows[row]["segment_ids"]) for row in range(3)]
    monkeypatch.setattr(type(rows), "_text", None)
    for row in range(3):
        np.testing.assert_array_equal(lengths_of_row(rows, row), expected[row])
