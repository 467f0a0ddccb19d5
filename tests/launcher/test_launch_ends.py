"""How a gang ends: failing, without a reader or standard streams. Real processes and real signals."""

import subprocess
import sys

import pytest
from gangs import REPOSITORY, alive, launcher
from waiting import wait_until

SCRIPTS = {
    "code": ("import os, sys, time; me = int(os.environ['MEGAJAX_PROCESS_ID'])\n"
             "if me == 2: sys.exit(17)\ntime.sleep(600)", 17, "process 2 exited with code 17"),
    "signal": ("import os, signal, time; me = int(os.environ['MEGAJAX_PROCESS_ID'])\n"
               "if me == 0: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(600)", 1, "process 0 killed by SIGSEGV"),
    "grandchildren": ("import os, subprocess, sys, time; me = int(os.environ['MEGAJAX_PROCESS_ID'])\n"
                      "below = subprocess.Popen(['sleep', '600'])\nprint('below', below.pid, flush=True)\n"
                      "time.sleep(0.5)\nsys.exit(3 if me == 1 else 0)", 3, "process 1 exited with code 3"),
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("case", SCRIPTS)
def test_the_first_failure_is_named_and_gives_the_exit_code(start, case):
    script, code, expected = SCRIPTS[case]
    gang = start(*launcher(processes=3), sys.executable, "-c", script)
    assert gang.wait(100) == code, gang.text
    assert expected in gang.text.splitlines()[-1]
    below = [int(line.split()[-1]) for line in gang.text.splitlines() if " below " in line]
    assert wait_until(lambda: not any(map(alive, below)))


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
            assert gang.wait(100) == 3
        finally:
            gang.kill()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_launcher_without_standard_streams(start, closed):
    code = "import sys; print('written'); sys.exit(3)"
    gang = start("sh", "-c", f'exec "$@" {closed}', "sh", *launcher(processes=1), sys.executable, "-c", code)
    assert gang.wait(100) == 3, gang.text
    assert ("[0] written" in gang.text) == (closed == "2>&-")


def test_the_environment_of_each_process_and_its_lines(start):
    names = ["MEGAJAX_NUM_PROCESSES", "MEGAJAX_PROCESS_ID", "MEGAJAX_LOCAL_RANK", "MEGAJAX_LOCAL_PROCESSES"]
    names += ["JAX_LOCAL_DEVICE_IDS", "JAX_NUM_CPU_DEVICES"]
    script = (
        f"import os, resource\nprint(*[os.environ[name] for name in {names}], os.getpgid(0) == os.getpid(), "
        "resource.getrlimit(resource.RLIMIT_CORE)[0], os.environ['MEGAJAX_COORDINATOR'].split(':')[0], end='')"
    )
    gang = start(*launcher("--devices-per-process=2"), sys.executable, "-c", script)
    assert gang.wait(100) == 0
    assert sorted(gang.text.splitlines()) == [
        "[0] 2 0 0 2 0,1 2 True 0 127.0.0.1",
        "[1] 2 1 1 2 2,3 2 True 0 127.0.0.1",
    ]
