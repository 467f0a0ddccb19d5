"""A run resumes on fewer or more devices with the same command.

That its losses are the same is tested for all kinds of stops: test_stops_and_resumes.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gangs
import jax
import pytest
from run_folder import events
from small_jobs import losses, model, run_config
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig
from megajax.config.errors import ConfigError
from megajax.job.job import train
from megajax.job.notebook import set_up
from megajax.job.start.resume import facts
from megajax.mesh.config import ParallelConfig
from megajax.models.facts import summarize
from megajax.optim.config import ScheduleConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.resolved import Resolved
from megajax.training.run_config import RunConfig

STEPS = 6
LLAMA = model(hidden=48, heads=6, kv_heads=2, ffn=96, repeats=4)


def job(
    folder: Path, model_config, parallel: ParallelConfig, *, steps: int, rows: int = 24, micro_size: int = 1
) -> RunConfig:
    return run_config(
        folder,
        model=model_config,
        parallel=replace(parallel, elastic=True),
        batch=BatchConfig(global_size=rows, micro_size=micro_size),
        schedule=ScheduleConfig(lr=1e-2, warmup_steps=2, decay_steps=STEPS),
        evaluation=EvaluationConfig(batches=0),
        checkpoint=CheckpointConfig(every=None),
        steps=steps,
    )


@pytest.fixture
def present(monkeypatch):
    """present(n): the run finds n of the eight devices."""

    def only(count: int) -> None:
        for module in ("megajax.job.job", "megajax.training.resolved"):
            monkeypatch.setattr(f"{module}.find_devices", lambda: jax.devices()[:count])

    return only


def check(folder: Path, legs: Sequence[int], undisturbed: Sequence[float]) -> None:
    """The losses of the run, and the events of its attempts."""
    assert losses(folder) == pytest.approx(undisturbed, rel=1e-4)
    device_counts = [event["devices"] for event in events(folder, "start")]
    assert device_counts == list(legs)


@pytest.mark.slow
def test_idle_devices_are_named(tmp_path, present, capsys):
    """Eight rows on eight devices; then from the first step again on six devices, of which four are used."""
    cfg = job(tmp_path, model(repeats=1), ParallelConfig(data=8), steps=2, rows=8)
    cfg = cfg.but(checkpoint=CheckpointConfig(every=1))
    assert train(cfg) == 0
    undisturbed = losses(tmp_path)
    present(6)
    assert train(cfg.but(checkpoint=CheckpointConfig(every=1, step=1))) == 0
    check(tmp_path, (8, 4), undisturbed)
    text = capsys.readouterr().out
    assert "8 devices wanted, 6 present, 2 idle: data 8 -> 4, microbatches 1 -> 2" in text
    assert "4 x cpu (4 of 8 used)" in text and f"{jax.devices()[4]} of process 0" in text
    assert [(event["devices"], event["used"]) for event in events(tmp_path, "replan")] == [(6, 4)]
    config_text = (tmp_path / "config.yaml").read_text()
    assert "elastic: true" in config_text and "data: 4  # parallel.elastic" in config_text


def test_a_notebook_uses_the_layout_that_fits(tmp_path):
    cfg = job(tmp_path, model(repeats=1), ParallelConfig(data=8), steps=1, rows=8)
    run = set_up(cfg, devices=jax.devices()[:2])
    assert run.mesh.shape["data"] == 2 and run.cfg.parallel.data == 2
    assert (plan := run.parts.resolved.replan) is not None and plan.text().endswith("data 8 -> 2, microbatches 1 -> 4")
    run.close()
    fixed = cfg.but(parallel=ParallelConfig(data=8))
    with user_error("parallel", kind=ConfigError):
        set_up(fixed, devices=jax.devices()[:2])


@pytest.mark.parametrize(("devices", "rows"), [(8, 24), (5, 25)])
def test_rounded_down_rows_are_recorded_in_a_checkpoint(devices, rows):
    """Without the record a run of 8 devices would resume with other rows per step on 5."""
    cfg = job(Path("unused"), LLAMA, ParallelConfig(), steps=1, rows=29)
    cfg = cfg.but(batch=BatchConfig(global_size=29, decrease=True))
    schedule, train_rows = SimpleNamespace(facts=dict), SimpleNamespace()
    program = SimpleNamespace(schedule=schedule, sizes=cfg.batch_sizes(devices), summary=summarize(cfg.model))
    parts: Any = SimpleNamespace(
        cfg=cfg,
        resolved=Resolved(cfg, mesh=None, options={}),
        program=program,
        splits=SimpleNamespace(train=train_rows),
    )
    fact = facts(parts)["batch: rows of a step, rounded down to a multiple of the devices"]
    assert fact.strip('"') == str(rows)


@pytest.mark.slow
def test_a_gang_resumes_with_fewer_processes(start, tmp_path):
    """It starts with three processes and goes on with two."""
    settings = ["--model.hidden=48", "--batch.global_size=24", "--batch.micro_size=1", "--parallel.data=3"]
    settings += ["--schedule.decay_steps=6", "--evaluation.at_end=false", "--checkpoint.every=none"]
    command = [*gangs.TRAIN, f"--config={gangs.CONFIG}", *settings]
    undisturbed = start(*command, "--devices=cpu:3", f"--run_dir={tmp_path / 'whole'}", name="whole")
    assert undisturbed.wait(400.0) == 0, undisturbed.text
    for leg, processes in enumerate((3, 2), start=1):
        more = ["--devices=cpu:1", f"--steps={3 * leg}", f"--run_dir={tmp_path / 'legs'}"]
        gang = start(*gangs.launcher(processes=processes), *command, *more, name=f"leg{leg}", MEGAJAX_ELASTIC="1")
        assert gang.wait(400.0) == 0, gang.text
    assert gangs.losses(tmp_path / "legs") == pytest.approx(gangs.losses(tmp_path / "whole"), rel=1e-5)
    assert [event["used"] for event in events(tmp_path / "legs", "replan")] == [2]
