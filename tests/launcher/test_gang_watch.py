"""What the launcher concludes from beats: silence, no movement, checkpoints, stacks."""

import os
import signal
import subprocess
import sys

import pytest
from waiting import wait_until

from megajax.faults.activity import Stage
from megajax.faults.beats import Beat
from megajax.launcher.gang_watch import GangWatch, HangLimits, handles, process_state


class Clocked:
    """Two processes whose beats the test writes, and a clock that it sets."""

    def __init__(self, folder, **limits):
        self.now, self.folder, self.written = 0.0, folder, 0
        limits = HangLimits(**({"beat": 60.0, "progress": 600.0} | limits))
        self.watch = GangWatch(folder, limits, lambda: self.now, host="here")

    def beat(self, process: int, *, host: str = "elsewhere", pid: int = 1, **fields) -> None:
        self.written += 1
        defaults = {"phase": "step", "phase_step": 7, "step": 6}
        Beat(process=process, pid=pid, host=host, time=self.written, **(defaults | fields)).write(self.folder)

    def after(self, seconds: float, ended: tuple[int, ...] = ()) -> str | None:
        self.now += seconds
        self.watch.read_beats()
        return self.watch.hang(set(ended))


@pytest.fixture
def gang(tmp_path):
    gang_watch = Clocked(tmp_path)
    for process in (0, 1):
        gang_watch.beat(process)
    assert gang_watch.after(0.0) is None
    return gang_watch


def test_a_process_that_becomes_silent(gang):
    for _ in range(6):
        gang.beat(0)
        assert gang.after(10.0) is None
    gang.beat(0)
    assert gang.after(1.0) == "process 1 does not answer, its last beat is 61 s old (--beat-timeout=60)"
    assert gang.watch.hang({1}) is None


def test_a_process_that_loads_libraries_during_its_start(gang):
    """It holds the interpreter's lock, so its thread writes no beat."""
    gang.beat(1, phase="start", stage="finding the devices")
    for step in range(7, 26):
        gang.beat(0, step=step)
        assert gang.after(50.0) is None
    gang.beat(0)
    assert gang.after(50.0) == "process 1 does not answer, its last beat is 950 s old (limit of a start: 900 s)"


def test_time_in_which_the_launcher_was_stopped_does_not_count(gang):
    gang.watch.pause(1000.0)
    assert gang.after(1001.0) is None
    assert gang.after(60.0) == "process 0 does not answer, its last beat is 61 s old (--beat-timeout=60)"


def test_an_unavailable_file_system_is_not_silence(gang):
    real = gang.watch._clock

    def slow() -> float:
        gang.now += 100.0
        return real()

    gang.watch._clock = slow
    gang.beat(0)
    gang.beat(1)
    gang.watch.read_beats()
    assert gang.watch.hang(set()) is None


@pytest.mark.parametrize("last", [{"phase": "finish"}, {"phase": None}, {"failure": "full disk", "code": 1}], ids=str)
def test_a_process_at_its_end_may_be_silent(gang, last):
    """It waits for the end of the others, or has recorded why it ends."""
    gang.beat(1, **last)
    assert gang.after(1.0) is None
    gang.beat(0)
    assert gang.after(100.0) is None


def test_beats_without_movement(tmp_path):
    gang = Clocked(tmp_path, progress=100.0)
    for step in (6, 7, 8, 8, 8):
        for process in (0, 1):
            gang.beat(process, step=step)
        assert gang.after(50.0) is None
    gang.beat(0, step=8, phase="save")  # One process that moves is enough.
    gang.beat(1, step=8)
    assert gang.after(50.0) is None
    for process, phase in enumerate(("save", "step")):
        gang.beat(process, step=8, phase=phase)
    assert gang.after(101.0) == "no process has moved for 101 s (--watchdog-timeout=100)"


def test_each_stage_of_a_start_counts_as_movement(tmp_path):
    gang = Clocked(tmp_path, progress=100.0)
    for stage in Stage:
        gang.beat(0, step=0, phase="setup", phase_step=None, stage=stage)
        assert gang.after(60.0) is None


def test_limits_may_be_off(tmp_path):
    gang = Clocked(tmp_path, beat=None, progress=None)
    gang.beat(0)
    assert gang.after(0.0) is None and gang.after(1e6) is None


def test_a_program_without_beats_never_hangs(tmp_path):
    assert Clocked(tmp_path).after(1e6) is None


def test_a_stopped_process_of_this_machine(gang):
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(sleeping.pid, signal.SIGSTOP)
        assert wait_until(lambda: process_state(sleeping.pid) == "T")
        gang.beat(1, host="here", pid=sleeping.pid)
        assert gang.after(1.0) is None
        gang.beat(0)
        assert gang.after(11.0) == "process 1 is stopped (state T), its last beat is 11 s old"
    finally:
        sleeping.kill()
        sleeping.wait()
    assert process_state(sleeping.pid) is None


def test_a_signal_with_a_handler():
    former = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert handles(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert not handles(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, former)


def test_checkpoints_count_from_the_beats_and_from_the_run_folder(gang, tmp_path):
    run = tmp_path / "run"
    for name in ("00000005", "00000010.saving", "00000015.damaged", "notes"):
        (run / "checkpoints" / name).mkdir(parents=True)
    gang.beat(0, run_dir=str(run))
    gang.after(1.0)
    assert (gang.watch.run_dir, gang.watch.baseline, gang.watch.committed()) == (run, 5, 5)
    (run / "checkpoints" / "00000010").mkdir()
    assert (gang.watch.baseline, gang.watch.committed()) == (5, 10)
    gang.beat(1, run_dir=str(run), committed=12)  # on a local disk
    gang.after(1.0)
    assert gang.watch.committed() == 12


def test_steps_of_the_run_folder_of_a_former_attempt(gang, tmp_path):
    (tmp_path / "run" / "checkpoints" / "00000006").mkdir(parents=True)
    assert (gang.watch.committed(), gang.watch.committed(tmp_path / "run")) == (None, 6)


def test_stacks_of_the_present_hang(gang, tmp_path):
    run = tmp_path / "run"
    (run / "hangs").mkdir(parents=True)
    stale, new, from_beat = (run / "hangs" / f"process_{n}.txt" for n in range(3))
    for path in (stale, new, from_beat):
        path.touch()
    os.utime(stale, (1000, 1000))
    gang.beat(0, run_dir=str(run))
    gang.beat(1, run_dir=str(run), stacks=str(from_beat))
    gang.after(1.0)
    assert gang.watch.stacks_since(2000) == [new, from_beat]


def test_incomplete_beats_and_other_files_are_ignored(gang, tmp_path):
    (tmp_path / "process_1.json").write_text('{"process": 1,')
    (tmp_path / "process_x.json").write_text("{}")
    (tmp_path / "process_7.123.writing").write_text("{}")
    assert gang.after(1.0) is None and set(gang.watch.sightings) == {0, 1}
