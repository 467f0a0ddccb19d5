"""Setting the wall clock during a run changes neither its steps nor the checkpoint that it resumes from."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_jobs import losses, run_config

from megajax.checkpoint.config import CheckpointConfig
from megajax.faults.config import ResilienceConfig
from megajax.job.job import train
from megajax.metrics.writers import JsonlWriter
from megajax.reporting.attempts import attempts
from megajax.reporting.history import read_history

HOUR, DAY = 3_600.0, 86_400.0


@pytest.mark.slow
def test_the_clock_jumps_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady, jumping = tmp_path / "steady", tmp_path / "jumping"
    every = CheckpointConfig(every=3)
    assert train(run_config(steady, checkpoint=every)) == 0
    wall, clock = time.time, {"ahead": 0.0}
    write = JsonlWriter.write

    def write_and_jump(writer: JsonlWriter, line: Mapping[str, Any]) -> None:
        write(writer, line)
        clock["ahead"] = {1: HOUR, 4: -DAY}.get(line["step"], clock["ahead"])

    monkeypatch.setattr(JsonlWriter, "write", write_and_jump)
    monkeypatch.setattr(time, "time", lambda: wall() + clock["ahead"])
    began = time.monotonic()
    limits = ResilienceConfig(exit_after_steps=4, exit_after_minutes=30.0)
    assert train(run_config(jumping, checkpoint=every, resilience=limits)) == 0
    assert train(run_config(jumping, checkpoint=every)) == 0
    seconds = time.monotonic() - began
    assert losses(jumping) == losses(steady)
    first, second = attempts(read_history(jumping))
    assert (first.last_step, second.first_step, second.last_step) == (4, 4, 6)
    assert first.ending.startswith("stopped (resilience.exit_after_steps=4)") and second.ending == "done"
    assert second.begin - first.end >= 0 and second.end - first.begin <= seconds + 1.0
