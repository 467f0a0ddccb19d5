"""Durations of a report do not change if clocks are set back or forward, or differ between machines."""

import math
from collections.abc import Callable

import pytest

from megajax.reporting.attempts import attempts
from megajax.reporting.history import Stamp, common_times, read_history
from megajax.reporting.wall_time import time_by_cause, timeline

pytestmark = pytest.mark.smoke

DAY, HOUR = -86_400.0, 3_600.0


def killed_and_resumed(run, jump: float, *, inside: bool, boot: str) -> dict[str, float]:
    """Seconds by cause of a run whose clock jumps within its second attempt, or before it."""
    run.boot, run.setup = boot, 4.0
    run.attempt(0, 10, save=5)
    run.now += 30.0
    if not inside:
        run.skew += jump
    run.attempt(10, 15)
    run.skew += jump if inside else 0.0
    run.event("evaluate", step=15, split="validation", seconds=0.0)
    run.now += 3.0
    run.fails("lost", process=0, cause="killed by SIGKILL", step=15)
    history = read_history(run.folder.path)
    shares = time_by_cause(history, runs := attempts(history))
    assert all(share.seconds >= 0 for share in shares) and sum(share.part for share in shares) == pytest.approx(1.0)
    picture = timeline(runs)
    assert all(0 <= span.start <= picture.length and span.length > 0 for span in picture.spans)
    return {share.cause: round(share.seconds, 3) for share in shares}


@pytest.mark.parametrize("jump", [DAY, HOUR, -0.5])
@pytest.mark.parametrize("inside", [True, False])
def test_a_clock_that_is_set_changes_no_duration(fake_run: Callable, jump: float, inside: bool) -> None:
    expected = killed_and_resumed(fake_run("steady"), 0.0, inside=inside, boot="b0071d00")
    assert expected["between attempts"] == 30.0 and expected["stuck"] == 3.0 and expected["setup"] == 8.0
    assert killed_and_resumed(fake_run("jumps"), jump, inside=inside, boot="b0071d00") == expected


@pytest.mark.parametrize("inside", [True, False])
def test_a_clock_that_is_set_back_without_a_monotonic_clock(fake_run: Callable, inside: bool) -> None:
    shares = killed_and_resumed(fake_run(), DAY, inside=inside, boot="")
    assert shares.get("between attempts", 0.0) <= 30.0 and shares["stuck"] <= 3.0 and shares["steps"] == 15 * 0.5


def test_processes_on_machines_with_other_clocks(fake_run: Callable) -> None:
    for skew in (DAY, HOUR):
        run = fake_run(f"run{skew}")
        run.processes = 2
        run.attempt(0, 10)
        other_clock = run.clock("0the2000", skew=skew, since=5e6)
        run.now += 20.0
        run.by_other("straggler", clock=other_clock, process=1, phase="data_wait", factor=2.0, since_step=10)
        run.now += 20.0
        run.fails("hang", clock=other_clock, process=1, phase="data_wait", step=11, seconds=40.0)
        run.fails("lost", process=1, cause="hung", step=11)
        (attempt,) = attempts(read_history(run.folder.path))
        assert attempt.progress <= attempt.end and attempt.seconds <= 10 + 10 * 0.5 + 40.0
        assert attempt.ending.startswith("hang: process 1 in data wait of step 11")


def test_lines_with_invalid_times_or_numbers_beyond_float64_are_skipped(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 5)
    with run.folder.events.open("a") as file:
        file.write('{"time": NaN, "event": "a"}\n{"time": 1e999, "event": "a"}\n{"time": "x", "event": "a"}\n')
        file.write('{"time": 1e308, "event": "start"}\n{"time": -5, "event": "a"}\n')
        file.write('{"time": 1' + "0" * 5000 + ', "event": "a"}\n' + "[" * 100_000 + "\n")
        file.write('{"time": 1800000100.0, "clock": ["b0071d00", 1e999], "event": "b", "step": 1' + "0" * 30 + "}\n")
    with run.folder.metrics.open("a") as file:
        file.write('{"step": 6, "loss": 1' + "0" * 400 + ', "step_seconds": 1e999}\n')
        file.write('{"step": 1' + "0" * 30 + ', "loss": 1.0}\n{"step": -4, "loss": 1.0}\n')
        file.write('{"step": 7, "loss": 1' + "0" * 5000 + "}\n" + "[" * 100_000 + "\n")
    history = read_history(run.folder.path)
    assert {"events.jsonl: 8 incomplete lines skipped", "metrics.jsonl: 5 incomplete lines skipped"} <= {
        *history.faults
    }
    assert history.events[-1].name == "compiled" and len(attempts(history)) == 1
    assert list(history.steps.step) == [1, 2, 3, 4, 5]
    assert math.isfinite(sum(share.seconds for share in time_by_cause(history, attempts(history))))


def test_common_times() -> None:
    stamps = [
        Stamp(100.0, "a", 5.0),
        Stamp(50.0, "a", 6.0),
        Stamp(200.0, "b", 1.0),
        Stamp(60.0, "a", 16.0),
        Stamp(61.0),
    ]
    # One second after the first line by the monotonic clock; the other machine no later than the following line.
    assert common_times(stamps, [True, False, False, False, False]) == [100.0, 101.0, 111.0, 111.0, 112.0]
