"""Failures of real runs: their events, and the report."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gangs import PATIENCE, TINY, TRAIN, Started, launcher
from run_folder import events
from small_jobs import run_config
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig
from megajax.config.errors import UserError
from megajax.data.text.config import BlendConfig
from megajax.faults.activity import Activity
from megajax.faults.config import ResilienceConfig
from megajax.faults.drills import DrillFault
from megajax.faults.failure_log import MAX_ERROR_LENGTH, one_line
from megajax.job.job import fail, train
from megajax.job.setup import JobStart
from megajax.job.steps import step_record
from megajax.mesh.config import ParallelConfig
from megajax.metrics.line_file import FileDeleted, LinesLost, report_lost_lines
from megajax.reporting.attempts import attempts
from megajax.reporting.history import read_history


def test_an_error_while_waiting_for_rows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    faulty = ResilienceConfig(inject=("crash:step=4",))
    with pytest.raises(DrillFault):
        train(run_config(run, resilience=faulty, checkpoint=CheckpointConfig(every=2)))
    (crash,) = events(run, "crash")
    assert crash.pop("time") and crash.pop("clock") and "DrillFault: " in crash.pop("error")
    assert crash == {"event": "crash", "attempt": 1, "process": 0, "phase": "data_wait", "step": 4, "exit_code": 1}
    (attempt,) = attempts(read_history(run))
    assert attempt.ending.startswith("crashed in data wait of step 4: DrillFault: ") and attempt.exit_code == 1
    assert attempt.ready is not None and attempt.begin < attempt.ready < attempt.end


def test_lines_lost_by_a_full_disk_do_not_change_the_exit_code(capsys: pytest.CaptureFixture) -> None:
    for code in (17, 75):
        with report_lost_lines(lambda code=code: code):
            raise LinesLost("3 lines of metrics.jsonl could not be written")
        assert "megajax: 3 lines of metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(LinesLost), report_lost_lines(lambda: 0):
        raise LinesLost("3 lines of metrics.jsonl could not be written")


def test_an_error_of_the_setup_comes_before_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megajax.job.setup.begin", lambda *_, **__: [][1])
    with pytest.raises(IndexError):
        train(run_config(tmp_path / "run"))
    (attempt,) = attempts(read_history(tmp_path / "run"))
    assert attempt.ending == "crashed in setup: IndexError: list index out of range" and attempt.ready is None


def test_errors_fit_in_one_line() -> None:
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(UserError("two values differ:\n  a: 1 -> 2\n")) == "two values differ: a: 1 -> 2"
    assert len(one_line(ValueError("x" * 10_000))) == MAX_ERROR_LENGTH


def test_an_error_records_the_innermost_phase() -> None:
    activity = Activity()
    with pytest.raises(ValueError, match="boom") as caught, activity.phase("save", 4), activity.phase("inner", 5):
        raise ValueError("boom")
    assert caught.value.__dict__["doing"][:2] == ("inner", 5)


@pytest.mark.slow
def test_a_killed_process_and_a_crash(tmp_path: Path, start: Callable[..., Started]) -> None:
    run = tmp_path / "run"
    faults = "--resilience.inject=kill:step=5:process=1,crash:step=8:process=1:attempt=2"
    command = (*TRAIN, *TINY, f"--run_dir={run}", "--steps=12", "--checkpoint.every=2", faults)
    assert start(*launcher("--max-restarts=3"), *command).wait(3 * PATIENCE) == 0
    assert [line["cause"] for line in events(run, "lost")] == ["killed by SIGKILL"]
    killed, crashed, finished_attempt = attempts(read_history(run))
    assert killed.ending.startswith("process 1 killed by SIGKILL at step ") and killed.exit_code == 1
    assert (
        crashed.ending.startswith("process 1 crashed in data wait of step 8: DrillFault: ") and crashed.exit_code == 1
    )
    assert killed.ending.endswith(" (restarted)") and crashed.ending.endswith(" (restarted)")
    assert (finished_attempt.ending, finished_attempt.exit_code, finished_attempt.last_step) == ("done", 0, 12)
    (goodput,) = events(run, "goodput")
    assert goodput["attempts"] == 3 and {"setup", "compiling", "between attempts"} <= goodput["lost_seconds"].keys()
    assert sum(goodput["lost_seconds"].values()) + goodput["effective_seconds"] == pytest.approx(
        goodput["elapsed_seconds"], abs=0.1
    )


@pytest.mark.parametrize("name", ["", pytest.param("metrics.jsonl", marks=pytest.mark.slow)])
def test_a_run_whose_files_are_deleted_fails_and_creates_none(tmp_path: Path, monkeypatch, capsys, name) -> None:
    """It fails even if no save is due that would notice it."""
    run, records = tmp_path / "run", []

    def record(*arguments, **keywords):
        records.append(step_record(*arguments, **keywords))
        if records[-1].step == 5:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return records[-1]

    monkeypatch.setattr("megajax.job.steps.step_record", record)
    with user_error(code=1) as error:
        train(run_config(run, steps=6, checkpoint=CheckpointConfig(every=4, at_end=False, asynchronous=False)))
    assert error.value.code == 1 and str(tmp_path / "run" / name) in str(error.value)
    assert capsys.readouterr().err.count("was deleted") == 0, "one message, by the front door"
    assert records[-1].step == 5
    assert not (run / name).exists()
    assert name or not run.exists()


def test_a_folder_that_is_being_deleted_gets_no_event(tmp_path: Path) -> None:
    """`rm -r` has deleted metrics.jsonl and events.jsonl, and not yet the folder."""
    for error, recorded in ((FileDeleted("metrics.jsonl was deleted"), False), (ValueError("odd"), True)):
        attempt = JobStart(tmp_path, None, 0.0)
        attempt.failures.open(attempt.events.append, 0, 1)
        with pytest.raises(type(error)):
            fail(error, run_config(tmp_path), attempt)
        assert (tmp_path / "events.jsonl").exists() == recorded


def test_a_refused_config_leaves_no_run_folder(tmp_path: Path) -> None:
    files = run_config(tmp_path / "run", data=BlendConfig(paths=(str(tmp_path / "absent"),)))
    layout = run_config(tmp_path / "run", parallel=ParallelConfig(tensor=3))
    for cfg in (files, layout):
        with pytest.raises(UserError):
            train(cfg)
        assert not (tmp_path / "run").exists()
