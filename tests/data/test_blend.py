"""Blends: order, sizes, splits, and impossible requests."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import tokenizer, write, write_random
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.config.errors import UserError
from megajax.data.rows import blend as blend_module
from megajax.data.rows.blend import BlendedDataset, exhaustive_index, normalize_weights, weighted_index
from megajax.data.rows.splits import EvaluationSchedule, Rows, parse_paths, parse_split, requested_rows, split_bounds
from megajax.data.text.config import BlendConfig
from megajax.models.decoder.config import text_schema


def by_definition(weights: list[float], rows: int, limits: list[int] | None = None) -> list[tuple[int, int]]:
    counts, order = [0] * len(weights), []
    for row in range(rows):
        best, furthest = -1, -math.inf
        for dataset, weight in enumerate(weights):
            if limits is not None and counts[dataset] == limits[dataset]:
                continue
            error = weight * max(row, 1) - counts[dataset]
            if error > furthest:
                best, furthest = dataset, error
        order.append((best, counts[best]))
        counts[best] += 1
    return order


WEIGHTS = st.lists(st.integers(1, 9) | st.floats(1e-4, 9), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    weights=WEIGHTS | st.integers(1, 40).map(lambda count: [1.0] * count),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    size=st.sampled_from([4, 7, 150]),
    chunk=st.sampled_from([7, 1 << 20]),
)
def test_rows_come_from_the_datasets_that_are_due(
    weights: list[float], lengths: list[int], size: int, chunk: int
) -> None:
    """They come by weight, or until all are exhausted, with ties and over borders of blocks and chunks.

    With many datasets, only candidates are compared.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MANY", size), ("BLOCK", size), ("CHUNK", chunk)):
            patch.setattr(blend_module, name, value)
        weighted, exhaustive = weighted_index(weights, 300), exhaustive_index(lengths)
    assert weighted.datasets.dtype == np.int16 and weighted.samples.dtype == np.int64
    shares, total = normalize_weights(weights).tolist(), sum(lengths)
    whole = by_definition([n / total for n in lengths], total, lengths)
    for index, expected in ((weighted, by_definition(shares, 300)), (exhaustive, whole)):
        assert list(zip(index.datasets.tolist(), index.samples.tolist(), strict=True)) == expected


def test_paths() -> None:
    assert parse_paths(["a"]) == (("a",), None)
    assert parse_paths(["0.3", "a", "0.7", "b"]) == (("a", "b"), (0.3, 0.7))
    assert parse_paths([3, "a", 7, "b"]) == (("a", "b"), (3.0, 7.0))
    assert parse_paths(["a", "1", "b", "2"]) == (("a", "1", "b", "2"), None)
    assert parse_paths(["0.3", "a", "b"]) == (("0.3", "a", "b"), None)
    for invalid in ([], ["0", "a"], ["-1", "a"], ["nan", "a"], ["inf", "a"]):
        with pytest.raises(UserError):
            parse_paths(invalid)


def test_split_shares() -> None:
    assert parse_split("969, 30, 1") == ((0, 0.969), (0.969, 0.999), (0.999, 1.0))
    assert parse_split("100,0,0") == ((0, 1.0), None, None) and parse_split("3 1") == ((0, 0.75), (0.75, 1.0), None)
    assert parse_split("0,1") == (None, (0, 1.0), None)
    # Halves go to the even number: 2.5 -> 2, 7.5 -> 8.
    assert [split_bounds(share, 10) for share in parse_split("1,2,1")] == [(0, 2), (2, 8), (8, 10)]
    assert split_bounds(None, 10) == (0, 0)
    for invalid in ("", "a", "0,0,0", "1,2,3,4", "1..2", "-", "-90,5,5", "90,x10,0", "nan,1,1", "1e309,1", "1,-0.5"):
        with user_error():
            parse_split(invalid)


def test_rows_that_a_run_requests() -> None:
    evaluation = EvaluationSchedule(every=10, batches=3, size=4)
    assert requested_rows(steps=25, global_size=8, evaluation=evaluation) == (200, 36, 12)
    assert requested_rows(steps=25, global_size=8, evaluation=evaluation._replace(start=10)) == (200, 24, 12)
    assert requested_rows(steps=25, global_size=8, evaluation=None, rows=190) == (190, 0, 0)


def test_problems_are_found_without_reading() -> None:
    def settings_with_problems(**options: Any) -> list[str]:
        return [problem.setting for problem in problems_of(BlendConfig(**options))]

    assert settings_with_problems(paths=("a",)) == [] and settings_with_problems(train_paths=("1", "a", "2", "b")) == []
    assert settings_with_problems() == ["paths"]
    assert settings_with_problems(paths=("a",), valid_paths=("b",)) == ["paths"]
    assert settings_with_problems(paths=("-1", "a"), split="x", surplus=-1.0) == ["split", "surplus", "paths"]


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    return [str(write_random(tmp_path / name, documents=60, seed=seed)) for seed, name in enumerate("ab")]


def build(tmp_path: Path, rows: Rows, **options: Any) -> Any:
    config = BlendConfig(cache_dir=str(tmp_path / "cache"), **options)
    return config.build(tokenizer=tokenizer(), schema=text_schema(16, 2**31), rows=rows, seed=5)


def test_a_weighted_blend(tmp_path: Path, pair: list[str]) -> None:
    paths = ("1", pair[0], "3", pair[1])
    splits = build(tmp_path, Rows(100, 10, 0), paths=paths, split="80,20")
    assert isinstance(splits.train, BlendedDataset) and len(splits.train) == 100 and len(splits.valid) == 11
    assert splits.test is None
    assert np.bincount(splits.train.index.datasets).tolist() == [25, 75]
    row = splits.train[3]
    member = splits.train.datasets[row["dataset_id"]][int(splits.train.index.samples[3])]
    assert (row["tokens"] == member["tokens"]).all()
    reseeded = build(tmp_path, Rows(100, 0, 0), paths=paths, split="80,20", seed=6).train
    assert any((reseeded[row]["tokens"] != splits.train[row]["tokens"]).any() for row in range(5))


@pytest.mark.parametrize("place", [(-1, 0), (2, 0), (0, -1), (0, 1 << 20)])
def test_a_damaged_index_is_named(tmp_path: Path, pair: list[str], place: tuple[int, int]) -> None:
    """Its arrays are not verified at each start, and -1 would be a row from the end."""
    blend = build(tmp_path, Rows(5), paths=("3", pair[0], "7", pair[1]), split="1").train
    damaged = blend.index._replace(
        datasets=np.full_like(blend.index.datasets, place[0]), samples=np.full_like(blend.index.samples, place[1])
    )
    blend = BlendedDataset(blend.datasets, damaged, blend.weights, blend.index_files[:1])
    with user_error():
        blend[3]
    with user_error():
        blend.document_lengths(3)


def test_a_single_weighted_path_is_a_blend_in_paths_only(tmp_path: Path, pair: list[str]) -> None:
    """Megatron-LM's rule: `1.0 a` gets the surplus, a lone prefix in a list per split does not."""
    assert isinstance(build(tmp_path, Rows(10), paths=("1", pair[0])).train, BlendedDataset)
    lone = build(tmp_path, Rows(10, 5), train_paths=("1", pair[0]), valid_paths=(pair[1],))
    assert not isinstance(lone.train, BlendedDataset) and lone.valid.index.documents.max() > 40
    assert build(tmp_path, Rows(10, 0, 5), train_paths=(pair[0],)).test is None
    with user_error("data.train_paths"):
        build(tmp_path, Rows(10, 5), valid_paths=(pair[0],))


def test_blends_without_weights(tmp_path: Path, pair: list[str]) -> None:
    """One epoch of each dataset, in proportion to length: all rows, or the requested number."""
    everything = build(tmp_path, Rows(None), paths=tuple(pair), split="1").train
    lengths = [len(member) for member in everything.datasets]
    assert len(everything) == sum(lengths) and np.bincount(everything.index.datasets).tolist() == lengths
    assert len(build(tmp_path, Rows(20), paths=tuple(pair), split="1").train) == 20
    assert len(build(tmp_path, Rows(10**6), paths=tuple(pair), split="1").train) == sum(lengths)
    one_pass = build(tmp_path, Rows(None), paths=("1", pair[0], "9", pair[1]), split="1").train
    assert np.bincount(one_pass.index.datasets).tolist() == lengths


def test_impossible_requests(tmp_path: Path) -> None:
    small = str(write(tmp_path / "small", [[1] * 20] * 10))
    with user_error():
        build(tmp_path, Rows(10, 2, 2), paths=(small,), split="949,50,1")
    assert build(tmp_path, Rows(10, 2, 0), paths=(small,), split="949,50,1").test is None
    with user_error("data.seed"):
        build(tmp_path, Rows(10), paths=(small,), seed=-1)
    with user_error():
        build(tmp_path, Rows(1), paths=(str(tmp_path / "absent"),))


def test_the_order_of_rows_has_an_identifier(tmp_path: Path, pair: list[str]) -> None:
    """A longer run only adds rows at the end."""

    def order(rows: int, **settings: object) -> str:
        return build(tmp_path, Rows(rows), split="100,0,0", **settings).train.order()

    weighted = ("0.5", pair[0], "0.5", pair[1])
    assert order(40, paths=weighted) == order(50, paths=weighted)
    assert order(40, paths=weighted) != order(40, paths=("0.6", pair[0], "0.4", pair[1]))
    one_epoch = len(build(tmp_path, Rows(None), paths=(pair[0],), split="100,0,0").train)
    assert order(5, paths=(pair[0],)) == order(one_epoch - 1, paths=(pair[0],))
    # The last epoch is shuffled separately or with the others, depending on how much of it is used.
    apart, shared = one_epoch + one_epoch // 4, 2 * one_epoch - 2
    lengths = {len(build(tmp_path, Rows(rows), paths=(pair[0],), split="100,0,0").train) for rows in (apart, shared)}
    assert len(lengths) == 1 and order(apart, paths=(pair[0],)) != order(shared, paths=(pair[0],))


def test_a_split_smaller_than_a_row_is_repeated_with_a_warning(tmp_path: Path) -> None:
    prefix = write(tmp_path / "tiny", [range(1, 10), range(10, 15)])
    config = BlendConfig(paths=(str(prefix),), split="1", cache_dir=str(tmp_path / "cache"))

    def build(rows: int | None) -> Any:
        return config.build(tokenizer=tokenizer(), schema=text_schema(32, 2**31), rows=Rows(rows), seed=1).train

    for _ in range(2):  # Built, then from the cache.
        with pytest.warns(
            UserWarning, match=r"tiny, split train: has 14 tokens, but a row reads 33: .* repeated"
        ) as warned:
            rows = build(8)
        assert len(warned) == 1
    assert len(rows) >= 8 and rows.passes == 19  # 8 · 32 + 1 tokens
    assert sorted(set(np.concatenate([rows[row]["tokens"] for row in range(8)]).tolist())) == list(range(1, 15))
    with pytest.warns(UserWarning, match="3 times in all"):
        assert len(build(None)) == 1
