"""A process whose C code never releases the interpreter's lock ends nevertheless."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megajax.faults.backstop import Backstop

PROGRAM = """
import ctypes, os, signal, sys, time
from megajax.faults import backstop
backstop.GRACE_SECONDS = 1
with backstop.Backstop() as held:
    held.reset(1.0)
    if sys.argv[1] == "locked":
        ctypes.PyDLL(None).sleep(60)
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(12):
            held.reset(60.0)
            time.sleep(0.25)
print("went on")
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="timers of Linux")


def start(how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_that_holds_the_lock_ends_with_its_stacks():
    process = start("locked")
    out, err = process.communicate(timeout=50)
    assert process.returncode == -signal.SIGALRM and not out
    assert 'File "<string>", line 8' in err


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
def test_a_limit_above_any_timer_sets_the_longest(seconds):
    with Backstop() as backstop:
        backstop.reset(seconds)


@pytest.mark.slow
def test_a_stopped_process_continues():
    process = start("stopped")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(4.0)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=50)[0] == "went on\n" and process.returncode == 0
