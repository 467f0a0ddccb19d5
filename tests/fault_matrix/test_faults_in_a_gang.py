"""Two processes agree about a suspicious step, and exchange the durations of their phases."""

import json
from pathlib import Path

import gangs
import pytest


def events(folder: Path, name: str) -> list[dict]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


@pytest.mark.slow
def test_a_transient_fault_has_no_effect_in_a_gang(tmp_path):
    losses = {}
    with gangs.started(tmp_path) as start:
        for name, more in (("plain", ()), ("faulty", ("--resilience.inject=nan:step=3,inf:step=4",))):
            settings = (*gangs.TINY, f"--run_dir={tmp_path / name}", "--logging.every=2", "--checkpoint.every=3")
            gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, *more, name=name)
            assert gang.wait() == 0, gang.text
            lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            losses[name] = [(line["loss_hex"], line["grad_norm"]) for line in lines if "split" not in line]
    assert losses["faulty"] == losses["plain"] and len(losses["plain"]) == 6
    assert [event["step"] for event in events(tmp_path / "faulty", "transient_fault")] == [3, 4]
    told = {line["step"]: line for line in lines if "seconds_data_wait_max" in line}
    assert list(told) == [2, 4, 6]
    assert all(0 < line["seconds_data_wait_min"] <= line["seconds_data_wait_max"] for line in told.values())
    assert told[4]["seconds_save_max"] > 0 and "seconds_save_max" not in told[6]
    assert "data wait per iteration (ms): " in gang.text and "(processes: " in gang.text
