"""Batch sizes over a run: rows, microbatches, and the number of steps of each size."""

import pytest
from user_errors import user_error

from megajax.config.compose import problems_of
from megajax.training.batch_sizes import BatchSize
from megajax.training.config import BatchConfig, LinearRampConfig, StepRampConfig

LINEAR = LinearRampConfig(start=16, increment=8, samples=1000)
STEPS = StepRampConfig(sizes="0:16 1000:32,5000:64", unit="samples")


def sizes(ramp=None, replicas=4, length=None, **settings):
    cfg = BatchConfig(**{"global_size": 64, "micro_size": 2, "ramp": ramp} | settings)
    assert cfg.problems() == []
    return cfg.build(replicas, sequence_length=length)


def test_without_a_ramp_there_is_one_size():
    actual = sizes()
    assert actual.at(0) == actual.at(10**9) == BatchSize(64, 8)
    assert actual.sizes() == (BatchSize(64, 8),)
    assert (actual.samples(7), actual.samples(7, start=100)) == (448, 448)
    assert (actual.steps(448), actual.steps(449), actual.steps(0)) == (7, 8, 0)


@pytest.mark.parametrize(
    ("start", "increment", "samples", "final"), [(16, 8, 1000, 64), (2, 2, 7, 24), (8, 8, 997, 64), (4, 4, 100_003, 40)]
)
def test_linear_ramp_follows_the_rule_at_every_sample(start, increment, samples, final):
    actual = sizes(
        LinearRampConfig(start=start, increment=increment, samples=samples), 1, global_size=final, decrease=True
    )
    per = samples / ((final - start) // increment)
    neighbours = [first + by for first, _ in actual.thresholds for by in (-2, -1, 0, 1, 2)]
    for n in [n for n in (*range(50), *neighbours, samples, samples + 1, 10 * samples) if n >= 0]:
        expected = final if n > samples else start + int(n / per) * increment
        assert actual.nominal(n) == expected, n


def test_the_steps_of_a_ramp_sum_to_the_run():
    for ramp in (LINEAR, STEPS):
        actual = sizes(ramp)
        consumed, rows_read = 0, [0]
        for _ in range(400):
            consumed += actual.at(consumed).rows
            rows_read.append(consumed)
        assert [actual.samples(n) for n in range(401)] == rows_read
        for begin in (0, 3, 100, 250):
            assert [actual.samples(n, start=rows_read[begin]) for n in range(50)] == [
                rows_read[begin + n] - rows_read[begin] for n in range(50)
            ]
        assert [actual.steps(total) for total in rows_read] == list(range(401))
        assert actual.steps(rows_read[10] + 1) == 11
        assert actual.steps(rows_read[20] - rows_read[10], start=rows_read[10]) == 10


def test_thresholds_and_rows_accept_suffixes():
    """Megatron-LM reads fractions, either case, and suffixes on rows too."""
    ramp = StepRampConfig(sizes="0:64,1.5m:128 0.5B:1k")
    assert ramp.problems() == [] and ramp.pairs() == [(0, 64), (1_500_000, 128), (500_000_000, 1000)]
    assert sizes(ramp, 1, length=1000, global_size=1000).thresholds == ((0, 64), (1500, 128), (500_000, 1000))
    assert StepRampConfig(sizes="0:16 1.5.2K:32").problems() and StepRampConfig(sizes="0:16 K:32").problems()


def test_thresholds_in_tokens_become_rows():
    actual = sizes(StepRampConfig(sizes="0:16 1K:32 1M:64"), length=128)
    assert actual.thresholds == ((0, 16), (7, 32), (7812, 64))
    with pytest.raises(ValueError, match="need a sequence length"):
        sizes(StepRampConfig(sizes="0:16 1K:64"))


def test_sizes_are_in_the_order_of_the_run():
    assert sizes(STEPS).sizes() == (BatchSize(16, 2), BatchSize(32, 4), BatchSize(64, 8))
    # 16, 24, 40, 48 and 56 are rounded down to multiples of 32.
    cfg = BatchConfig(
        global_size=64, micro_size=4, ramp=LinearRampConfig(start=32, increment=8, samples=99), decrease=True
    )
    assert cfg.build(8).sizes() == (BatchSize(32, 1), BatchSize(64, 2))


def test_rows_that_the_devices_do_not_divide():
    cfg = BatchConfig(global_size=64, micro_size=3)
    assert [problem.setting for problem in cfg.problems()] == ["micro_size"]
    with user_error():
        cfg.build(8).at(0)
    lower = BatchConfig(global_size=64, micro_size=3, decrease=True)
    assert lower.problems() == lower.replica_problems(8) == []
    assert lower.build(8).at(0) == BatchSize(48, 2)
    assert [problem.setting for problem in lower.replica_problems(32)] == ["global_size"]


def test_every_size_of_a_ramp_is_checked_before_the_run():
    cfg = BatchConfig(global_size=64, micro_size=2, ramp=LINEAR)
    assert cfg.replica_problems(4) == []
    (problem,) = cfg.replica_problems(8)
    assert problem.setting == "ramp"
    assert "24, 40, 56 rows" in problem.message
    assert "batch.decrease=true" in problem.hint


@pytest.mark.parametrize(
    ("ramp", "setting", "message"),
    [
        (LinearRampConfig(start=72, increment=8, samples=9), "ramp.start", "start=72 is above global_size=64"),
        (LinearRampConfig(start=16, increment=7, samples=9), "ramp.increment", "= 48"),
        (StepRampConfig(sizes="0:16 9:32"), "ramp.sizes", "must end at global_size=64 rows, got 32"),
    ],
)
def test_a_ramp_ends_at_global_size(ramp, setting, message):
    (problem,) = BatchConfig(global_size=64, ramp=ramp).problems()
    assert problem.setting == setting
    assert message in problem.message


@pytest.mark.parametrize(
    ("ramp", "setting", "message"),
    [
        (LinearRampConfig(start=0, increment=1, samples=1), "start", "at least 1"),
        (LinearRampConfig(start=1, increment=1, samples=0), "samples", "at least 1"),
        (StepRampConfig(sizes=""), "sizes", "is empty"),
        (StepRampConfig(sizes="0:16 250Q:32"), "sizes", "'250Q:32' is not threshold:rows"),
        (StepRampConfig(sizes="10:16 20:32"), "sizes", "must begin at 0, got 10"),
        (StepRampConfig(sizes="0:16 5:32 5:64"), "sizes", "threshold 5 is given twice"),
        (StepRampConfig(sizes="0:32 5:16"), "sizes", "32 rows are followed by 16"),
        (StepRampConfig(sizes="0:0 5:16"), "sizes", "at least 1, got 0"),
    ],
)
def test_problems(ramp, setting, message):
    (problem,) = problems_of(ramp)
    assert problem.setting == setting
    assert message in problem.message
