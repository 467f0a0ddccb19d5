"""Failed saves are retried and counted; at the end there is one error with exit code 1."""

import os
import re
import time
from pathlib import Path

import pytest
from run_folder import events, lines
from small_jobs import run_config
from user_errors import user_error

from megajax.checkpoint import array_serialization
from megajax.checkpoint.config import CheckpointConfig
from megajax.job.job import train
from megajax.job.saves.save import SavesFailed
from megajax.job.steps import step_record
from megajax.metrics.config import LoggingConfig
from megajax.storage import disk
from megajax.training.config import EvaluationConfig


def saves(folder: Path) -> list[dict]:
    """The events of saves, without times."""
    every = [event for event in events(folder) if event["event"].startswith("save_")]
    return [{name: value for name, value in event.items() if name != "time"} for event in every]


def names(folder: Path) -> list[str]:
    return [event["event"].removeprefix("save_") for event in saves(folder)]


def job(folder: Path, steps: int, **settings: object):
    return run_config(
        folder,
        steps=steps,
        checkpoint=CheckpointConfig(**{"every": 4, "retry_seconds": 0.0} | settings),
        evaluation=EvaluationConfig(batches=0),
        logging=LoggingConfig(every=1, plot=False, sample=False, report=False, live="never"),
    )


def fill(monkeypatch: pytest.MonkeyPatch, attempts: range) -> None:
    """A disk that is full at these attempts to save, counted from 1."""
    count = iter(range(1, 1 << 30))

    def demand_space(folder: Path, needed: int) -> None:
        if next(count) in attempts:
            raise OSError(28, os.strerror(28), str(folder))

    monkeypatch.setattr(disk, "demand_space", demand_space)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 3 * 2**20)


class FailsLater:
    """What Orbax raises for a save that fails in the background."""

    def result(self, timeout: float) -> None:
        raise RuntimeError("wrapped") from OSError(5, os.strerror(5), "/runs/a/checkpoints/x")


def test_failed_saves_are_retried_counted_and_end_the_run(tmp_path, monkeypatch, capfd):
    fill(monkeypatch, range(2, 100))
    with pytest.raises(SavesFailed) as caught:
        train(job(tmp_path, 60, retries=1))
    assert caught.value.code == 1
    full = rf"{tmp_path}/checkpoints needs 103.\d KiB, 3.0 MiB are free \(No space left on device\)"
    text = str(caught.value).splitlines()
    assert re.fullmatch(rf"checkpoint step \d+ not saved: {full}", text[0]) and len(text) == 2
    assert text[1].startswith(
        "2 failed saves in a row (checkpoint.failed_saves=2). Nothing has been saved since step 4."
    )
    assert names(tmp_path) == ["begun", "committed", *2 * ["begun", "retried", "begun", "failed"]]
    failed = events(tmp_path, "save_failed")
    assert [event["failures"] for event in failed] == [1, 2] and re.fullmatch(full, failed[0]["why"])
    assert "continues" in failed[0]["next"] and "ends with exit code 1" in failed[1]["next"]
    records = lines(tmp_path)
    assert "save_failed" not in records[4] and records[-1]["save_failed"] is True and len(records) < 60
    output = capfd.readouterr().out
    assert output.count("WARNING: checkpoint step") == 1 and "| ckpt: FAILED |" in output
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["00000004"]


def test_a_background_error_is_reported_at_the_next_step_and_a_retry_saves(tmp_path, monkeypatch, capfd):
    start_writing, count = array_serialization.start_writing, iter(range(1, 1 << 30))
    failing = lambda path, array_names: FailsLater() if next(count) in (1, 2) else start_writing(path, array_names)  # noqa: E731
    monkeypatch.setattr(array_serialization, "start_writing", failing)

    def slow_record(*arguments, **keywords):
        """Steps take a tenth of a second, so that the background of a save has the time to fail meanwhile."""
        time.sleep(0.1 if arguments[1].step < 20 else 0.0)
        return step_record(*arguments, **keywords)

    monkeypatch.setattr("megajax.job.steps.step_record", slow_record)
    assert train(job(tmp_path, 40)) == 0
    assert names(tmp_path)[:7] == ["begun", "retried", "begun", "retried", "begun", "committed", "begun"]
    _, retried, *_ = saves(tmp_path)
    assert retried["why"].startswith("/runs/a/checkpoints/x: Input/output error; the disk") and retried["attempt"] == 1
    assert [event["wait_seconds"] for event in saves(tmp_path) if "wait_seconds" in event] == [0.0, 0.0]
    failed = [line["step"] for line in lines(tmp_path) if line.get("save_failed")]
    # Known right after step 4, and resolved when a retry has committed, long before the end.
    assert failed and failed[0] in range(5, 20) and failed[-1] < 40
    assert "saves work again" in capfd.readouterr().out
    assert (tmp_path / "checkpoints" / "00000040").is_dir()


@pytest.mark.slow
def test_a_failure_of_the_last_save_is_retried_and_is_not_exit_code_0(tmp_path, monkeypatch):
    fill(monkeypatch, range(1, 3))
    assert train(job(tmp_path / "retried", 6, every=None)) == 0
    assert names(tmp_path / "retried") == ["begun", "retried", "begun", "retried", "begun", "committed"]
    fill(monkeypatch, range(1, 100))
    with user_error(kind=SavesFailed):
        train(job(tmp_path / "lost", 6, every=None, retries=0, failed_saves=None))
    assert events(tmp_path / "lost")[-1]["code"] == 1
