"""How each attempt ended, as processes, the launcher and saves have recorded it."""

from collections.abc import Callable

import pytest

from megajax.faults.attempt_end import failed_saves_end
from megajax.reporting.attempts import attempts
from megajax.reporting.history import read_history
from megajax.reporting.wall_time import goodput

pytestmark = pytest.mark.smoke

FULL = "No space left on device"
GLOO = "JaxRuntimeError: Gloo all-reduce failed: Connection closed by peer"


def endings(run) -> list[str]:
    return [attempt.ending for attempt in attempts(read_history(run.folder.path))]


def restart(run, **fields) -> None:
    """The launcher restarts all processes two seconds after their end."""
    run.now += 2.0
    run.by_other("restart", **{"seconds_down": 2.0, "after_code": 1} | fields)


def test_a_process_that_was_killed(fake_run: Callable) -> None:
    run = fake_run()
    run.processes, run.setup = 2, 4.0
    run.config(20)
    run.attempt(0, 7, save=5)
    run.now += 1.5  # the unfinished step, and the launcher's delay
    run.fails("lost", process=1, cause="killed by SIGKILL", step=8)
    run.fails("crash", process=0, error=GLOO, phase="step", step=8, exit_code=1)
    run.by_other("signal", process=0, signal="SIGTERM", phase=None, step=None)
    restart(run, attempt=2, cause="process 1 killed by SIGKILL; the others were stopped", process=1, step=4)
    run.attempt(5, 20)
    run.event("end", step=20)
    run.ended(0, "done", "done", step=20)
    first, second = attempts(read_history(run.folder.path))
    assert first.ending == "process 1 killed by SIGKILL at step 8 (restarted)" and first.exit_code == 1
    assert [event.name for event in first.outcome.cascade] == ["crash", "signal"]
    assert (second.first_step, second.ending, second.exit_code) == (5, "done", 0)
    assert second.begin == second.restart.at and second.ready == second.begin + 4.0
    assert run.seconds() == {
        "steps": 5 * 0.5 + 15 * 0.5, "evaluation": 2.0, "saving": 1.0, "setup": 8.0, "compiling": 20.0,
        "steps run again": 2 * 0.5, "stuck": 1.5, "between attempts": 2.0,
    }  # fmt: skip
    (table,) = (table for table in run.summary().tables if table.title == "Events")
    assert [row[2] for row in table.rows if "cascade" in row[2]] == ["crash (cascade)", "signal (cascade)"]


def test_the_stuck_process_is_blamed_not_those_that_wait_for_it(fake_run: Callable) -> None:
    run = fake_run()
    run.processes = 2
    run.attempt(0, 11)
    run.now += 21.0
    run.fails("hang", process=0, phase="step", step=12, seconds=20.9, limit=20, stacks="stacks_0.txt", exit_code=124)
    run.fails("hang", process=1, phase="data_wait", step=12, seconds=21.2, limit=20, stacks="stacks_1.txt")
    (attempt,) = attempts(read_history(run.folder.path))
    assert attempt.ending == "hang: process 1 in data wait of step 12 for 21 s" and attempt.exit_code == 124
    assert attempt.last_step == 11 and [event.integer("process") for event in attempt.outcome.cascade] == [0]
    assert run.seconds()["stuck"] == 21.0
    verdict = run.summary().verdict
    assert verdict == "step 11: hang: process 1 in data wait of step 12 for 21 s; exit code 124"


def test_only_the_launcher_detects_a_frozen_process(fake_run: Callable) -> None:
    run = fake_run()
    run.processes = 2
    run.attempt(0, 11)
    run.now += 25.0
    run.fails("hang", process=0, phase="step", step=12, seconds=20.0, limit=20)
    run.by_other("lost", process=1, cause="no heartbeat for 22 s", step=12)
    text = "process 1 no heartbeat for 22 s at step 12"
    run.ended(124, "lost", text, process=1, step=12, by="launcher")
    restart(run, attempt=2, cause="no heartbeat for 22 s", process=1, step=12, after_code=124)
    (attempt, _) = attempts(read_history(run.folder.path))
    assert attempt.ending == "process 1 no heartbeat for 22 s at step 12 (restarted)" and attempt.exit_code == 124


def test_failed_saves(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 30, save=10)
    for failures, step in enumerate((40, 50), 1):
        run.event("save_failed", step=step, why=FULL, failures=failures, next="training continues until the next save")
    run.event("save_failed", step=60, why=FULL, failures=3, next="the run ends with exit code 1", exit_code=1)
    run.event("attempt_end", **failed_saves_end(60, 3, FULL))
    assert endings(run) == [f"3 saves failed in a row: {FULL}"], "the page that the run itself writes"
    error = f"CheckpointError: step 60 was not saved: {FULL}"
    run.fails("crash", process=0, error=error, phase="save", step=60, exit_code=1)
    (attempt,) = attempts(read_history(run.folder.path))
    assert attempt.ending == "3 saves failed in a row: No space left on device" and attempt.exit_code == 1
    (table,) = (table for table in run.summary().tables if table.title == "Events")
    row_status = [(status, row[2]) for status, row in zip(table.row_status, table.rows, strict=True)]
    assert row_status.count(("bad", "save failed")) == 3


def test_no_progress_over_restarts(fake_run: Callable) -> None:
    run = fake_run()
    run.config(20)
    for number in (1, 2, 3):
        run.attempt(5 if number > 1 else 0, 6, save=5)
        run.fails("crash", process=0, error="RuntimeError: boom", phase="step", step=7, exit_code=1)
        if number < 3:
            restart(run, attempt=number + 1, cause="exited with code 1", process=0, step=7)
    run.by_other("supervisor_stop", code=93, why="no progress past step 5 in 3 attempts")
    assert endings(run) == [
        *2 * ["crashed in step 7: RuntimeError: boom (restarted)"],
        "crashed in step 7: RuntimeError: boom; not restarted: no progress past step 5 in 3 attempts (93)",
    ]
    summary = run.summary()
    assert summary.status == "bad"
    assert summary.verdict == (
        "step 6 of 20: no progress past step 5 in 3 attempts; exit code 93. Last: crashed in step 7: RuntimeError: boom"
    )


def test_crashes_during_setup_are_separate_attempts(fake_run: Callable) -> None:
    run = fake_run()
    run.setup, run.processes = 5.0, 2
    run.config(20)
    run.attempt(0, 10, save=10)
    run.fails("lost", process=0, cause="killed by SIGKILL", step=10)
    restart(run, attempt=2, cause="killed by SIGKILL", process=0, step=10)
    run.now += 3.0
    run.fails("crash", process=1, error="OSError: stale file handle", phase="setup", step=None, exit_code=1)
    run.fails("crash", process=0, error="StartError: process 1 is gone", phase="setup", step=None, exit_code=1)
    restart(run, attempt=3, cause="exited with code 1", process=1, step=None)
    run.attempt(10, 20)
    run.event("end", step=20)
    run.ended(0, "done", "done", step=20)
    runs = attempts(read_history(run.folder.path))
    assert [(attempt.first_step, attempt.last_step, attempt.exit_code) for attempt in runs] == [
        (0, 10, 1),
        (10, 10, 1),
        (10, 20, 0),
    ]
    assert runs[1].ending == "process 1 crashed in setup: OSError: stale file handle (restarted)"
    assert runs[1].ready is None and runs[1].seconds == pytest.approx(3.0)
    assert run.seconds()["stuck"] == 3.0 and run.seconds()["between attempts"] == 4.0


def test_without_a_launcher_each_failed_setup_is_an_attempt(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 10, save=10)  # killed
    for _ in range(2):
        run.now += 60.0
        run.number += 1
        run.fails("crash", process=0, error="OSError: stale file handle", phase="setup", step=None, exit_code=1)
    run.now += 60.0
    run.setup = 20.0
    run.attempt(10, 12)
    assert endings(run) == [
        "no end recorded: killed or crashed",
        *2 * ["crashed in setup: OSError: stale file handle"],
        "no end recorded: killed, crashed, or still running",
    ]


def test_early_events_of_a_setup_belong_to_the_following_attempt(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 10, save=10)
    run.event("end", step=10)
    run.ended(0, "done", "done", step=10)
    run.now += 60.0
    run.setup = 20.0
    run.now += 5.0
    run.by_other("signal", attempt=2, process=1, signal="SIGUSR1", phase="setup", step=None)
    run.now -= 5.0
    run.attempt(10, 12)
    run.event("checkpoint_damaged", time=run.now, step=15, why="sha256", kept_as="00000015.damaged")
    first, second = attempts(read_history(run.folder.path))
    assert "signal" not in [event.name for event in first.events] and "signal" in [e.name for e in second.events]
    assert (first.exit_code, second.last_step) == (0, 12)
    assert run.seconds()["between attempts"] == 60.0


def test_signals_that_end_a_process_immediately(fake_run: Callable) -> None:
    run = fake_run()
    run.number = 1
    run.fails("signal", process=0, signal="SIGTERM", phase="setup", step=None, exit_code=143)
    run.now += 60.0
    run.setup = 5.0
    run.attempt(0, 4)
    run.by_other("signal", process=0, signal="SIGINT", phase="step", step=5)
    assert endings(run)[1] == "no end recorded: killed, crashed, or still running"
    run.fails("signal", process=0, signal="SIGINT", phase="step", step=5, exit_code=130)
    runs = attempts(read_history(run.folder.path))
    assert [(attempt.ending, attempt.exit_code) for attempt in runs] == [
        ("SIGTERM in setup: ended at once, unsaved", 143),
        ("SIGINT in step 5: ended at once, unsaved", 130),
    ]


def test_the_verdict_of_a_run_with_a_rejected_later_start(fake_run: Callable) -> None:
    run = fake_run()
    run.config(10)
    run.attempt(0, 10)
    run.event("end", step=10)
    run.ended(0, "done", "done", step=10)
    run.now += 60.0
    run.number += 1
    run.fails("crash", process=0, error="the checkpoint is damaged", phase="setup", step=None, exit_code=2)
    summary = run.summary()
    assert summary.verdict.startswith("step 10 of 10: done; exit code 0. A later start was rejected: ")


def test_an_incomplete_line_does_not_hide_the_next(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 6)
    with run.folder.events.open("a") as file:
        file.write('{"time": 1800000000.5, "clock": ["b0071d00", 1')
        file.flush()
        file.write('{"time": 1800000017.5, "event": "lost", "process": 0, "cause": "killed by SIGKILL", "step": 7}\n')
    run.ended(1, "lost", "process 0 killed by SIGKILL at step 7", process=0, step=7)
    (attempt,) = attempts(read_history(run.folder.path))
    assert attempt.outcome.failure is not None and attempt.outcome.failure.name == "lost"
    assert endings(run) == ["process 0 killed by SIGKILL at step 7"]
    assert "events.jsonl: 1 incomplete line skipped" in run.summary().faults


def test_goodput_summary_and_fields(fake_run: Callable) -> None:
    run = fake_run()
    run.setup = 3.5
    run.attempt(0, 200)
    run.event("end", step=200)
    run.ended(0, "done", "done", step=200)
    history = read_history(run.folder.path)
    run_goodput = goodput(history, attempts(history))
    assert run_goodput.summary() == "88.1% of 1m54s in 1 attempt; lost: 8.8% compiling, 3.1% setup"
    assert run_goodput.fields() == {
        "effective": 0.88106, "elapsed_seconds": 113.5, "effective_seconds": 100.0, "attempts": 1,
        "lost_seconds": {"setup": 3.5, "compiling": 10.0},
    }  # fmt: skip


def test_watchdogs_blame_a_process(fake_run: Callable) -> None:
    run = fake_run()
    run.processes = 2
    run.attempt(0, 5)
    run.fails("hang", process=0, phase="step", step=6, seconds=8.7, cause="process 1 is late", cause_process=1)
    assert endings(run) == ["hang: process 0 in step 6 for 9 s; process 1 is late"]
    run.fails("hang", process=1, phase="data_wait", step=6, seconds=8.8, cause="all wait for it", cause_process=1)
    assert endings(run) == ["hang: process 1 in data wait of step 6 for 9 s"]
