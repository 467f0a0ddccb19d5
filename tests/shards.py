"""Slow tests in ten shards, so that ten runs of minutes take the place of one of hours: .ci/slow --shard=3."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Container

import pytest

COUNT = 10


def shard_of(test: str) -> int:
    """1 to COUNT, by a hash of the test's id (FILE::FUNCTION[CASE]).

    So a test keeps its shard when others come and go, and the shards take about equally long.
    """
    return zlib.crc32(test.encode()) % COUNT + 1


def is_sharded(marks: Container[str]) -> bool:
    """Whether a test with these keywords is among those that no default run has."""
    return "slow" in marks or "aot" in marks


def shard(text: str) -> int:
    """The value of --shard.

    Raises:
        pytest.UsageError: it is no number of 1 to COUNT.
    """
    if not text.isdecimal() or not 1 <= int(text) <= COUNT:
        raise pytest.UsageError(f"--shard: a number of 1 to {COUNT}, got {text!r}")
    return int(text)


class ShardReport:
    """What each shard took: a line each at the end of a run with slow tests."""

    def __init__(self) -> None:
        self.seconds: defaultdict[int, float] = defaultdict(float)
        self.outcomes: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not is_sharded(report.keywords):
            return
        number = shard_of(report.nodeid)
        self.seconds[number] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[number][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for number in sorted(self.seconds):
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes[number].items()))
            terminalreporter.write_line(
                f"slow tests, shard {number} of {COUNT}: {counts}; {self.seconds[number]:.0f} s of one worker"
            )
