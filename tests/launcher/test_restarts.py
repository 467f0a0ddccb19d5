"""When a failed gang is restarted, with which processes, and when not."""

import pytest

from megajax.faults.exit_codes import EXIT_CODES, worth_a_restart
from megajax.launcher.first_failure import Cause
from megajax.launcher.restarts import Restart, RestartConfig, Restarts, Stop


class Failing:
    """A gang of four whose attempts end as `fail` says."""

    def __init__(self, **settings):
        self.restarts = Restarts(RestartConfig(**({"max_restarts": 100} | settings)), range(4))
        self.committed: int | None = None

    def fail(self, code: int = 1, *, process: int = 0, committed: int | None = None, has_beats: bool = True):
        """An attempt ends; committed: the newest checkpoint at its end, None: as before."""
        before = self.committed
        self.committed = before if committed is None else committed
        cause = Cause(process, code, "failed")
        return self.restarts.after(cause, baseline=before, committed=self.committed, has_beats=has_beats)


def test_without_restarts_a_failure_is_final():
    for code in (1, 16, 17, 124):
        assert Failing(max_restarts=0).fail(code) == Stop(code)


@pytest.mark.parametrize("code", sorted(EXIT_CODES))
def test_only_transient_codes_are_restarted(code):
    decision = Failing().fail(code)
    assert isinstance(decision, Restart) == (code in (1, 16, 124, 142))
    if isinstance(decision, Stop):
        assert decision == Stop(code, f"exit code {code} is never retried")


def test_unknown_codes_and_signals_are_crashes():
    assert worth_a_restart(3) and worth_a_restart(-9) and worth_a_restart(134)


def test_the_delay_doubles_until_there_is_a_new_checkpoint():
    gang = Failing(backoff=1.0, max_backoff=5.0)
    waits = [gang.fail(committed=5).wait, gang.fail().wait, gang.fail().wait, gang.fail(committed=10).wait]
    assert waits == [1.0, 2.0, 4.0, 1.0]
    unjudged = Failing(backoff=1.0, max_backoff=5.0)
    assert [unjudged.fail(has_beats=False).wait for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


PROGRESS = {"saved by an attempt": (None, [5], 5), "saved before the first attempt": (5, [], 5), "none": (None, [], 0)}
"""The checkpoint before the first attempt, those that attempts save, and the newest."""


@pytest.mark.parametrize("case", PROGRESS)
def test_three_attempts_without_a_new_checkpoint_are_the_limit(case):
    before, saves, newest = PROGRESS[case]
    gang = Failing()
    gang.committed = before
    for saved in (*saves, None, None):
        assert isinstance(gang.fail(committed=saved), Restart)
    assert gang.fail() == Stop(93, f"no progress past step {newest} in 3 attempts")


def test_a_step_that_was_saved_before_is_no_progress():
    """The newest was damaged, and the run saves it again and again."""
    gang = Failing()
    gang.fail(committed=10)
    decisions = []
    for _ in range(3):
        gang.committed = 5
        decisions.append(gang.fail(committed=10))
    assert decisions[-1] == Stop(93, "no progress past step 10 in 3 attempts")


def test_progress_resets_the_count():
    gang = Failing()
    for step in range(5, 100, 5):
        assert isinstance(gang.fail(committed=step), Restart)
        assert isinstance(gang.fail(), Restart)
        assert isinstance(gang.fail(), Restart)


def test_a_program_without_beats_is_restarted_as_often_as_requested():
    gang = Failing(max_restarts=6)
    assert all(isinstance(gang.fail(has_beats=False), Restart) for _ in range(6))
    assert gang.fail(has_beats=False) == Stop(1, "all --max-restarts=6 restarts are used up")


def test_a_process_that_fails_repeatedly_is_left_out():
    gang = Failing(min_processes=2)
    assert gang.fail(process=1).slots == (0, 1, 2, 3)
    decision = gang.fail(process=1)
    assert decision.slots == (0, 2, 3) and decision.dropped == 1
    # Process 2 is now at place 3.
    assert gang.fail(process=2).slots == (0, 2, 3)
    assert gang.fail(process=2).slots == (0, 2)
    assert [gang.fail(process=0).slots for _ in range(2)] == [(0, 2), (0, 2)]
    assert isinstance(gang.fail(process=0), Stop)


def test_failures_of_different_processes_leave_none_out():
    gang = Failing(min_processes=2)
    assert [gang.fail(process=process, committed=process).slots for process in (1, 2, 3)] == [(0, 1, 2, 3)] * 3
    assert gang.fail(process=3, committed=9).slots == (0, 1, 2, 3)  # It got further, so it may be chance.
    assert Failing(min_processes=4).fail(process=1).slots == (0, 1, 2, 3)


def test_a_layout_that_three_processes_refuse_may_suit_two():
    gang = Failing(min_processes=2)
    gang.fail(process=1)
    assert gang.fail(process=1).slots == (0, 2, 3)
    assert gang.fail(2, process=0).slots == (0, 2)
    assert gang.fail(2, process=0) == Stop(2, "exit code 2 on 2 of 4 processes is never retried")


def test_a_process_that_cannot_be_started_is_left_out():
    gang = Failing(min_processes=3)
    gang.fail(process=0, committed=5)
    assert gang.restarts.unable_to_start(2).slots == (0, 1, 3)
    strict = Failing(max_restarts=1)
    strict.fail(committed=5)
    assert isinstance(strict.restarts.unable_to_start(2), Stop)
