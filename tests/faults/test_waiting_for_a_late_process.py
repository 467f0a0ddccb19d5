"""A hanging process waits for a late one until that one has reached its own limit."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megajax.faults import pulse as hang
from megajax.faults.activity import Activity
from megajax.faults.peer_status import Verdict
from megajax.faults.pulse import Pulse
from megajax.faults.watchdog import Watchdog, WatchdogConfig

LATE = Verdict(1, "process 1 has been saving step 6 for 1 s", patience=6.0)
SAID = Verdict(1, "process 1 failed: it hangs", reported=True)


class Waiting(Pulse):
    """A process that is in step 7 beyond its limit, while process 1 is saving. Its clock moves by what it waits."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict]):
        self.now = 1000.0
        super().__init__(run_dir, Activity(lambda: self.now))
        cfg = WatchdogConfig(step=1.0, compile=1.0)
        self.watchdog = Watchdog(cfg, self.activity, clock=lambda: self.now, compiles=lambda _: False)
        self.held: list[float] = []
        self.ended: list[tuple[float, Verdict]] = []
        monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))
        monkeypatch.setattr(self.peers, "verdict", lambda **_: verdicts.pop(0))
        monkeypatch.setattr(self._backstop, "reset", self.held.append)
        monkeypatch.setattr(self._stopped, "wait", self.passes)
        monkeypatch.setattr(self, "_end", lambda hang, verdict: self.ended.append((hang.seconds, verdict)))

    def passes(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Waiting]:
    return lambda *verdicts: Waiting(tmp_path, monkeypatch, list(verdicts))


def hangs(pulse: Waiting) -> None:
    with pulse.activity.phase("step", 7):
        pulse.passes(2.0)
        assert pulse.watchdog is not None
        hang = pulse.watchdog.check(1.0)
        assert hang is not None
        pulse._handle_hang(pulse.watchdog, hang)


def test_meanwhile_requests_are_handled_and_the_final_message_is_current(waiting: Callable[..., Waiting]) -> None:
    pulse = waiting(LATE, SAID)
    checks: list[None] = []
    pulse.ticks.append(lambda: checks.append(None))
    hangs(pulse)
    assert len(checks) >= 5, "a request to stop would be seen"
    assert len(pulse.held) >= 5 and min(pulse.held) >= 60, "else SIGALRM ends the process, which runs"
    assert pulse.ended == [(8.0, SAID)]


def test_nobody_waits_for_a_process_that_has_reached_its_limit(waiting: Callable[..., Waiting]) -> None:
    stuck = Verdict(None, "all processes are equally far")
    pulse = waiting(stuck)
    hangs(pulse)
    assert pulse.ended == [(2.0, stuck)]
