"""Whole jobs in their folders: stop and resume, refusals, numeric faults, evaluation alone."""

import math
import re
import resource
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from run_folder import events, lines, saved, steps
from small_jobs import model, run_config
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.inspection import describe
from megajax.config.errors import UserError
from megajax.faults.config import ResilienceConfig
from megajax.job.job import train
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.reporting.write_report import close_run
from megajax.training.run_config import RunConfig


def losses(folder: Path) -> dict[str, float]:
    """Split -> loss of the last evaluation."""
    return {line["split"]: line["loss"] for line in lines(folder) if "split" in line}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file except the lock, which belongs to a process rather than to the run."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """Six steps without a stop; their output is in output.txt beside the run's folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with (folder.parent / "output.txt").open("w") as file, redirect_stdout(file):
        assert train(run_config(folder), reporter=close_run) == 0
    return folder


@pytest.fixture(scope="module")
def halted(tmp_path_factory) -> Path:
    """The same run, ended after step 4 and saved there, between two regular saves."""
    folder = tmp_path_factory.mktemp("halted") / "run"
    assert train(run_config(folder, resilience=ResilienceConfig(exit_after_steps=4))) == 0
    return folder


@pytest.fixture
def copied(halted, tmp_path) -> Path:
    return Path(shutil.copytree(halted, tmp_path / "run"))


@pytest.mark.smoke
def test_a_whole_run_leaves_every_step_and_its_evaluations(uninterrupted):
    assert list(steps(uninterrupted)) == [1, 2, 3, 4, 5, 6]
    assert steps(uninterrupted)[1]["lr"] == 0
    assert [line["consumed_samples"] for line in steps(uninterrupted).values()] == [8, 16, 24, 32, 40, 48]
    assert steps(uninterrupted)[6]["consumed_tokens"] == 6 * 8 * 16
    assert set(losses(uninterrupted)) == {"validation", "test"}
    assert saved(uninterrupted) == [3, 6]


def test_a_checkpoint_records_the_position_of_the_run_and_its_layout(uninterrupted):
    content, _ = describe(uninterrupted / "checkpoints", 6)
    counters = content["counters"]
    assert (counters["step"], counters["consumed_samples"], content["consumed_tokens"]) == (6, 48, 48 * 16)
    assert math.prod(content["mesh"].values()) == 1 == content["processes"]
    assert content["config"]["steps"] == 6 and content["seed"] == content["config"]["seed"]
    stacked_arrays = [array for array in content["arrays"] if array["name"].startswith(("params.", "optimizer."))]
    assert stacked_arrays and all(len(array["axes"] or ()) == len(array["shape"]) for array in stacked_arrays)


def test_a_run_leaves_a_page_that_states_its_end(uninterrupted):
    page = (uninterrupted / "report.html").read_text(encoding="utf-8")
    assert "step 6 of 6: done; exit code 0" in page and "Host memory" in page


def test_on_a_CPU_no_line_has_figures_of_GPUs(uninterrupted):
    """Neither the lines nor the page have FLOP/s or Megatron-LM's formula; metrics.jsonl has the known figures."""
    output = (uninterrupted.parent / "output.txt").read_text()
    assert "tokens/s/device: " in output and "memory of the compiled step: " in output
    page = (uninterrupted / "report.html").read_text(encoding="utf-8")
    for text in (output, page):
        assert not re.search("TFLOP|MFU|Megatron", text)
    last = steps(uninterrupted)[6]
    assert last["tflops_per_device_full"] > 0 and last["mfu_full"] is None
    assert lines(uninterrupted, "events")[0]["device_kind"] == "cpu"


def test_memory_of_the_process_is_in_every_line(uninterrupted):
    sizes = [line["memory_host"] for line in steps(uninterrupted).values()]
    # Linux keeps both counts per processor and sums them now and then: at its peak a process may read slightly more.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * 1.05
    assert all(most / 100 < size <= most for size in sizes) and len(sizes) == 6


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        (
            {"seed": 7, "optimizer": AdamWConfig(weight_decay=0.2)},
            ["seed: 1234 -> 7", "optimizer.weight_decay: 0.01 -> 0.2"],
        ),
        (
            {"steps": 7},
            ["schedule: samples of decay", "48 -> 56", "which was 6 and is 7 now: --schedule.decay_steps=6"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_resume_with_other_settings_is_refused_and_changes_nothing(halted, changes, listed):
    before = contents(halted)
    with pytest.raises(UserError) as refused:
        train(run_config(halted, **changes))
    for line in listed:
        assert line in str(refused.value)
    assert "has step 4" in str(refused.value)
    assert "Continue with the old settings; " in str(refused.value)
    assert "or set another run_dir" in str(refused.value)
    rates = any(f"\n  {name}" in str(refused.value) for name in ("schedule", "optimizer.weight_decay"))
    assert ("set schedule.on_resume=config to change the rates" in str(refused.value)) == rates
    assert contents(halted) == before


@pytest.mark.slow
def test_another_schedule_applies_where_the_config_allows_it(uninterrupted, copied, capsys):
    """It counts the rows consumed so far, as if it had been the schedule from the start; nothing else may change."""
    rates = {
        "schedule": ScheduleConfig(lr=1e-3, style="linear", on_resume="config"),
        "optimizer": AdamWConfig(weight_decay=0.2),
    }
    with user_error() as refused:
        train(run_config(copied, seed=7, **rates))
    assert "schedule.lr" not in str(refused.value) and "on_resume" not in str(refused.value)
    assert train(run_config(copied, **rates)) == 0
    output = capsys.readouterr().out
    assert "changed rates from step 4 on (schedule.on_resume=config)" in output
    assert "schedule.lr: 0.01 -> 0.001" in output and "optimizer.weight_decay: 0.01 -> 0.2" in output
    assert [steps(copied)[step]["lr"] for step in (5, 6)] == pytest.approx([1e-3 * 2 / 6, 1e-3 / 6], rel=1e-6)
    assert [steps(copied)[step]["lr"] for step in range(1, 5)] == [
        steps(uninterrupted)[step]["lr"] for step in range(1, 5)
    ]
    assert steps(copied)[5]["loss_hex"] == steps(uninterrupted)[5]["loss_hex"]
    assert steps(copied)[6]["loss"] != steps(uninterrupted)[6]["loss"]
    # From now on, the new schedule is the one that must not change.
    assert train(run_config(copied, **rates | {"schedule": ScheduleConfig(lr=1e-3, style="linear")})) == 0


def test_a_finished_run_trains_no_further_and_can_be_evaluated_alone(uninterrupted, tmp_path, capsys):
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    assert train(run_config(folder), skip_train=True) == 0
    assert list(steps(folder)) == list(steps(uninterrupted))
    assert losses(folder) == losses(uninterrupted)
    capsys.readouterr()
    assert train(run_config(folder)) == 0
    assert (
        f"nothing to train: --run_dir={folder} is at step 6 of --steps=6. Increase --steps" in capsys.readouterr().out
    )
    assert lines(folder) == lines(uninterrupted)


def too_fast(folder: Path) -> RunConfig:
    """The third step sees weights of 1e30."""
    return run_config(folder, model=model(dropout=0.0), schedule=ScheduleConfig(lr=2e30, warmup_steps=2))


def test_nonfinite_numbers_end_the_run_with_17_and_leave_the_last_checkpoint(tmp_path):
    cfg = too_fast(tmp_path / "run").but(checkpoint=CheckpointConfig(every=1))
    assert train(cfg) == 17
    folder = Path(cfg.run_dir)
    assert list(steps(folder)) == [1, 2, 3]
    assert steps(folder)[3]["skipped"]
    assert events(folder, "numeric_fault")
    assert saved(folder) == [1, 2]
