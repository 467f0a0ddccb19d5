"""Processes of a gang that hang, freeze or fail: what each says, and with which code it ends."""

import os
import signal
from pathlib import Path

import gangs
import pytest

from megajax.resilience.beats import BEATS, Beat


def beat(folder: Path, process: int) -> Beat:
    """Its last beat; one without a step if it has written none."""
    return Beat.read(folder, process) or Beat(process=process, pid=0, host="", time=0.0)


@pytest.mark.slow
def test_stacks_of_every_process(tmp_path):
    beats, run_dir = tmp_path / "beats", tmp_path / "run"
    beats.mkdir()
    with gangs.started(tmp_path) as start:
        settings = (*gangs.TINY, *gangs.LONG, f"--run_dir={run_dir}")
        gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, **{BEATS: str(beats)})
        gang.until(lambda: all(beat(beats, process).step > 2 for process in (0, 1)))
        assert {beat(beats, process).pid for process in (0, 1)} == set(gang.children())
        for pid in gang.children():
            os.kill(pid, signal.SIGUSR2)
        paths = [run_dir / "hangs" / f"process_{process}.txt" for process in (0, 1)]
        gang.until(lambda: all(path.exists() and "run_steps" in path.read_text() for path in paths))
        step = beat(beats, 0).step
        gang.until(lambda: beat(beats, 0).step > step)
        gang.process.send_signal(signal.SIGTERM)
        assert gang.wait() == 0, gang.text
    assert "[0]   File " in gang.text and "[1]   File " in gang.text
    assert beat(beats, 1).failure is None
