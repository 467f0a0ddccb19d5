"""The first failure of a gang is named, not the first victim: exit codes, last beats and positions decide."""

import signal

import pytest

from megajax.faults.beats import Beat
from megajax.launcher.first_failure import MemberState, first_cause, scheduler_cause

GLOO = "JaxRuntimeError: Gloo all_reduce failed: Connection closed by peer"

BEHIND = "holds up the others: it has been waiting for the rows of step 7 "


def beat(process: int, phase: str | None = "step", step: int | None = 7, seconds: float = 30.0, **more) -> Beat:
    numbers = {"step": 6, "phase": phase, "phase_step": step, "phase_seconds": seconds}
    return Beat(process=process, pid=1, host=f"host{process}", time=0.0, **(numbers | more))


def alive(process: int, *, silent: float = 0.5, state: str = "S", **fields) -> MemberState:
    return MemberState(process=process, beat=beat(process, **fields), silent=silent, state=state)


def ended(process: int, code: int, order: float, failure: str | None = None, **fields) -> MemberState:
    silent = fields.pop("silent", 0.5)
    last = beat(process, failure=failure, code=None if failure is None else code, **fields)
    return MemberState(process=process, code=code, order=order, beat=last, silent=silent)


CASES = {
    "a killed process, whose peer noticed first": (
        [ended(0, 1, 1.0, GLOO), ended(1, -signal.SIGKILL, 1.01)], 1, 1, "killed by SIGKILL"),
    "an abort of jax follows from a kill": (
        [ended(0, -signal.SIGABRT, 1.0), ended(1, -signal.SIGKILL, 1.02)], 1, 1, "killed by SIGKILL"),
    "an error of its own and one of a peer lost": (
        [ended(0, 1, 1.0, GLOO), ended(1, 1, 1.5, "RuntimeError: raised on purpose")], 1, 1, "exited with code 1"),
    "an invalid checkpoint beside a crash": (
        [ended(0, 1, 1.0, "OSError: disk"), ended(1, 2, 1.5, "no checkpoint")], 1, 2, "exited with code 2"),
    "a stop that was asked for is no cause": (
        [ended(0, 143, 1.0, "SIGTERM"), ended(1, 1, 1.5, "OSError: disk")], 1, 1, "exited with code 1"),
    "of two errors the first": (
        [ended(0, 1, 2.0, "ValueError: b"), ended(1, 1, 1.0, "ValueError: a")], 1, 1, "exited with code 1"),
    "a stopped process makes others' watchdogs fire": (
        [ended(0, 124, 1.0, "hang in step 7"), alive(1, state="T", silent=21.0)], 1, 124,
        "is stopped (state T), its last beat is 21 s old"),
    "a process that does not run": (
        [ended(0, 124, 1.0, "hang in step 7"), alive(1, state="D", silent=40.0), alive(2)], 1, 124,
        "does not answer, its last beat is 40 s old (in step 7)"),
    "a process that still waits for rows": (
        [ended(0, 124, 1.0, "hang in step 7"), alive(1, phase="data_wait", seconds=24.0), alive(2)], 1, 124,
        BEHIND + "for 24 s, process 0 has been in step 7 for 30 s"),
    "a disk that does not answer in the setup": (
        [ended(0, 124, 1.0, "hang", phase="setup", step=None, stage="opening the checkpoints", waits=True),
         alive(1, phase="setup", step=None, stage="opening the checkpoints")], 1, 124,
        "holds up the others: it has been opening the checkpoints for 30 s, "
        "process 0 has been opening the checkpoints for 30 s"),
    "one that is late at the start": (
        [ended(0, 124, 1.0, "hang", phase="start", step=None, stage="connecting the devices of all processes"),
         alive(1, phase="start", step=None, stage="finding the devices")], 1, 124,
        "holds up the others: it has been finding the devices for 30 s, "
        "process 0 has been connecting the devices of all processes for 30 s"),
    "a background save that others wait for": (
        [ended(0, 124, 1.0, "hang; process 1 saves", phase="save", cause=1), alive(1, phase="save")], 1, 124,
        "holds up the others"),
    "one that is a step behind": (
        [ended(0, 124, 1.0, "hang in step 8", step=8), alive(1, step=7), alive(2, step=8)], 1, 124,
        "holds up the others: it has been in step 7 for 30 s, process 0 has been in step 8 for 30 s"),
    "one that saves while the others train on": (
        [ended(0, 124, 1.0, "hang in step 7"), alive(1, phase="save", step=6)], 1, 124,
        "holds up the others: it has been saving step 6 for 30 s, process 0 has been in step 7 for 30 s"),
    "one that compiles": (
        [ended(0, 124, 1.0, "hang in step 1", step=1), alive(1, phase="compile", step=1)], 1, 124,
        "holds up the others: it has been compiling for step 1 for 30 s, process 0 has been in step 1 for 30 s"),
    "all watchdogs fired": (
        [ended(0, 124, 1.0, "hang in step 7"), ended(1, 124, 1.2, "hang in data_wait of step 7", phase="data_wait")],
        1, 124, BEHIND + "for 30 s, process 0 has been in step 7 for 30 s"),
    "nobody is behind: the first watchdog": (
        [ended(1, 124, 1.0, "hang in step 7"), ended(0, 124, 1.2, "hang in step 7"), alive(2)], 1, 124,
        "exited with code 124"),
    "a victim of a hang that lost its peer": (
        [ended(1, 124, 1.0, "hang in step 7"), ended(0, 1, 1.2, GLOO)], 1, 124, "exited with code 124"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_cause(case):
    states, process, code, text = CASES[case]
    for order in (states, states[::-1]):
        cause = first_cause(order)
        assert (cause.process, cause.code, cause.text) == (process, code, text)


def test_a_hang_that_only_the_launcher_detects():
    """No watchdog of a process has fired: all are alive."""
    cause = first_cause([alive(0), alive(1, phase="data_wait"), alive(2)], hang="no process has moved for 60 s")
    assert (cause.process, cause.code, cause.unrecorded) == (1, 124, True)
    nobody = first_cause([alive(0), alive(1)], hang="no process has moved for 60 s")
    assert nobody.process is None and nobody.code == 124 and nobody.text == "no process has moved for 60 s"


def test_all_beats_are_old():
    """A file system that was unavailable for all is no process's fault: positions decide."""
    states = [alive(0, silent=50.0), alive(1, silent=50.5, phase="data_wait")]
    assert first_cause(states, hang="…").text.startswith("holds up the others")


SCHEDULER = {
    "code 17 in a beat, victims killed": ([ended(0, 17, 2.0, "nan"), alive(1)], 137, 0, 17),
    "a config error before training": ([ended(0, 2, 2.0, "no such setting"), alive(1)], 143, 0, 2),
    "a code of the command, and no beats": ([], 2, None, 2),
    "killed, and no beats": ([], 137, None, 1),
    "a lost node: its peers say so": ([ended(0, 1, 2.0, GLOO), alive(1), ended(2, 1, 2.1, GLOO)], 137, 1, 1),
    "all say that they lost one": ([ended(0, 1, 2.0, GLOO), ended(1, 1, 1.9, GLOO)], 1, 1, 1),
    "nobody said anything: out of memory": ([alive(0)], 137, 0, 1),
    "a hang": ([ended(0, 124, 2.0, "hang"), alive(1, phase="data_wait")], 137, 1, 124),
}


@pytest.mark.parametrize("case", SCHEDULER)
def test_the_cause_of_the_highest_code_that_srun_returns(case):
    states, code, process, expected = SCHEDULER[case]
    cause = scheduler_cause(states, code)
    assert (cause.process, cause.code) == (process, expected)


def test_nobody_is_blamed_if_all_were_killed_at_once():
    states = [MemberState(process=index, beat=beat(index), order=10.0 + index) for index in (0, 1)]
    cause = scheduler_cause(states, 137)
    assert cause.process is None and cause.text == "the command exited with code 137, and no process reported a reason"


def test_the_lost_process_is_the_one_whose_beats_ended_first():
    early = MemberState(process=3, beat=beat(3), order=10.0)
    third = MemberState(process=2, beat=beat(2), order=12.0)
    cause = scheduler_cause([third, early, ended(0, 1, 13.0, GLOO)], 137)
    assert cause.process == 3 and cause.text.startswith("was lost on host3") and cause.unrecorded
