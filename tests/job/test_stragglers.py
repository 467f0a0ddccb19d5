"""Stragglers: the rule, the messages, and time in which a process does not run."""

import itertools
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megajax.faults.config import StragglersConfig
from megajax.job.stragglers import CALM_READINGS, Stalls, StragglerRule, WatchStragglers
from megajax.training.guarded.phase_timers import EXCHANGED, PhaseTimes

RULE = StragglersConfig(factor=2.0, share=0.1)


def test_a_straggler_is_reported_once():
    rule = StragglerRule(RULE, ("data_wait", "host"))
    even = [[0.01, 0.02], [0.01, 0.02], [0.01, 0.02]]
    slow = [[0.01, 0.02], [0.01, 0.32], [0.01, 0.02]]
    assert rule(1, 1.0, even) == ([], [])
    (straggler,), recovered = rule(10, 1.0, slow)
    assert not recovered
    assert straggler._asdict() == {
        "process": 1, "phase": "host", "factor": 16.0, "seconds": 0.32, "others": 0.02, "since_step": 10,
    }  # fmt: skip
    assert rule(20, 1.0, slow) == ([], []), "it is known"
    for _ in range(CALM_READINGS - 1):
        assert rule(30, 1.0, even) == ([], []), "it may be slow again"
    assert rule(30, 1.0, even) == ([], [straggler])
    assert rule(40, 1.0, slow)[0] and rule(50, 1.0, even) == ([], [])


def test_a_process_near_the_limits_is_reported_once():
    """Noise around both limits: judged reading by reading, it would be slow and well again 97 times."""
    noise, rule = np.random.default_rng(0), StragglerRule(RULE, ("host",))
    series = [[[1.0], [1.0], [seconds]] for seconds in noise.normal(2.0, 0.3, 400)]
    crossings = sum((one[2][0] > 2) != (other[2][0] > 2) for one, other in itertools.pairwise(series))
    changes = [rule(step, 2.0, seconds) for step, seconds in enumerate(series)]
    assert crossings > 150
    assert sum(len(new) for new, _ in changes) == 1 and not any(recovered for _, recovered in changes)


def test_a_process_that_is_slow_now_and_then_is_reported_ever_less_often():
    rule, lines = StragglerRule(RULE, ("host",)), 0
    for step in range(400):
        new, _ = rule(step, 2.0, [[1.0], [3.0 if step % 8 == 0 else 1.0]])
        lines += len(new)
    assert lines == 2


@pytest.mark.parametrize(
    ("seconds", "other_seconds", "step", "slow"),
    [
        (0.09, 0.001, 1.0, False),  # Ninety times as long, without a report.
        (0.11, 0.001, 1.0, True),
        (1.9, 1.0, 2.0, False),  # not twice as long
        (2.2, 1.0, 2.0, True),
        (0.3, 0.0, 0.3, True),  # The others took no time at all.
        (0.009, 0.002, 0.04, False),  # A large fraction of a short step, but normal for any scheduler of processes.
    ],
)
def test_both_a_factor_and_a_fraction_of_the_step(seconds, other_seconds, step, slow):
    stragglers, _ = StragglerRule(RULE, ("host",))(1, step, [[other_seconds], [seconds]])
    assert [straggler.process for straggler in stragglers] == [1] * slow
    assert StragglerRule(StragglersConfig(factor=None), ("host",))(1, step, [[other_seconds], [seconds]]) == ([], [])


def test_a_straggler_and_its_recovery_are_events_and_lines():
    events, lines = [], []
    watch = WatchStragglers(RULE, lambda name, **fields: events.append((name, fields)), lines.append)
    even = np.full((2, len(EXCHANGED)), 0.01)
    slow = even.copy()
    slow[1, EXCHANGED.index("host")] = 0.4
    calm = ((step, even) for step in range(40, 40 + CALM_READINGS))
    for step, times in ((1, None), (10, even), (11, None), (20, slow), (30, slow), *calm):
        watch(SimpleNamespace(step=step, seconds=0.5, by_process=times))
    assert [name for name, _ in events] == ["straggler", "straggler_over"]
    assert events[0][1]["process"] == 1 and events[0][1]["phase"] == "host" and events[0][1]["since_step"] == 10
    assert lines[0].startswith("step 20: process 1 is slow since step 10: 40 times as long as the others")
    assert "no longer" in lines[1] and len(lines) == 2


def test_a_process_that_does_not_run_is_detected_afterwards():
    with Stalls() as stalls:
        deadline = time.monotonic() + 100
        # A regular expression that backtracks holds the interpreter, as a stopped process does.
        while stalls.seconds < 0.1 and time.monotonic() < deadline:
            re.match(r"(a|a)*b", "a" * 21)
        assert stalls.seconds >= 0.1


def test_waiting_for_devices_counts_for_no_process():
    times, began = PhaseTimes(None, None), time.monotonic()  # ty: ignore[invalid-argument-type]
    times.forget()
    with times.waiting():
        time.sleep(0.2)
    with times.measure("data_wait"):
        time.sleep(0.05)
    assert times.take_step()["data_wait"] >= 0.05
    counted = times.totals()
    assert counted["data_wait"] >= 0.05
    assert counted["host"] + counted["data_wait"] <= time.monotonic() - began - 0.2


def test_times_are_returned_by_process():
    devices = [SimpleNamespace(process_index=process) for process in (0, 0, 2, 2, 1, 1)]
    times = PhaseTimes(SimpleNamespace(devices=np.array(devices)), None)  # ty: ignore[invalid-argument-type]
    rows = np.array([[process + 0.5] * len(EXCHANGED) for process in (0, 0, 2, 2, 1, 1)], np.float32)
    extremes, by_process = times.received(rows, fresh=True)
    assert by_process is not None and by_process[:, 0].tolist() == [0.5, 1.5, 2.5]
    assert extremes == {
        f"{phase}_{end}": value
        for phase in ("data_wait", "evaluation", "save")
        for end, value in (("min", 0.5), ("max", 2.5))
    }
    assert times.received(rows, fresh=False) == ({}, None)
