"""Stop requests while a run waits: for rows, for a compilation, in a save or an evaluation. F06."""

import json
import os
import random
import signal
import time
from pathlib import Path

import gangs
import pytest

from megajax.faults.beats import BEATS, Beat

ALONE = (*gangs.TRAIN, f"--config={gangs.CONFIG}", "--devices=cpu:1", "--logging.every=1", *gangs.LONG)
NEVER = """
import time
from dataclasses import dataclass
import small_jobs

class Rows:
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, row):
        while row >= 48:
            time.sleep(1)
        return self.rows[row]

@dataclass(frozen=True, kw_only=True, slots=True)
class Data(small_jobs.MockConfig):
    def build(self, **given):
        splits = small_jobs.MockConfig.build(self, **given)
        return splits._replace(train=Rows(splits.train))

def run_config():
    return small_jobs.run_config(data=Data())
"""
"""A config whose rows from 48 on never arrive: a disk that does not answer, in the threads that read ahead."""


def events(run_dir: Path, name: str) -> list[dict]:
    path = run_dir / "events.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line for line in lines if line["event"] == name]


def logged(run_dir: Path) -> int:
    """Steps in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 75])
def test_rows_that_never_arrive(tmp_path, code):
    """The last step is saved, and nothing waits for the reading threads."""
    run_dir, config = tmp_path / "run", tmp_path / "never.py"
    config.write_text(NEVER)
    with gangs.started(tmp_path) as start:
        command = [word for word in ALONE if not word.startswith("--config")]
        path = os.pathsep.join(map(str, (gangs.REPOSITORY, gangs.REPOSITORY / "tests")))
        more = (f"--config={config}:run_config", f"--resilience.exit_code_on_signal={code}", f"--run_dir={run_dir}")
        process = start(*command, *more, PYTHONPATH=path)
        process.until(lambda: logged(run_dir) >= 5)
        time.sleep(1.0)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait(60) == code, process.text
    (stopped,) = events(run_dir, "stopped")
    assert stopped["step"] == stopped["saved"] == 6
    assert (run_dir / "checkpoints" / "6").exists() or list((run_dir / "checkpoints").glob("*6"))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["all", "one"])
def test_rows_that_never_arrive_at_any_process(tmp_path, to):
    """No process has begun step 7: all stop before it, even if only one of them got the signal."""
    run_dir = tmp_path / "run"
    with gangs.started(tmp_path) as start:
        settings = (*gangs.TINY, *gangs.LONG, "--logging.every=1", "--resilience.inject=stuck:step=7")
        gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, f"--run_dir={run_dir}")
        gang.until(lambda: logged(run_dir) >= 5)
        time.sleep(1.0)
        os.kill(gang.process.pid if to == "all" else gang.children()[1], signal.SIGTERM)
        assert gang.wait() == 0, gang.text
    (stopped,) = events(run_dir, "stopped")
    assert stopped["step"] == stopped["saved"] == 6


@pytest.mark.slow
def test_rows_that_never_arrive_at_one_process_of_several(tmp_path):
    """The others are in the step: no state is left to save, and after a while the run reports it and ends."""
    run_dir = tmp_path / "run"
    with gangs.started(tmp_path) as start:
        injected = ("--resilience.inject=stuck:step=7:process=1", "--resilience.stop_grace=8")
        settings = (*gangs.TINY, *gangs.LONG, "--logging.every=1", *injected)
        gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, f"--run_dir={run_dir}")
        gang.until(lambda: logged(run_dir) >= 5)
        time.sleep(1.0)
        gang.process.send_signal(signal.SIGTERM)
        assert gang.wait() == 143, gang.text
    assert "steps 1 to 6 are lost" in gang.text


@pytest.mark.slow
def test_while_the_train_step_compiles(tmp_path):
    """Nothing is lost, and nothing is waited for."""
    run_dir, beats = tmp_path / "run", tmp_path / "beats"
    beats.mkdir()
    fresh = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "empty"), BEATS: str(beats)}
    with gangs.started(tmp_path) as start:
        process = start(*ALONE, f"--run_dir={run_dir}", **fresh)
        process.until(lambda: (beat := Beat.read(beats, 0)) is not None and beat.phase == "compile")
        process.process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, process.text
    assert "there is nothing new to save" in process.text and logged(run_dir) == 0


@pytest.mark.slow
def test_at_random_moments_of_saves_and_evaluations(tmp_path):
    """Each attempt resumes where the one before it stopped."""
    run_dir, last = tmp_path / "run", 0
    settings = (*ALONE, f"--run_dir={run_dir}", "--checkpoint.every=2", "--evaluation.every=3")
    with gangs.started(tmp_path) as start:
        for attempt in range(5):
            process = start(*settings, name=f"attempt_{attempt}")
            process.until(lambda: len(events(run_dir, "first_step")) > attempt)  # noqa: B023
            time.sleep(random.Random(attempt).uniform(0, 1.5))
            process.process.send_signal(random.Random(attempt).choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)))
            assert process.wait() == 0, process.text
            stopped = events(run_dir, "stopped")
            assert len(stopped) == attempt + 1 and stopped[-1]["step"] == stopped[-1]["saved"] > last
            last = stopped[-1]["step"]
    assert [event["step"] for event in events(run_dir, "start")[1:]] == [event["step"] for event in stopped[:-1]]
