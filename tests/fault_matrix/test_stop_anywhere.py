"""Stop requests while a run waits: for rows, for a compilation, in a save or an evaluation."""

import os
import random
import signal
import time
from pathlib import Path

import gangs
import pytest
from run_folder import events, lines, saved

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
    return small_jobs.run_config(data=Data(documents=small_jobs.DOCUMENTS))
"""
"""A config whose rows from 48 on never arrive: a disk that does not answer, in the threads that read ahead."""


@pytest.mark.slow
def test_rows_that_never_arrive(start, tmp_path):
    """The last step is saved, and nothing waits for the reading threads."""
    run_dir, config = tmp_path / "run", tmp_path / "never.py"
    config.write_text(NEVER)
    command = [word for word in ALONE if not word.startswith("--config")]
    path = os.pathsep.join(map(str, (gangs.REPOSITORY, gangs.REPOSITORY / "tests")))
    more = (f"--config={config}:run_config", "--resilience.exit_code_on_signal=75", f"--run_dir={run_dir}")
    process = start(*command, *more, PYTHONPATH=path, **{BEATS: str(tmp_path)})
    process.until(lambda: waits_for_rows(tmp_path, 0))
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, process.text
    (stopped,) = events(run_dir, "stopped")
    assert stopped["step"] == stopped["saved"] == 6
    assert saved(run_dir) == [6]


def waits_for_rows(beats: Path, *processes: int) -> bool:
    """Whether these processes wait for the rows of step 7."""
    last = [Beat.read(beats, process) for process in processes]
    return all(beat is not None and (beat.phase, beat.phase_step) == ("data_wait", 7) for beat in last)


def stuck_gang(start, folder: Path, *injected: str) -> tuple[Path, gangs.Started]:
    """Its run folder, and two processes whose beats are in folder/beats."""
    settings = (*gangs.TINY, *gangs.LONG, "--logging.every=1", *injected, f"--run_dir={folder / 'run'}")
    return folder / "run", start(*gangs.launcher(f"--beats={folder / 'beats'}"), *gangs.TRAIN, *settings)


@pytest.mark.slow
def test_rows_that_never_arrive_at_one_process_of_several(start, tmp_path):
    """The others are in the step: no state is left to save, and after a while the run reports it and ends."""
    injected = ("--resilience.inject=stuck:step=7:process=1", "--resilience.stop_grace=8")
    run_dir, gang = stuck_gang(start, tmp_path, *injected)
    gang.until(lambda: waits_for_rows(tmp_path / "beats/attempt_1", 1) and len(lines(run_dir)) >= 5)
    gang.process.send_signal(signal.SIGTERM)
    assert gang.wait() == 143, gang.text
    assert "steps 1 to 6 are lost" in gang.text


@pytest.mark.slow
def test_while_the_train_step_compiles(start, tmp_path):
    """Nothing is lost, and nothing is waited for."""
    run_dir, beats = tmp_path / "run", tmp_path / "beats"
    beats.mkdir()
    fresh = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "empty"), BEATS: str(beats)}
    process = start(*ALONE, f"--run_dir={run_dir}", **fresh)
    process.until(lambda: (beat := Beat.read(beats, 0)) is not None and beat.phase == "compile")
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, process.text
    assert "there is nothing new to save" in process.text and len(lines(run_dir)) == 0


@pytest.mark.slow
def test_at_random_moments_of_saves_and_evaluations(start, tmp_path):
    """Each attempt resumes where the one before it stopped."""
    run_dir, last = tmp_path / "run", 0
    settings = (*ALONE, f"--run_dir={run_dir}", "--checkpoint.every=2", "--evaluation.every=3")
    for attempt in range(2):
        process = start(*settings, name=f"attempt_{attempt}")
        process.until(lambda: len(events(run_dir, "first_step")) > attempt)  # noqa: B023
        time.sleep(random.Random(attempt).uniform(0, 1.5))
        process.process.send_signal(random.Random(attempt).choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)))
        assert process.wait() == 0, process.text
        stopped = events(run_dir, "stopped")
        assert len(stopped) == attempt + 1 and stopped[-1]["step"] == stopped[-1]["saved"] > last
        last = stopped[-1]["step"]
    assert [event["step"] for event in events(run_dir, "start")[1:]] == [event["step"] for event in stopped[:-1]]
