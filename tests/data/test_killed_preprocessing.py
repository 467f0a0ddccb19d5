"""Killed workers and killed preprocessing: one message, no hang, and no partial files."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import children
from waiting import wait_until

from megajax.config.errors import UserError
from megajax.processes.worker_pools import WorkerDied
from megajax.storage.atomic_folders import hold
from tests.data.text_jobs import job, lines, only_output

ROOT = Path(__file__).parents[2]


def workers_of(parent: int) -> list[int]:
    return [pid for pid in children(parent) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


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
            assert wait_until(lambda: len(workers_of(process.pid)) > 1, 60)
            os.kill(workers_of(process.pid)[0], signal.SIGKILL)
            assert process.wait(100) == 1
        finally:
            process.kill()
        text = process.stderr.read()
    assert "Traceback" not in text and text.count("A worker process was killed by SIGKILL; nothing was written.") == 1
    assert "fewer --workers" in text and only_output(tmp_path) == []


def test_a_worker_that_exits_is_named() -> None:
    assert str(WorkerDied(3)) == "A worker process ended with exit code 3; nothing was written."
    assert str(WorkerDied(None)) == "A worker process died; nothing was written." and WorkerDied(None).code == 1


def test_workers_die_with_their_parent_and_partial_files_are_deleted_later(tmp_path: Path, capfd) -> None:
    """Those of processes that run stay."""
    source = lines(tmp_path / "a.jsonl", [{"text": "some words"}] * 100_000)
    call = [sys.executable, "-m", "megajax.preprocess", "--input", str(source), "--tokenizer=byte", "--workers=2"]
    output = tmp_path / "out"
    output.mkdir()
    with subprocess.Popen([*call, f"--output-prefix={output / 'corpus'}"], cwd=ROOT, start_new_session=True) as process:
        assert wait_until(lambda: list(output.glob(".corpus.partial-*/*.tmp")), 60)
        process.kill()
        process.wait(100)
        assert wait_until(lambda: subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).returncode)
    (left,) = output.iterdir()
    for name in (".corpus.partial-living", ".corpus.partial-unknown", ".corpus2.partial-other"):
        (output / name).mkdir()
    descriptor = hold(output / ".corpus.partial-living")
    job(tmp_path, lines(tmp_path / "b.jsonl", [{"text": "x"}])).build()
    os.close(descriptor)
    error = capfd.readouterr().err
    assert f"deleted {left}, left by a killed process" in error
    assert f"left {output / '.corpus.partial-unknown'} alone: it has no lock" in error and "living" not in error
    hidden = [".corpus.partial-living", ".corpus.partial-unknown", ".corpus2.partial-other"]
    assert only_output(tmp_path) == [*hidden, "corpus_text_document.bin", "corpus_text_document.idx"]


def test_the_file_size_limit_is_named_and_not_the_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # The limit would truncate the files of modules.
    source = lines(tmp_path / "a.jsonl", [{"text": "words" * 100}] * 100)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        message = r"may write files of at most 4.0 KiB: raise the limit with ulimit -f"
        with pytest.raises(UserError, match=message) as error:
            job(tmp_path, source).build()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(error.value) and "disk" not in str(error.value) and only_output(tmp_path) == []
    assert error.value.code == 2
