"""Processes that hang before the first step, or whose disk does not answer: the blamed process, and the files left."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import gangs
import pytest
from peer_threads import ThreadPeers, together
from run_folder import events

from megajax.faults.activity import Activity
from megajax.faults.beats import BEATS, Beat
from megajax.faults.pulse import Pulse
from megajax.job import job
from megajax.processes.xla_options import XlaConfig

TRAIN = (sys.executable, Path(__file__).with_name("train_that_hangs.py"))


def hangs(run_dir: Path, process: int) -> dict:
    """The event of a process that has ended because of a hang; its stacks exist."""
    (event,) = (event for event in events(run_dir, "hang") if event["process"] == process)
    assert "thread MainThread" in Path(event["stacks"]).read_text()
    return event


def in_a_gang(tmp_path: Path, place: str, process: int, *settings: str) -> gangs.Started:
    """A gang of two whose process `process` hangs, after its end with 124."""
    common = (*gangs.TINY, *settings, f"--run_dir={tmp_path / 'run'}")
    with gangs.started(tmp_path) as start:
        fault = {"HANGING_PLACE": place, "HANGING_PROCESS": str(process)}
        gang = start(*gangs.launcher("--log-dir", tmp_path / "logs"), *TRAIN, *common, **fault)
        assert gang.wait() == 124, gang.text
    return gang


@pytest.mark.parametrize(
    ("place", "phase", "stage"),
    [
        ("megajax.job.job:find_devices", "start", "finding the devices"),  # There is no run folder yet.
        ("fsync:/checkpoints/", "setup", "opening the checkpoints"),
    ],
)
def test_one_process(start, tmp_path, place, phase, stage):
    limit = f"--resilience.watchdog.{phase}=2"
    settings = (*gangs.TINY[:-2], "--devices=cpu:1", limit, f"--run_dir={tmp_path / 'run'}")
    fault = {"HANGING_PLACE": place, "HANGING_PROCESS": "0", BEATS: str(tmp_path)}
    process = start(*TRAIN, *settings, **fault)
    assert process.wait() == 124, process.text
    message = process.text.splitlines()[-1]
    assert f"process 0 hangs, {stage} for" in message
    assert f"limit 2 s (resilience.watchdog.{phase})" in message
    event = hangs(tmp_path / "run", 0)
    assert (event["phase"], event["stage"], event["limit"]) == (phase, stage, 2.0)
    beat = Beat.read(tmp_path, 0)
    assert beat is not None and (beat.code, beat.stacks) == (124, event["stacks"])


@pytest.mark.slow
def test_a_process_that_does_not_reach_the_first_collective(tmp_path):
    gang = in_a_gang(tmp_path, "megajax.job.job:agree", 1, "--resilience.watchdog.start=12")
    assert "process 1 holds up the others: it has been connecting the devices of all processes for" in gang.text
    event = hangs(tmp_path / "run", 1)
    assert (event["phase"], event["cause_process"]) == ("start", 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_is_slow_to_find_its_devices(late, monkeypatch):
    """The first collective begins when all processes have found theirs, because gloo waits for only 30 s."""
    local, done = threading.local(), []

    def find_devices() -> None:
        if local.peers.index == late:
            time.sleep(0.5)
        done.append("devices")

    monkeypatch.setattr(job, "find_devices", find_devices)
    monkeypatch.setattr(job, "Peers", lambda name: local.peers)
    monkeypatch.setattr(job, "agree", lambda flag: done.append("collective"))

    def start(peers: ThreadPeers) -> None:
        local.peers = peers
        pulse = SimpleNamespace(activity=Activity(), peers=SimpleNamespace(join=lambda: None))
        job.connect_devices(cast(Pulse, pulse), None, 0.0, XlaConfig())

    assert together(2, start) == [None, None]
    assert done == ["devices", "devices", "collective", "collective"]


@pytest.mark.slow
def test_a_disk_of_process_1_that_does_not_answer_during_a_background_save(tmp_path):
    limit = "--resilience.watchdog.background_save=12"
    gang = in_a_gang(tmp_path, r"fsync:/manifest\.1\.json", 1, limit, "--checkpoint.every=3")
    assert "process 1 holds up the others" in gang.text
    event = hangs(tmp_path / "run", 1)
    assert (event["phase"], event["step"], event["cause_process"]) == ("background_save", 3, 1)
