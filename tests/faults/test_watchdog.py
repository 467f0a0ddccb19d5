"""The watchdog with a manual clock: what counts as a hang."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from waiting import wait_until

from megajax.config.compose import problems_of
from megajax.faults.activity import Activity, Stage, stacks
from megajax.faults.config import ResilienceConfig
from megajax.faults.watchdog import Backstop, Hang, Watchdog, WatchdogConfig, is_compiling, waits_for_peers
from megajax.processes.peers import Peers


class Hands:
    """A clock, and a watchdog that checks it every second."""

    def __init__(self, compiles: bool = False, **limits: float):
        self.now = 1000.0
        self.activity = Activity(lambda: self.now)
        cfg = WatchdogConfig(**{"step": 20.0, "data_wait": 20.0, "compile": 100.0, "evaluation": 30.0} | limits)
        self.watchdog = Watchdog(cfg, self.activity, clock=lambda: self.now, compiles=lambda thread: compiles)

    def wait(self, seconds: float) -> Hang | None:
        """The first hang found."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            if (hang := self.watchdog.check(1.0)) is not None:
                return hang
        return None

    def asleep(self, seconds: float) -> None:
        """The process is stopped."""
        self.now += seconds

    def lasts(self, phase: str, seconds: float, steps: int = 1) -> None:
        """A phase that ends, step after step."""
        for step in range(steps):
            with self.activity.phase(phase, step + 1):
                assert self.wait(seconds) is None


def test_a_phase_beyond_its_limit_is_a_hang():
    hands = Hands()
    hands.lasts("step", 1.0, steps=3)
    with hands.activity.phase("step", 7):
        hang = hands.wait(100)
    assert hang == Hang("step", 7, 21.0, 20.0, "step")
    assert hang.sentence() == "in step 7 for 21 s, limit 20 s (resilience.watchdog.step)"


def test_between_phases_nothing_hangs():
    hands = Hands()
    hands.lasts("step", 1.0, steps=3)
    assert hands.wait(1000) is None


LIMITS = {
    "long steps": ({"factor": 3.0}, ("step", 15.0, 5), "step", 45.0, "step"),
    "a compilation within a step": ({"compiles": True}, ("step", 1.0, 3), "compile", 100.0, "compile"),
    "a phase of another name": ({"other": 50.0}, ("hash", 1.0, 1), "hash", 50.0, "other"),
}
"""Settings, what came before, and the phase that hangs, with its limit and where that is set."""


@pytest.mark.parametrize("case", LIMITS)
def test_the_limit_of_a_phase(case):
    settings, before, phase, limit, setting = LIMITS[case]
    hands = Hands(**settings)
    hands.lasts(*before)
    with hands.activity.phase(before[0], 7):
        assert hands.wait(limit) is None
        hang = hands.wait(5.0)
    assert hang is not None and (hang.phase, hang.limit, hang.setting) == (phase, limit, setting)


def test_a_step_is_its_dispatch_and_its_fetch():
    """They do not count as two steps, one of them short, which would halve the median."""
    hands = Hands(factor=3.0)
    for step in range(1, 20):
        with hands.activity.phase("step", step + 1):
            assert hands.wait(0.0) is None
        with hands.activity.phase("step", step):
            assert hands.wait(15.0) is None
    assert hands.activity.median_seconds("step") == 15.0


def test_the_first_of_each_phase_may_last_as_long_as_a_compilation_elsewhere():
    hands = Hands()
    with hands.activity.phase("data_wait", 1):
        assert hands.wait(99.0) is None
    hands.lasts("step", 1.0)
    with hands.activity.phase("step", 2, first=True):
        assert hands.wait(99.0) is None
        hang = hands.wait(5.0)
    assert hang is not None and hang.setting == "compile"


def test_parts_of_an_evaluation_are_progress():
    hands = Hands()
    hands.lasts("evaluation", 1.0)
    with hands.activity.phase("evaluation", 7):
        for _ in range(20):
            assert hands.wait(25.0) is None
            hands.activity.progress()
        hang = hands.wait(1000.0)
    assert hang is not None and 250 <= hang.limit == 10 * hands.activity.median_seconds("evaluation")


@pytest.mark.parametrize("seconds", [6.5, 60.0, 1e5])
def test_time_in_which_the_process_was_stopped_does_not_count(seconds):
    hands = Hands()
    hands.lasts("step", 1.0, steps=3)
    with hands.activity.phase("step", 7):
        for _ in range(3):
            assert hands.wait(6.0) is None
            hands.asleep(seconds)
        assert hands.wait(1.0) is None
        hang = hands.wait(5.0)
    assert hang is not None and hang.seconds <= 22.0
    assert hands.watchdog.check(1.0) is None and not hands.watchdog._asleep


def test_a_phase_after_a_stop_has_exactly_its_limit():
    hands = Hands()
    hands.lasts("step", 1.0, steps=3)
    hands.asleep(50.0)
    assert hands.wait(1.0) is None
    with hands.activity.phase("step", 7):
        assert hands.wait(20.0) is None
        assert hands.wait(1.0) is not None


def test_stages_of_the_start_each_have_its_limit_and_not_that_of_a_compilation():
    hands = Hands(start=10.0, setup=15.0)
    with hands.activity.phase("start"):
        hands.activity.stage(Stage.CONNECT, allowance=30.0)
        assert hands.wait(39.0) is None
        hands.activity.stage(Stage.DEVICES)
        assert hands.wait(9.0) is None
        hands.activity.stage(Stage.FIRST_COLLECTIVE)
        hang = hands.wait(100.0)
    assert hang == Hang("start", None, 11.0, 10.0, "start", Stage.FIRST_COLLECTIVE)
    sentence = "connecting the devices of all processes for 11 s, limit 10 s (resilience.watchdog.start)"
    assert hang.sentence() == sentence
    with hands.activity.phase("setup"):
        hands.activity.stage(Stage.DATA)
        hang = hands.wait(100.0)
    assert hang is not None and (hang.limit, hang.setting) == (15.0, "setup")


def test_an_error_knows_the_stage_that_it_left():
    activity = Activity()
    with pytest.raises(ValueError, match="odd") as caught, activity.phase("setup"):
        activity.stage(Stage.DATA)
        raise ValueError("odd")
    assert caught.value.doing.stage is Stage.DATA  # ty: ignore[unresolved-attribute]


def test_processes_that_wait_for_others_are_known_by_their_stack():
    """One in its own part of joint work, which is called from the same file, does not wait."""
    barrier, disk = queue.SimpleQueue(), queue.SimpleQueue()
    peers = Peers("test")
    peers.count, peers._client = 2, SimpleNamespace(wait_at_barrier=barrier.get, key_value_try_get=lambda key: None)

    def write() -> None:
        disk.get()

    waiting, writing = (
        threading.Thread(target=work, args=arguments, daemon=True)
        for work, arguments in ((peers.agree, ()), (peers.on_all, (write, str)))
    )
    for thread in (waiting, writing):
        thread.start()
    assert wait_until(lambda: waits_for_peers(waiting.ident or 0))
    assert not waits_for_peers(writing.ident or 0) and not waits_for_peers(threading.get_ident())
    barrier.put(None)
    waiting.join()
    assert not waits_for_peers(waiting.ident or 0)


def test_other_threads_are_watched_too():
    hands = Hands(background_save=40.0)
    hands.lasts("background_save", 1.0)
    started, over = threading.Event(), threading.Event()

    def save() -> None:
        with hands.activity.phase("background_save", 5):
            started.set()
            over.wait()

    thread = threading.Thread(target=save)
    thread.start()
    started.wait()
    hang = hands.wait(100.0)
    over.set()
    thread.join()
    assert hang is not None and (hang.phase, hang.step, hang.limit) == ("background_save", 5, 40.0)


def test_healthy_runs_have_no_alarm_by_default():
    """A compilation of half an hour, a first step of an hour, saves and evaluations of an hour, in steps of 30 s."""
    hands = Hands()
    hands.watchdog = Watchdog(WatchdogConfig(), hands.activity, clock=lambda: hands.now, compiles=lambda _: False)
    for phase, minutes in (("setup", 90), ("data_wait", 10), ("compile", 30)):
        with hands.activity.phase(phase, 1):
            assert hands.wait(60.0 * minutes) is None
    with hands.activity.phase("step", 1, first=True):
        assert hands.wait(3600.0) is None
    hands.lasts("step", 30.0, steps=5)
    for phase, minutes in (("step", 5), ("data_wait", 9), ("save", 60), ("background_save", 90), ("finish", 60)):
        with hands.activity.phase(phase, 7):
            assert hands.wait(60.0 * minutes) is None, phase


def test_impossible_settings():
    assert not problems_of(ResilienceConfig(watchdog=None))
    assert {each.setting for each in problems_of(WatchdogConfig(step=0.0, factor=0.5))} == {"step", "factor"}
    # Timers can't wait without a limit: the thread that checks for hangs would end with an error.
    assert {each.setting for each in problems_of(WatchdogConfig(step=inf, factor=inf))} == {"step", "factor"}
    assert [each.setting for each in problems_of(ResilienceConfig(stop_grace=inf))] == ["stop_grace"]


def test_a_thread_that_compiles_is_known_by_its_stack():
    texts_seen = []
    main_thread = threading.get_ident()

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        texts_seen.append(is_compiling(main_thread))
        return x + 1

    assert not is_compiling(main_thread)
    traced(jnp.zeros(3))
    assert texts_seen == [True]
    assert not is_compiling(0)


def test_stacks_name_threads_and_phases(tmp_path: Path):
    activity = Activity()
    with activity.phase("data_wait", 7):
        thread = threading.Thread(target=lambda: texts.append(stacks(activity)), name="other")
        texts: list[str] = []
        thread.start()
        thread.join()
    assert re.match(r"thread MainThread .*, waiting for the rows of step 7 for \d+\.\d s", texts[0])
    assert "test_stacks_name_threads_and_phases" in texts[0]


BACKSTOP = """
import ctypes, os, signal, sys, time
from megajax.faults import watchdog
watchdog.GRACE_SECONDS = {"locked": 1, "stopped": 5}[sys.argv[1]]
with watchdog.Backstop() as held:
    held.reset(1.0)
    if sys.argv[1] == "locked":
        ctypes.PyDLL(None).sleep(600)
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(24):
            held.reset(60.0)
            time.sleep(0.25)
print("went on")
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="timers of Linux")


def start(how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BACKSTOP, how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@linux
def test_a_process_that_holds_the_lock_ends_with_its_stacks():
    process = start("locked")
    out, err = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGALRM and not out
    assert 'File "<string>", line 8' in err


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
def test_a_limit_above_any_timer_sets_the_longest(seconds):
    with Backstop() as backstop:
        backstop.reset(seconds)


@linux
@pytest.mark.slow
def test_a_stopped_process_continues():
    process = start("stopped")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(2.0)  # For longer than the timer.
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=100)[0] == "went on\n" and process.returncode == 0
