"""What a process tells the launcher before it ends, and on a request for its stacks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from waiting import wait_until

from megajax.config.errors import ConfigError, Problem, UserError
from megajax.faults.activity import STACKS_FOLDER, Activity
from megajax.faults.beats import BEATS, Beat, failures_reported, last_beat
from megajax.faults.peer_status import LostPeer, Verdict
from megajax.faults.pulse import Pulse
from megajax.faults.signals import Signals
from megajax.metrics.event_log import EventLog


class Wrong(UserError):
    """An error of the user's."""

    code = 2


@pytest.fixture
def beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(BEATS, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("error", "failure", "code"),
    [
        (Wrong("no data\nmore"), "no data", 2),
        (ConfigError([Problem("steps", "bad", "hint"), Problem("seed", "bad")], "file"), "steps: bad (and 1 more)", 2),
        (ValueError("odd"), "ValueError: odd", 1),
        (KeyboardInterrupt(), "KeyboardInterrupt", 130),
        (SystemExit(3), "SystemExit: 3", 3),
    ],
)
def test_an_error_becomes_the_last_beat(beats: Path, error: BaseException, failure: str, code: int) -> None:
    with pytest.raises(type(error)), failures_reported():
        raise error
    beat = Beat.read(beats, 0)
    assert beat is not None and (beat.failure, beat.code, beat.pid) == (failure, code, os.getpid())


def test_a_clean_end_is_no_failure(beats: Path) -> None:
    with pytest.raises(SystemExit), failures_reported():
        raise SystemExit(0)
    assert Beat.read(beats, 0) is None


def test_the_first_failure_counts(beats: Path) -> None:
    last_beat("hang", 124, "stacks.txt")
    last_beat("lost", 1)
    beat = Beat.read(beats, 0)
    assert beat is not None and (beat.failure, beat.code, beat.stacks) == ("hang", 124, "stacks.txt")


def test_a_failure_of_a_former_process_is_dropped(beats: Path) -> None:
    Beat(process=0, pid=os.getpid() + 1, host="", time=0.0, failure="old", code=1).write(beats)
    last_beat("new", 2)
    beat = Beat.read(beats, 0)
    assert beat is not None and beat.failure == "new"


def test_beats_state_the_main_thread_s_activity_and_end_with_the_last_one(beats: Path, tmp_path: Path) -> None:
    activity = Activity()
    with Pulse(tmp_path / "run", activity) as pulse, activity.phase("evaluation", 7):
        assert wait_until(lambda: (beat := Beat.read(beats, 0)) and beat.phase)
        beat = Beat.read(beats, 0)
        assert beat is not None and (beat.phase, beat.phase_step) == ("evaluation", 7)
        assert beat.run_dir == str(tmp_path / "run")
        pulse.failed(ValueError("odd"))
        time.sleep(1.5)
        beat = Beat.read(beats, 0)
        assert beat is not None and (beat.failure, beat.code, beat.phase) == ("ValueError: odd", 1, "evaluation")


def test_the_first_beat_is_written_at_once(beats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher knows of a process that stops in its first second."""
    monkeypatch.setattr("megajax.faults.pulse.TICK_SECONDS", 1e6)
    with Pulse(tmp_path, Activity()):
        assert wait_until(lambda: Beat.read(beats, 0) is not None)


def test_a_lost_process_is_recorded_once_by_the_launcher_if_there_is_one(
    beats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, verdict = tmp_path / "events.jsonl", Verdict(1, "process 1 no longer runs")
    error = jax.errors.JaxRuntimeError("Gloo all-reduce failed: Connection closed by peer")
    for launcher in (str(beats), ""):
        monkeypatch.setenv(BEATS, launcher)
        pulse = Pulse(tmp_path, Activity())
        pulse.record = EventLog(events).append
        monkeypatch.setattr("megajax.faults.pulse.lost_peer", lambda *_: (LostPeer("lost"), verdict))
        pulse.failed(error)
        assert events.exists() == (not launcher)
    lost, end = map(json.loads, events.read_text().splitlines())
    assert lost["event"] == "lost" and lost["process"] == 1
    assert (end["event"], end["code"], end["text"]) == ("attempt_end", 1, "process 1 no longer runs")


def test_no_launcher_no_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BEATS, raising=False)
    monkeypatch.chdir(tmp_path)
    with Pulse(tmp_path, Activity()):
        last_beat("hang", 124)
    assert not list(tmp_path.iterdir())


def test_sigusr2_writes_the_stacks_and_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    activity = Activity()
    pulse = Pulse(tmp_path, activity)
    with Signals(dump=pulse.dump) as signals, activity.phase("data_wait", 7):
        os.kill(os.getpid(), signal.SIGUSR2)
        path = tmp_path / STACKS_FOLDER / "process_0.txt"
        assert wait_until(lambda: path.exists() and __name__ in path.read_text())
        assert signals.request is None
    text = path.read_text()
    assert "asked for by SIGUSR2" in text and "thread MainThread" in text and "waiting for the rows of step 7" in text
    assert "test_sigusr2_writes_the_stacks_and_ends_nothing" in text


def test_a_failing_command_tells_the_launcher(tmp_path: Path) -> None:
    """It does so even before there is a job."""
    command = [sys.executable, "-m", "megajax.train", "--config=quickstart.py", "--steps=many", "--devices=cpu:1"]
    ended = subprocess.run(command, env=os.environ | {BEATS: str(tmp_path)}, capture_output=True, check=False)
    assert ended.returncode == 2
    beat = json.loads((tmp_path / "process_0.json").read_text())
    assert beat["code"] == 2 and beat["failure"]
