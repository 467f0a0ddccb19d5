"""How a gang ends: killed, failing, asked to stop, left by its launcher. Real processes and real signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gangs import LONG, REPOSITORY, TINY, TRAIN, Started, alive, launcher, saved, steps

FAILING = Path(__file__).with_name("failing_train.py")


def training(start, run_dir: Path, *settings: object, options: tuple = (), train: tuple = TRAIN) -> Started:
    """Two processes in the middle of their run."""
    gang = start(*launcher(*options), *train, *TINY, *LONG, f"--run_dir={run_dir}", *settings)
    gang.until(lambda: len(steps(run_dir)) > 3)
    return gang


def gone(pids: list[int], seconds: float = 2.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def check_end(gang: Started, code: int, seconds: float, *words: str) -> None:
    """It ends with `code` within `seconds`; its last line names the first failure."""
    pids = gang.children()
    began = time.monotonic()
    assert gang.wait(seconds) == code, gang.text
    print(f"gone after {time.monotonic() - began:.2f} s")
    last = gang.text.splitlines()[-1]
    for word in ("megajax.launch: ", *words, "; the others were stopped"):
        assert word in last, gang.text
    assert gone(pids), "orphans"


@pytest.mark.slow  # Below, processes that train nothing are killed by default.
def test_one_process_killed_ends_all_within_ten_seconds(start, tmp_path):
    gang = training(start, tmp_path / "run")
    os.kill(gang.children()[1], signal.SIGKILL)
    check_end(gang, 1, 10, "process 1 killed by SIGKILL after ")


@pytest.mark.slow
def test_process_0_killed_ends_all_within_ten_seconds(start, tmp_path):
    gang = training(start, tmp_path / "run")
    os.kill(gang.children()[0], signal.SIGKILL)
    check_end(gang, 1, 10, "process 0 killed by SIGKILL after ")


@pytest.mark.slow
def test_a_process_that_ignores_sigterm_is_killed(start, tmp_path):
    gang = training(start, tmp_path / "run")
    first, second = gang.children()
    os.kill(first, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(second, signal.SIGKILL)
    check_end(gang, 1, 10, "process 1 killed by SIGKILL after ")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("crash", 1), ("user", 2)])
def test_an_error_in_one_process_ends_all_at_once(start, tmp_path, kind, code):
    run_dir = tmp_path / "run"
    train = (sys.executable, FAILING, kind)
    gang = start(*launcher(), *train, *TINY, *LONG, f"--run_dir={run_dir}")
    gang.until(lambda: "raised on purpose" in gang.text)
    check_end(gang, code, 5, f"process 1 exited with code {code} after ")
    lines = [line for line in gang.text.splitlines() if line.startswith("[1]")]
    assert sum("raised on purpose" in line for line in lines) == 1
    assert any("Traceback" in line for line in lines) == (code == 1)


@pytest.mark.slow
def test_sigterm_to_one_process_saves_one_step_of_all(start, tmp_path):
    gang = training(start, tmp_path / "run")
    os.kill(gang.children()[1], signal.SIGTERM)
    assert gang.wait(30) == 0, gang.text
    assert saved(tmp_path / "run") == [max(steps(tmp_path / "run"))]
    assert f"stopped after step {saved(tmp_path / 'run')[0]} of 200000" in gang.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_is_forwarded_once(start, tmp_path, number):
    gang = training(start, tmp_path / "run")
    gang.process.send_signal(number)
    assert gang.wait(30) == 0, gang.text
    assert len(saved(tmp_path / "run")) == 1
    for index in (0, 1):
        assert gang.text.count(f"[{index}] megajax: {number.name} received") == 1
    assert "exiting at once" not in gang.text


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_processes(start, tmp_path):
    gang = training(start, tmp_path / "run")
    pids = gang.children()
    assert len(pids) == 2
    began = time.monotonic()
    gang.process.kill()
    gang.process.wait()
    assert gone(pids, 2.0)
    print(f"gone after {time.monotonic() - began:.2f} s")


@pytest.mark.slow
def test_finishing_at_different_times_is_success(start, tmp_path):
    gang = start(*launcher(), sys.executable, FAILING, "late", *TINY, f"--run_dir={tmp_path / 'run'}")
    assert gang.wait() == 0, gang.text
    assert "process 1 is late" in gang.text
    assert list(steps(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_output_in_files(start, tmp_path):
    gang = start(*launcher(f"--log-dir={tmp_path / 'logs'}"), *TRAIN, *TINY, f"--run_dir={tmp_path / 'run'}")
    assert gang.wait() == 0, gang.text
    assert gang.text == ""
    assert "2 processes" in (tmp_path / "logs" / "process_0.log").read_text()
    assert (tmp_path / "logs" / "process_1.log").exists()


SCRIPTS = {
    "code": ("import os, sys, time; me = int(os.environ['MEGAJAX_PROCESS_ID'])\n"
             "if me == 2: sys.exit(17)\ntime.sleep(60)", 17, "process 2 exited with code 17"),
    "signal": ("import os, signal, time; me = int(os.environ['MEGAJAX_PROCESS_ID'])\n"
               "if me == 0: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)", 1, "process 0 killed by SIGSEGV"),
    "grandchildren": ("import os, subprocess, sys, time; me = int(os.environ['MEGAJAX_PROCESS_ID'])\n"
                      "below = subprocess.Popen(['sleep', '61'])\nprint('below', below.pid, flush=True)\n"
                      "time.sleep(0.5)\nsys.exit(3 if me == 1 else 0)", 3, "process 1 exited with code 3"),
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("case", SCRIPTS)
def test_the_first_failure_is_named_and_gives_the_exit_code(start, case):
    script, code, expected = SCRIPTS[case]
    gang = start(*launcher(processes=3), sys.executable, "-c", script)
    assert gang.wait(20) == code, gang.text
    assert expected in gang.text.splitlines()[-1]
    below = [int(line.split()[-1]) for line in gang.text.splitlines() if " below " in line]
    assert gone(below)


TALKATIVE = """
import os, threading, time
threading.Thread(target=lambda: (time.sleep(1), os._exit(3))).start()
while True:
    print("x" * 99, flush=True)
"""


def test_a_launcher_whose_output_has_no_reader(tmp_path):
    command = [*map(str, launcher()), sys.executable, "-c", TALKATIVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=REPOSITORY) as gang:
        try:
            assert gang.wait(60) == 3
        finally:
            gang.kill()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_launcher_without_standard_streams(start, closed):
    code = "import sys; print('written'); sys.exit(3)"
    gang = start("sh", "-c", f'exec "$@" {closed}', "sh", *launcher(processes=1), sys.executable, "-c", code)
    assert gang.wait(60) == 3, gang.text
    assert ("[0] written" in gang.text) == (closed == "2>&-")


def test_the_environment_of_each_process_and_its_lines(start):
    names = ["MEGAJAX_NUM_PROCESSES", "MEGAJAX_PROCESS_ID", "MEGAJAX_LOCAL_RANK", "MEGAJAX_LOCAL_PROCESSES"]
    names += ["JAX_LOCAL_DEVICE_IDS", "JAX_NUM_CPU_DEVICES"]
    script = (
        f"import os, resource\nprint(*[os.environ[name] for name in {names}], os.getpgid(0) == os.getpid(), "
        "resource.getrlimit(resource.RLIMIT_CORE)[0], os.environ['MEGAJAX_COORDINATOR'].split(':')[0], end='')"
    )
    gang = start(*launcher("--devices-per-process=2"), sys.executable, "-c", script)
    assert gang.wait(20) == 0
    assert sorted(gang.text.splitlines()) == [
        "[0] 2 0 0 2 0,1 2 True 0 127.0.0.1",
        "[1] 2 1 1 2 2,3 2 True 0 127.0.0.1",
    ]
