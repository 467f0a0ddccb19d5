"""Processes of a gang that hang, freeze or fail: the message and exit code of each."""

import signal
from pathlib import Path

import gangs
import pytest
from run_folder import events

from megajax.faults.beats import BEATS, Beat

SHORT = ("--resilience.watchdog.step=8", "--resilience.watchdog.data_wait=8", "--logging.every=1")


def beat(folder: Path, process: int) -> Beat:
    """Its last beat; one without a step if it has written none."""
    return Beat.read(folder, process) or Beat(process=process, pid=0, host="", time=0.0)


def by_hand(start, run_dir: Path, *settings: str, beats: Path | None = None) -> list[gangs.Started]:
    """Two processes without a launcher. beats: folder for their beats."""
    port = gangs.free_port()
    common = (*gangs.TRAIN, *gangs.TINY, *gangs.LONG, *SHORT, f"--run_dir={run_dir}", *settings)
    meeting = (f"--coordinator=127.0.0.1:{port}", "--num-processes=2")
    environment = {} if beats is None else {BEATS: str(beats)}
    return [start(*common, *meeting, f"--process-id={n}", name=f"process_{n}", **environment) for n in (0, 1)]


@pytest.mark.slow
def test_stacks_of_every_process(start, tmp_path):
    """SIGUSR2 asks for them; training continues, and beats follow."""
    beats, run_dir = tmp_path / "beats", tmp_path / "run"
    beats.mkdir()
    processes = by_hand(start, run_dir, beats=beats)
    processes[0].until(lambda: all(beat(beats, index).step > 2 for index in (0, 1)))
    assert [beat(beats, index).pid for index in (0, 1)] == [each.process.pid for each in processes]
    for each in processes:
        each.process.send_signal(signal.SIGUSR2)
    paths = [run_dir / "hangs" / f"process_{index}.txt" for index in (0, 1)]
    processes[0].until(lambda: all(path.exists() and "run_attempt" in path.read_text() for path in paths))
    step = beat(beats, 0).step
    processes[0].until(lambda: beat(beats, 0).step > step)
    for each in processes:
        each.process.send_signal(signal.SIGTERM)
    assert [each.wait() for each in processes] == [0, 0], processes[0].text
    assert all('  File "' in each.text and "run_attempt" in each.text for each in processes)
    assert beat(beats, 1).failure is None


@pytest.mark.slow
def test_a_stuck_process_ends_with_124_and_all_leave_stacks(start, tmp_path):
    """Rows never arrive at process 1; process 0 waits for it in the step."""
    run_dir = tmp_path / "run"
    processes = by_hand(start, run_dir, "--resilience.inject=stuck:step=7:process=1")
    codes = [process.wait() for process in processes]
    assert codes[1] == 124 and codes[0] in (1, 124), processes[0].text
    assert "process 1 hangs, waiting for the rows of step 7 for " in processes[1].text
    stuck, waiting = ((run_dir / "hangs" / f"process_{index}.txt").read_text() for index in (1, 0))
    assert "drill.inject()" in stuck and "device_get" in waiting
    (hang,) = (event for event in events(run_dir, "hang") if event["process"] == 1)
    assert (hang["phase"], hang["step"], hang["limit"], hang["exit_code"]) == ("data_wait", 7, 8.0, 124)
    # The other one names the process it waited for, whichever of the two was first.
    assert "process 1 failed: process 1 hangs" in processes[0].text or "process 1 has not entered" in processes[0].text


@pytest.mark.slow
def test_a_frozen_process_is_named(start, tmp_path):
    """SIGSTOP of process 1 makes process 0 wait, which is not blamed."""
    run_dir = tmp_path / "run"
    processes = by_hand(start, run_dir, "--resilience.inject=frozen:step=7:process=1")
    assert processes[0].wait() == 124, processes[0].text
    assert gangs.alive(processes[1].process.pid)
    assert "process 1 no longer runs" in processes[0].text
    (hang,) = events(run_dir, "hang")
    assert (hang["process"], hang["cause_process"], hang["phase"]) == (0, 1, "step")
    assert Path(hang["stacks"]).exists()


@pytest.mark.slow
def test_a_crash_is_reported_by_the_others(start, tmp_path):
    """The traceback is that of process 1, and process 0 names it as the cause."""
    run_dir, beats = tmp_path / "run", tmp_path / "beats"
    beats.mkdir()
    processes = by_hand(start, run_dir, "--resilience.inject=crash:step=7:process=1", beats=beats)
    assert [each.wait() for each in processes] == [1, 1], processes[0].text
    assert "Traceback" in processes[1].text and "Traceback" not in processes[0].text
    assert "lost the connection to process 1: process 1 failed: DrillFault" in processes[0].text
    first, other = beat(beats, 1), beat(beats, 0)
    assert first.failure and first.failure.startswith("DrillFault") and first.code == 1
    assert other.failure and other.code == 1 and not events(run_dir, "lost")
