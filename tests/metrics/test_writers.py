"""Events, dashboards (read back by their own tools) and the run folder."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
from user_errors import user_error

from megajax.metrics.config import LoggingConfig, WandbConfig
from megajax.metrics.event_log import Clock, append_event, next_attempt
from megajax.metrics.record import EvaluationRecord, read_metrics
from megajax.metrics.run_folder import RunFolder
from megajax.metrics.writer import Writer, Writers
from megajax.metrics.writers import EventsWriter


def test_events_keep_every_attempt(tmp_path):
    path = tmp_path / "events.jsonl"
    for attempt in (1, 2):
        writer = EventsWriter(path, attempt=attempt, clock=Clock(lambda: 1.5, lambda: 3.25))
        writer.event("saved", step=attempt, path=Path("/x"), seconds=math.inf, name="a", sizes=(1, 2))
        writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["clock"][1] == 3.25
    assert lines[1] == {
        "time": 1.5, "clock": lines[0]["clock"], "event": "saved", "attempt": 2, "step": 2, "path": "/x",
        "seconds": None, "name": "a", "sizes": [1, 2],
    }  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2]
    assert next_attempt(path) == 3 and next_attempt(tmp_path / "absent.jsonl") == 1
    append_event(path, "restart", attempt=3)
    assert next_attempt(path) == 3, "the launcher has begun it"


def test_an_event_may_not_hide_its_name(tmp_path):
    writer = EventsWriter(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="'event'"):
        writer.event("saved", **{"event": 3})
    writer.close()


def test_tensorboard_reads_the_files_and_hides_an_earlier_attempt(tmp_path, step):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(tensorboard=True)
    with config.build(folder) as writers:
        for number in range(1, 6):
            writers.log(step(number, loss=float(number)))
            writers.log(EvaluationRecord(step=number, split="validation", loss=2.0))
    with config.build(folder, start_step=3) as writers:
        writers.log(step(4, loss=40.0))
    events = accumulator.EventAccumulator(str(folder.tensorboard))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/tokens_per_second", "validation/perplexity"} - set(tags) == set()
    assert "train/mfu_causal" not in tags
    points = {point.step: point.value for point in events.Scalars("train/loss")}
    assert points == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}
    steps, _ = read_metrics(folder.metrics)
    assert [line["loss"] for line in steps] == [1.0, 2.0, 3.0, 40.0]
    event = json.loads(folder.events.read_text().splitlines()[0])
    assert (event["event"], event["start_step"], event["lines"]) == ("metrics_superseded", 3, 4)


@pytest.mark.parametrize(
    ("module", "config", "extra"),
    [
        ("tensorboardX", LoggingConfig(tensorboard=True), "megajax[log]"),
        ("wandb", LoggingConfig(wandb=WandbConfig()), "megajax[wandb]"),
    ],
)
def test_a_missing_extra_is_reported_before_files_change(tmp_path, monkeypatch, module, config, extra):
    monkeypatch.setitem(sys.modules, module, None)
    folder = RunFolder.create(tmp_path)
    folder.metrics.write_text('{"step": 9, "loss": 1.0}\n')
    with user_error() as caught:
        config.build(folder)
    assert extra in str(caught.value)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    assert folder.metrics.read_text() == '{"step": 9, "loss": 1.0}\n'


def test_wandb_offline_needs_no_network_and_resumes_its_run(tmp_path, step):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    folder = RunFolder.create(tmp_path / "run")
    config = LoggingConfig(wandb=WandbConfig(project="p"))
    for start in (0, 1):
        with config.build(folder, start_step=start, run_config={"seed": 1}) as writers:
            writers.log(step(start + 1))
            writers.log(EvaluationRecord(step=start, split="validation", loss=2.0))
    names = [path.name for path in (folder.path / "wandb").glob("offline-run-*/*.wandb")]
    assert len(names) == 2
    assert len(set(names)) == 1


def test_other_processes_write_nothing(tmp_path, step):
    folder = RunFolder.create(tmp_path)
    with LoggingConfig(tensorboard=True).build(folder, primary=False) as writers:
        writers.log(step(1))
        writers.event("start")
    assert os.listdir(tmp_path) == []


class Recorder(Writer):
    def __init__(self, fail: bool = False):
        self.closed, self.fail = False, fail

    def close(self) -> None:
        self.closed = True
        if self.fail:
            raise OSError("disk full")


def test_all_writers_are_closed_even_when_one_fails():
    writers = [Recorder(fail=True), Recorder()]
    with pytest.raises(OSError, match="disk full"), Writers(writers) as all_writers:
        all_writers.event("nothing")
    assert [writer.closed for writer in writers] == [True, True]


def test_run_folder(tmp_path):
    folder = RunFolder.create(tmp_path / "a" / "b")
    folder.write_config("seed: 1\n", "seed: 0 -> 1\n")
    folder.write_config("seed: 2\n", "seed: 0 -> 2\n")
    assert folder.config_yaml.read_text() == "seed: 2\n"
    assert sorted(os.listdir(folder.path)) == ["config.diff", "config.yaml"]


def test_a_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/megajax")):
        with user_error("run_dir"):
            RunFolder.create(place)
