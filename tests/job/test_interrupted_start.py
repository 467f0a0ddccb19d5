"""Ctrl-C during the set-up of a run, at a terminal."""

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_interrupted_start_leaves_the_terminal_usable(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    call = [sys.executable, "-m", "megajax.train", "--config=quickstart.py", f"--run_dir={tmp_path / 'run'}"]
    call.append("--devices=cpu:1")
    with subprocess.Popen(call, cwd=ROOT, stdin=follower, stdout=follower, stderr=follower) as process:
        os.close(follower)
        output, started = bytearray(), threading.Event()

        def read() -> None:
            try:
                while chunk := os.read(leader, 1000):
                    output.extend(chunk)
                    if b"setting up" in output:
                        started.set()
            except OSError:  # how a terminal ends
                started.set()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            started.wait(100)
            process.send_signal(signal.SIGINT)
            code = process.wait(100)
        finally:
            process.kill()
            reader.join()
            os.close(leader)
    assert code == 130, bytes(output)
    assert b"SIGINT: exiting at once, with nothing to save yet" in output and b"Traceback" not in output
    assert b"\x1b[?25l" in output and output.rfind(b"\x1b[?25h") > output.rfind(b"\x1b[?25l")
