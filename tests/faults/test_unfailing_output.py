"""A run continues when its output has no reader: a closed reader, a full disk, closed streams."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import gangs
import pytest
from run_folder import saved

PRINTS = """
import sys
from megajax.faults.unfailing_output import keep_writing
keep_writing()
sys.stdin.readline() if {wait} else None
for number in range(2000):
    print("line", number, flush=True)
    print("error", number, file=sys.stderr, flush=True)
open("done", "w").write("whole")
"""


def test_lines_of_compiled_code_are_dropped_by_their_beginning(tmp_path):
    """Those of this program stay, and none of its own is lost when it ends without leaving Python's frames."""
    script = (
        "import os, sys; from megajax.faults import unfailing_output as o; o.keep_writing(); o.drop_lines(b'[G'); "
        "os.write(1, b'[Gloo] a\\nother\\n[Gloo] b\\n'); print('ours', sys.stdout.fileno() > 2); sys.stdout.flush(); "
        "sys.stdin.readline(); os._exit(3)"
    )
    environment = os.environ | {"PYTHONPATH": str(gangs.REPOSITORY)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdin=pipe, stdout=pipe, text=True) as run:
        assert run.stdin is not None and run.stdout is not None
        # A thread passes on the other's line: either may come first.
        lines = {run.stdout.readline(), run.stdout.readline()}
        run.stdin.close()
        assert (lines, run.stdout.read(), run.wait(100)) == ({"other\n", "ours True\n"}, "", 3)


def run(tmp_path: Path, shell: str, *, wait: bool = False) -> subprocess.CompletedProcess:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS.format(wait=wait))
    environment = os.environ | {"PYTHONPATH": str(gangs.REPOSITORY)}
    command = shell.replace("PRINTS", f"{sys.executable} {script}")
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=False, timeout=100,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("PRINTS | head -2", "standard output: Broken pipe"),
        ("PRINTS > /dev/full", "standard output: No space left on device"),
        ("PRINTS 2>/dev/full", ""),
        ("PRINTS 2>&1 | head -2", ""),
        ("PRINTS >&- ", ""),
        ("PRINTS <&- >&- 2>&-", ""),
    ],
)
def test_output_without_a_reader_is_dropped(tmp_path, shell, message):
    ended = run(tmp_path, shell)
    assert ended.returncode == 0, ended
    assert (tmp_path / "done").read_text() == "whole", "and not a line that was printed"
    if message:
        assert f"megajax: {message}; output that cannot be written is dropped" in ended.stderr
    assert ended.stderr.count("megajax: ") == bool(message), "once"
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    if "2>/dev/full" in shell:
        assert ended.stdout.count("megajax: standard error: No space left on device") == 1


def test_output_with_a_reader_is_complete(tmp_path):
    ended = run(tmp_path, "PRINTS")
    assert ended.stdout.splitlines() == [f"line {number}" for number in range(2000)]
    assert ended.stderr.splitlines() == [f"error {number}" for number in range(2000)]


@pytest.mark.slow
def test_training_continues_without_a_reader(tmp_path):
    """It goes on to its last step, leaves all its files, and ends with code 0."""
    settings = f"--config={gangs.CONFIG} --devices=cpu:1 --run_dir=run --logging.live=always"
    command = f"{sys.executable} -m megajax.train {settings}"
    environment = os.environ | {"PYTHONPATH": str(gangs.REPOSITORY)}
    ended = subprocess.run(
        ["bash", "-c", f"{command} > /dev/full"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False, timeout=400, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert list(gangs.losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6] and saved(tmp_path / "run") == [3, 6]
    assert (tmp_path / "run/report.html").is_file()
    assert "Traceback" not in ended.stderr


HANGS_UP = """
import os, signal
from megajax.faults.signals import Signals
with Signals() as signals:
    os.kill(os.getpid(), signal.SIGHUP)
    print(signals.request and signals.request.signal)
"""


@pytest.mark.parametrize(
    ("before", "stop_signal"),
    [("", "SIGHUP"), pytest.param("trap '' HUP; ", "None", marks=pytest.mark.slow)],
    ids=["terminal", "nohup"],
)
def test_a_closed_terminal_stops_a_run_and_nohup_keeps_it(tmp_path, before, stop_signal):
    (tmp_path / "hangs_up.py").write_text(HANGS_UP)
    environment = os.environ | {"PYTHONPATH": str(gangs.REPOSITORY), "JAX_PLATFORMS": "cpu"}
    command = ["bash", "-c", f"{before}exec {sys.executable} hangs_up.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup themselves
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.strip()) == (0, stop_signal), ended.stderr
