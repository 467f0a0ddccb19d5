"""A worker of preprocessing that is killed: one message, exit code 1, no hang, and nothing half-written is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import children

from megajax.data.preprocessing import WorkerDied
from tests.data.text_jobs import only_output

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_killed_worker_ends_in_one_message(tmp_path: Path, partitions: int) -> None:
    for number in range(partitions):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "some words to keep it busy"}\n' * 600_000)
    (tmp_path / "out").mkdir()
    call = [sys.executable, "-m", "megajax.preprocess", "--input", *map(str, sorted(tmp_path.glob("*.jsonl")))]
    call += ["--workers=2", f"--partitions={partitions}", "--tokenizer=byte", "--log-interval=0"]
    call += ["--output-prefix", str(tmp_path / "out" / "x")]
    with subprocess.Popen(call, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            working: list[int] = []
            while len(working) < 2:
                assert process.poll() is None
                commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(process.pid)}
                working = [pid for pid, command in commands.items() if b"spawn_main" in command]
            os.kill(working[0], signal.SIGKILL)
            assert process.wait(60) == 1
        finally:
            process.kill()
        text = process.stderr.read()
    assert "Traceback" not in text and text.count("A worker process was killed by SIGKILL; nothing was written.") == 1
    assert "fewer --workers" in text and only_output(tmp_path) == []


def test_a_worker_that_ends_by_itself_is_named() -> None:
    assert str(WorkerDied(3)) == "A worker process ended with exit code 3; nothing was written."
    assert str(WorkerDied(None)) == "A worker process died; nothing was written." and WorkerDied(None).code == 1
