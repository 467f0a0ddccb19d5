"""Ten shards hold every slow test once, .ci/run names one of them, and a run says what each took."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from shards import COUNT, ShardReport, is_sharded, shard, shard_of


def test_shards_are_about_equal() -> None:
    sizes = Counter(shard_of(f"{number % 7}.py::test_it[{number}]") for number in range(1000))
    assert len(sizes) == COUNT and min(sizes.values()) > 60 and max(sizes.values()) < 140


def test_tests_of_no_default_run_are_sharded() -> None:
    assert is_sharded({"slow": 1, "test_it": 1}) and is_sharded({"aot": 1}) and not is_sharded({"smoke": 1})


def test_a_shard_is_a_number_of_one_to_ten() -> None:
    assert shard("1") == 1 and shard(str(COUNT)) == COUNT
    assert shard(Path(__file__).parents[2].joinpath(".ci/shard").read_text(encoding="utf-8").strip())
    for text in ("0", str(COUNT + 1), "first", ""):
        with pytest.raises(pytest.UsageError, match=re.escape(repr(text))):
            shard(text)


def test_the_end_of_a_run_says_what_each_shard_took() -> None:
    report, lines = ShardReport(), list[str]()
    first, second = "a.py::test_a", "b.py::test_c"
    for nodeid, when, outcome, marks in (
        (first, "setup", "passed", {"slow"}),
        (first, "call", "passed", {"slow"}),
        (second, "setup", "failed", {"aot"}),
        ("c.py::test_c", "call", "passed", {"smoke"}),
    ):
        report.pytest_runtest_logreport(
            SimpleNamespace(nodeid=nodeid, when=when, outcome=outcome, keywords=marks, duration=2.0)
        )
    report.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    assert sorted(lines) == sorted(
        [
            f"slow tests, shard {shard_of(first)} of 10: 1 passed; 4 s of one worker",
            f"slow tests, shard {shard_of(second)} of 10: 1 failed; 2 s of one worker",
        ]
    )
