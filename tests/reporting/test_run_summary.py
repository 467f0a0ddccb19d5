"""Summaries of run folders: attempts, time by cause, headline figures, and damaged or missing files."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from user_errors import user_error

from megajax.faults.attempt_end import stopped_end
from megajax.metrics.record import EvaluationRecord
from megajax.reporting.attempts import attempts
from megajax.reporting.history import read_history
from megajax.reporting.run_summary import RunSummary

pytestmark = pytest.mark.smoke


def rows(summary: RunSummary, title: str) -> list:
    return next((list(table.rows) for table in summary.tables if table.title.startswith(title)), [])


def test_a_run_of_five_steps(fake_run: Callable) -> None:
    run = fake_run()
    run.config(5)
    run.attempt(0, 5)
    run.event("end", step=5)
    run.ended(0, "done", "done", step=5)
    summary = run.summary()
    assert (summary.verdict, summary.status) == ("step 5 of 5: done; exit code 0", "good")
    figures = {name: value for name, value, _ in summary.figures}
    assert figures["steps"] == "5" and figures["train loss"] == "2.6000" and figures["tokens"] == "2,000"
    # 400 tokens in half a second on two devices, 1e9 FLOPs each, of a peak of 1e13: 800 * 1e9 / 2 / 1e13.
    assert figures["MFU"] == "4.0%" and figures["tokens/s"] == "800"
    assert {share.cause: share.seconds for share in summary.shares} == {"steps": 2.5, "compiling": 10.0}
    assert rows(summary, "Config") == [("steps", "5", "1000"), ("data.type", "<Mock>", "(required)")]
    assert summary.faults == ()


def test_skipped_rows_of_the_data(fake_run: Callable) -> None:
    run = fake_run()
    run.config(5)
    run.attempt(0, 5)
    assert "rows skipped" not in dict(rows(run.summary(), "The run"))
    run.event("rows_skipped", splits={"train": {"no answer": 1200}})
    run.event("rows_skipped", splits={"train": {"no answer": 1203, "corrupt": 1}, "valid": {"corrupt": 2}})
    facts = dict(rows(run.summary(), "The run"))
    assert facts["rows skipped"] == "train: 1,203 no answer, 1 corrupt; valid: 2 corrupt"


def test_events_give_the_last_step_if_metrics_are_lost(fake_run: Callable) -> None:
    run = fake_run()
    run.config(5)
    run.attempt(0, 5)
    run.event("end", step=5)
    run.ended(0, "done", "done", step=5)
    assert run.summary().faults == ()
    run.folder.metrics.write_text("")
    summary = run.summary()
    assert summary.verdict == "step 5 of 5: done; exit code 0"
    assert summary.faults == ("metrics.jsonl has no steps, but events.jsonl reaches step 5: metrics are lost",)


def test_a_run_resumed_twice(fake_run: Callable) -> None:
    run = fake_run()
    run.config(30)
    run.attempt(0, 12, save=5)
    run.event("stopped", step=12, saved=12, reason="SIGTERM")
    run.event("end", step=12)
    run.event("attempt_end", **stopped_end(12, 12, "SIGTERM", 0))
    run.now += 60.0
    run.attempt(12, 19)  # killed without an event, last saved at 12
    run.now += 30.0
    run.attempt(12, 30, save=5)
    run.event("end", step=30)
    run.ended(0, "done", "done", step=30)
    history = read_history(run.folder.path)
    runs = attempts(history)
    assert [(a.first_step, a.last_step, a.rerun_steps, a.exit_code) for a in runs] == [
        (0, 12, 0, 0),
        (12, 19, 7, None),
        (12, 30, 0, 0),
    ]
    assert runs[0].ending == "stopped (SIGTERM), step 12 saved"
    assert runs[1].ending == "no end recorded: killed or crashed" and runs[2].ending == "done"
    assert list(history.steps.step) == list(range(1, 31)), "every step once"
    assert run.seconds() == {
        "steps": 15.0, "evaluation": 2.0 * 6, "saving": 1.0 * 6, "compiling": 30.0, "steps run again": 3.5,
        "between attempts": 90.0,
    }  # fmt: skip
    assert runs[-1].end == pytest.approx(run.now)


def test_numeric_faults_end_with_their_code(fake_run: Callable) -> None:
    run = fake_run()
    run.config(20)
    run.attempt(0, 8, losses={7: math.inf, 8: math.nan})
    run.event("persistent_fault", step=8, why="loss (nan)", made=False)
    run.event("numeric_fault", message="step 8: loss (nan) is not finite")
    run.ended(17, "numeric_fault", "step 8: loss (nan) is not finite")
    summary = run.summary()
    assert summary.verdict == "step 8 of 20: loss (nan) is not finite; exit code 17" and summary.status == "bad"
    assert dict(rows(summary, "The run"))["non-finite losses"] == "2: step 7 (inf), step 8 (nan)"
    assert dict(rows(summary, "The run"))["skipped updates"] == "2"
    assert ("train loss", "nan") in [(name, value) for name, value, _ in summary.figures]


@pytest.mark.parametrize("remaining", [{"metrics.jsonl"}, {"events.jsonl"}, {"config.yaml"}])
def test_missing_files_are_reported(fake_run: Callable, remaining: set[str]) -> None:
    run = fake_run()
    run.config(6)
    run.attempt(0, 6, save=3)
    for file in run.folder.path.iterdir():
        if file.name not in remaining:
            file.unlink()
    summary = run.summary()
    missing = {"metrics.jsonl", "events.jsonl", "config.yaml", "config.diff"} - remaining
    assert set(summary.faults) == {f"{name} is missing" for name in missing}


def test_damaged_files_do_not_stop_the_report(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 3)
    run.folder.config_yaml.write_text("steps: [1, 2\n")
    run.folder.metrics.write_bytes(b"\xff\xfe\x00" + run.folder.metrics.read_bytes())
    run.folder.events.write_text('[1]\n{"event": "start"}\n' + run.folder.events.read_text())
    summary = run.summary()
    assert "config.yaml is not YAML" in summary.faults and "events.jsonl: 2 incomplete lines" in " ".join(
        summary.faults
    )
    assert ("steps", "3") in [(name, value) for name, value, _ in summary.figures]


def test_versions_come_from_the_newest_checkpoint(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 3)
    for step, version in ((3, "0.12.0"), (20, "0.12.1")):
        folder = run.folder.checkpoints / f"{step:08d}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(json.dumps({"step": step, "meta": {"versions": {"jax": version}}}))
    summary = run.summary()
    of_run = dict(rows(summary, "The run"))
    assert of_run["versions"] == "jax 0.12.1 (at the newest checkpoint)" and of_run["checkpoints kept"] == "3, 20"


def test_folders_without_a_run_are_rejected(tmp_path: Path, fake_run: Callable) -> None:
    run = fake_run("below")
    run.attempt(0, 1)
    with user_error():
        read_history(tmp_path)
    with user_error():
        read_history(tmp_path / "nowhere")
    with user_error():
        read_history(run.folder.metrics)


def test_sparse_columns_keep_their_places(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 4)
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    lines[2]["seconds_save"] = 1.5
    lines[1]["lr"] = None
    run.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    steps = read_history(run.folder.path).steps
    np.testing.assert_array_equal(steps.column("seconds_save"), [np.nan, np.nan, 1.5, np.nan])
    np.testing.assert_array_equal(steps.column("lr"), [1e-3, np.nan, 1e-3, 1e-3])
    assert np.isnan(steps.column("never")).all() and len(steps.column("never")) == 4


def test_tasks_without_a_loss_have_a_separate_table(fake_run: Callable) -> None:
    run = fake_run()
    run.attempt(0, 5)
    metrics = run.writers[-1]
    metrics.log(EvaluationRecord(step=3, split="race", loss=None, metrics={"accuracy": 0.25}))
    metrics.log(EvaluationRecord(step=5, split="race", loss=None, metrics={"accuracy": 0.5, "exact_match": 0.125}))
    metrics.log(EvaluationRecord(step=5, split="test", loss=math.nan))
    metrics.log(EvaluationRecord(step=5, split="validation", loss=0.5, likelihood=False))
    summary = run.summary()
    assert rows(summary, "Tasks") == [("race", "5", "accuracy", "0.5000"), ("race", "5", "exact match", "0.1250")]
    evaluations = [(split, perplexity) for split, _, _, perplexity, _ in rows(summary, "Evaluations")]
    assert evaluations == [("test", "?"), ("validation", "")], "preferences have no perplexity"
    assert "race loss" not in {name for name, *_ in summary.figures}
