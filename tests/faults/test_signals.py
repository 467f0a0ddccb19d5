"""Stop requests, by real signals to real processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megajax.faults.signals import Signals, StopRequest, agree

POLLING = """
import sys, time
from megajax.faults import signals as module
from megajax.faults.signals import Signals
module._DUPLICATE_SECONDS = float(sys.argv[1])
with Signals() as signals:
    print("ready", flush=True)
    while signals.request is None:
        time.sleep(0.01)
    print(signals.request.signal, flush=True)
    sys.stdin.readline()
print("saved", flush=True)
"""

# A computation without end: the main thread is inside XLA and runs no Python handler.
STUCK = """
import jax, os
from megajax.faults.signals import Signals
forever = jax.jit(lambda x: jax.lax.while_loop(lambda n: n >= 0, lambda n: (n + 1) % 1000, x))
with Signals(before_exit=lambda why, code: os.write(1, b"terminal in order\\n")):
    print("ready", flush=True)
    forever(0).block_until_ready()
"""

UNPOLLED = STUCK.replace("with Signals(", "with Signals(polled=False, ")

FORKING = """
import os, signal, time, warnings
warnings.simplefilter("ignore")
from megajax.faults.signals import Signals
with Signals() as signals:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"ready")
        time.sleep(600)
        os._exit(0)
    os.read(reading, 5)
    os.kill(child, signal.SIGTERM)
    print("child", os.waitpid(child, 0)[1])
    time.sleep(0.1)
    print("parent", signals.request)
"""

TWO_PROCESSES = """
import sys, time
import jax
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from megajax.faults.signals import Signals, agree
with Signals() as signals:
    print("ready", agree(False), flush=True)
    for step in range(10_000):
        if agree(signals.request is not None):
            break
    print("stopped at", step, signals.request.signal if signals.request else None, flush=True)
jax.distributed.shutdown()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """start(program, *arguments): a process that ends with the test at the latest."""
    with contextlib.ExitStack() as stack:

        def begin(program: str, *arguments: str) -> subprocess.Popen:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", program, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        yield begin


def wait_for(process: subprocess.Popen, line: str) -> None:
    assert process.stdout is not None
    while (read := process.stdout.readline()) and read.strip() != line:
        pass
    assert read, process.communicate()[1]


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request_and_the_exit_code_is_0(start, which):
    process = start(POLLING, "100")
    wait_for(process, "ready")
    process.send_signal(which)
    wait_for(process, which.name)
    # The same request, passed on by a launcher as well, is not a second one.
    process.send_signal(which)
    out, err = process.communicate("\n", timeout=100)
    assert (process.returncode, out) == (0, "saved\n"), err
    assert err.startswith(f"megajax: {which.name} received: stopping after this step")
    assert ("press Ctrl-C again" in err) == (which is signal.SIGINT)


def test_sigusr1_before_sigterm_does_not_count_as_a_first_sigterm(start):
    process = start(POLLING, "0")
    wait_for(process, "ready")
    process.send_signal(signal.SIGUSR1)
    wait_for(process, "SIGUSR1")
    process.send_signal(signal.SIGTERM)
    assert process.communicate("\n", timeout=100)[0] == "saved\n"
    assert process.returncode == 0


def test_a_second_signal_ends_a_process_inside_xla(start):
    process = start(STUCK)
    wait_for(process, "ready")
    assert process.stderr is not None
    time.sleep(1.0)  # Until it is inside the computation.
    process.send_signal(signal.SIGTERM)
    assert "send it again to exit at once" in process.stderr.readline()
    time.sleep(0.4)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert out == "terminal in order\n"
    assert "second SIGINT: exiting at once" in err


def test_the_first_signal_ends_a_process_without_anything_to_save(start):
    """Ctrl-C too: tests/job/test_interrupted_start.py."""
    process = start(UNPOLLED)
    wait_for(process, "ready")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (143, "terminal in order\n")
    assert err.endswith("megajax: SIGTERM: exiting at once, with nothing to save yet\n")


def test_a_forked_worker_has_its_own_signals(start):
    process = start(FORKING)
    out, err = process.communicate(timeout=100)
    assert out == f"child {int(signal.SIGTERM)}\nparent None\n", err


@pytest.mark.smoke
def test_previous_handlers_are_restored():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    heard: list[str] = []
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Signals(announce=heard.append) as signals:
            assert signals.request is None
            assert [signal.getsignal(number) for number in numbers] != before
            os.kill(os.getpid(), signal.SIGUSR1)
            assert isinstance(signals.request, StopRequest)
            assert signals.request.signal == "SIGUSR1"
            assert abs(signals.request.time - time.time()) < 60
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert heard == ["SIGUSR1 received: stopping after this step"] * 3


@pytest.mark.smoke
def test_one_process_agrees_with_itself():
    assert agree(True) is True
    assert agree(False) is False


def test_two_processes_stop_at_the_same_step_after_one_signal(start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [start(TWO_PROCESSES, address, str(rank)) for rank in range(2)]
    for process in processes:
        wait_for(process, "ready False")
    processes[1].send_signal(signal.SIGTERM)
    outs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    # The collectives' library writes lines of its own.
    stops = [next(line.split() for line in out.splitlines() if line.startswith("stopped at")) for out, _ in outs]
    assert stops[0][:3] == stops[1][:3] != []
    assert [word[3] for word in stops] == ["None", "SIGTERM"]


DEAF = """
import os, signal

class Deaf:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def config():
    Deaf()
    print("went on")
"""


def test_ctrl_c_before_the_handlers_are_installed_is_not_lost(tmp_path: Path) -> None:
    # In __del__ and in callbacks of libraries during their import, KeyboardInterrupt would be ignored.
    (tmp_path / "deaf.py").write_text(DEAF, encoding="utf-8")
    command = [sys.executable, "-m", "megajax.train", f"--config={tmp_path / 'deaf.py'}", "--print-config"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (process.returncode, process.stdout, process.stderr) == (-signal.SIGINT, "", "")
