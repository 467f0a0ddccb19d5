"""Processes whose standard error is a full pipe without a reader: they record why they end, and end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folder import events
from waiting import wait_until

from megajax.faults.beats import BEATS, Beat

FULL = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
os.set_blocking(2, False)
try:
    while True:
        os.write(2, bytes(4096))
except BlockingIOError:
    os.set_blocking(2, True)
"""

HANGS = """
from megajax.faults.pulse import Pulse
from megajax.faults.activity import Activity
from megajax.faults.watchdog import WatchdogConfig
from megajax.metrics.event_log import EventLog
pulse = Pulse(folder, Activity(), WatchdogConfig(step=0.5, compile=0.5))
pulse.record = EventLog(folder / "events.jsonl").append
with pulse, pulse.activity.phase("step", 7):
    time.sleep(600)
"""

TAKES_SIGNALS = """
from megajax.faults.signals import Signals
with Signals(received=lambda name, code: (folder / f"{name}_{code}").touch()):
    (folder / "ready").touch()
    while True:
        time.sleep(0.05)
"""


@pytest.fixture
def child(tmp_path: Path):
    """child(program): a process that runs it, and the end of its pipe that nobody reads."""
    processes: list[subprocess.Popen] = []

    def start(program: str) -> subprocess.Popen:
        command = [sys.executable, "-c", FULL + program, str(tmp_path)]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {BEATS: str(tmp_path)}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_hang_leaves_its_stacks_an_event_and_a_last_beat(tmp_path, child):
    assert child(HANGS).wait(120) == 124
    event, end = events(tmp_path)
    assert (end["event"], end["code"], end["by"]) == ("attempt_end", 124, "process")
    assert end["text"].startswith("hang in step 7 for ")
    assert (event["event"], event["phase"], event["exit_code"]) == ("hang", "step", 124)
    assert "thread MainThread" in Path(event["stacks"]).read_text()
    beat = Beat.read(tmp_path, 0)
    assert beat is not None and beat.code == 124 and beat.stacks == event["stacks"]


def test_the_second_signal_ends_it(tmp_path, child):
    process = child(TAKES_SIGNALS)
    for name in ("ready", "SIGTERM_None"):
        assert wait_until((tmp_path / name).exists, 120) and process.poll() is None
        time.sleep(0.5)  # A second signal at once is the same request.
        process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 143
    assert (tmp_path / "SIGTERM_143").exists()
