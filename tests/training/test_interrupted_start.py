"""Ctrl-C while a run is being set up, at a terminal."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_start_that_is_interrupted_leaves_the_terminal_usable(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    call = [sys.executable, "-m", "megajax.train", "--config=quickstart.py", f"--run_dir={tmp_path / 'run'}"]
    with subprocess.Popen(call, cwd=ROOT, stdin=follower, stdout=follower, stderr=follower) as process:
        os.close(follower)
        try:
            shown = b""
            while b"setting up" not in shown:
                shown += os.read(leader, 1000)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    deadline = time.monotonic() + 10
    while b"nothing to save yet" not in shown and time.monotonic() < deadline:
        shown += os.read(leader, 1000)
    os.close(leader)
    assert b"\x1b[?25l" in shown and shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
    assert b"SIGINT: ended at once, with nothing to save yet" in shown and b"Traceback" not in shown
