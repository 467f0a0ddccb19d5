"""Injected faults of processes: which process has them, before which step, and in which attempt."""

import os
import signal
import subprocess
import sys
from itertools import count

import pytest

from megajax.faults import drills
from megajax.faults.beats import ATTEMPT
from megajax.faults.config import ResilienceConfig
from megajax.faults.drills import DrillFault, with_process_faults


def crashed_at(*inject: str, after: int = 0) -> int | None:
    """The step before which batches of steps `after` + 1 to 10 crash."""
    faults = ResilienceConfig(inject=inject).process_drills()
    batches = with_process_faults(count(after + 1), faults, after)
    for step in range(after + 1, 11):
        try:
            assert next(batches) == step
        except DrillFault:
            return step
    return None


def test_a_fault_comes_before_its_step(monkeypatch):
    monkeypatch.delenv(ATTEMPT, raising=False)
    assert crashed_at("crash:step=7") == 7
    assert crashed_at("crash:step=7", after=4) == 7
    assert crashed_at("crash:step=7", after=7) is None


def test_only_the_named_process_has_it(monkeypatch):
    assert crashed_at("crash:step=7:process=1", "crash:step=8:process=0") == 8


def test_a_restart_does_not_repeat_it(monkeypatch):
    monkeypatch.setenv(ATTEMPT, "2")
    assert crashed_at("crash:step=7") is None
    assert crashed_at("crash:step=7:always") == 7


def test_numeric_faults_are_not_repeated_by_restarts(monkeypatch):
    cfg = ResilienceConfig(inject=("nan:step=3", "inf:step=4:always", "kill:step=5"))
    assert [drill.kind for drill in cfg.drills()] == ["nan", "inf"]
    assert len(drills.for_this_attempt(cfg.drills())) == 2
    monkeypatch.setenv(ATTEMPT, "2")
    assert [drill.kind for drill in drills.for_this_attempt(cfg.drills())] == ["inf"]


def test_slow_from_a_given_step(monkeypatch):
    slept = []
    monkeypatch.setattr(drills.time, "sleep", slept.append)
    assert crashed_at("slow:step=8") is None
    assert slept == [drills.SLOW_SECONDS] * 3


def test_invalid_drills_are_refused():
    assert not ResilienceConfig(inject=("stuck:step=7:process=1:always",)).problems()
    assert drills.Drill.parse("bitflip:step=7:process=3") == drills.Drill("bitflip", 7, False, 3)
    for text in ("stuck", "stuck:process=1", "melt:step=1", "nan:step=1:process=0", "kill:step=0"):
        assert ResilienceConfig(inject=(text,)).problems(), text


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("frozen", signal.SIGSTOP)])
def test_signals_to_itself(kind, number):
    program = f"from megajax.faults.drills import Drill; Drill('{kind}', 1, True).inject()"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        ended = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
        assert ended == number
    finally:
        process.kill()
