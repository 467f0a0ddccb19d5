"""Faults that no process notices by itself: a damaged copy of a weight (F24) and a slow process (F08), in a gang."""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import gangs
import pytest

QUIET = ("--checkpoint.every=none", "--evaluation.at_end=false", "--model.dropout=0")


def events(folder: Path, name: str) -> list[dict]:
    path = folder / "events.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [line for line in lines if line["event"] == name]


@pytest.mark.slow
def test_a_flipped_bit_ends_the_run_and_is_never_saved(tmp_path):
    """F24: the run ends at the next check, with 17; the save due at that step is not made."""
    run = tmp_path / "run"
    settings = (*gangs.TINY, f"--run_dir={run}", "--parallel.data_sharding=replicate", "--checkpoint.every=2")
    checks = ("--resilience.replicas.every=3", "--resilience.inject=bitflip:step=5:process=1")
    with gangs.started(tmp_path) as start:
        gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, *checks)
        assert gang.wait() == 17, gang.text
        (event,) = events(run, "replica_mismatch")
        assert event["step"] == 6 and event["processes"] == [0, 1] and event["weight"].startswith("params.")
        assert gangs.saved(run) == [2, 4], "step 6 was due"
        assert "hold different bytes" in gang.text and "(process 1)" in gang.text
        assert "Traceback" not in gang.text
        # The same command resumes from the last checkpoint, and without the fault reaches the end.
        again = start(*gangs.launcher(), *gangs.TRAIN, *settings, "--resilience.replicas.every=3", name="again")
        assert again.wait() == 0, again.text
        assert gangs.saved(run)[-1] == 6


@pytest.mark.slow
def test_a_process_that_computes_wrong_numbers_is_found(tmp_path):
    """A device that reproducibly computes different gradients ends the run; one that does so once does not."""
    losses = {}
    with gangs.started(tmp_path) as start:
        settings = (gangs.TINY[0], "--devices=cpu:2", "--batch.micro_size=1", "--parallel.data=4", *QUIET)
        checks = ("--resilience.recompute.every=2", "--resilience.inject=wrong_gradients:step=4:process=1")
        for name, more, code in (
            ("plain", (), 0),
            ("once", checks, 0),
            ("always", (*checks[:1], checks[1] + ":always"), 17),
        ):
            run = tmp_path / name
            command = (*gangs.launcher(), *gangs.TRAIN, *settings, f"--run_dir={run}", *more)
            gang = start(*command, name=name)
            assert gang.wait() == code, gang.text
            losses[name] = gangs.steps(run)
            for event in events(run, "recompute_mismatch"):
                assert event["step"] == 4 and event["processes"] == [1] and event["reproducible"] == (name == "always")
            assert len(events(run, "recompute_mismatch")) == (name != "plain"), gang.text
    assert losses["once"] == losses["plain"] and len(losses["plain"]) == 6, "the check changes nothing"
    assert list(losses["always"]) == [1, 2, 3, 4]
    assert "(process 1) reproducibly computed other gradients" in gang.text and "2 other groups agree" in gang.text


@pytest.mark.slow
def test_a_process_that_sleeps_is_a_straggler(tmp_path):
    """F08: named within ten steps with its phase, and the losses are those of an uninterrupted run."""
    losses = {}
    with gangs.started(tmp_path) as start:
        for name, more in (("plain", ()), ("slow", ("--resilience.inject=slow:step=6:process=1",))):
            run = tmp_path / name
            settings = (*gangs.TINY, *QUIET, f"--run_dir={run}", "--steps=20", "--logging.every=5")
            gang = start(*gangs.launcher(), *gangs.TRAIN, *settings, *more, name=name)
            assert gang.wait() == 0, gang.text
            losses[name] = gangs.steps(run)
    assert losses["slow"] == losses["plain"] and len(losses["plain"]) == 20
    told = [event for event in events(run, "straggler") if event["phase"] == "data_wait"]
    assert [event["process"] for event in told] == [1], told
    assert told[0]["step"] <= 15 and told[0]["since_step"] >= 5 and told[0]["factor"] > 2
    assert "process 1 is slow since step" in gang.text and "for data wait" in gang.text


@pytest.mark.slow
def test_a_process_that_is_stopped_half_of_the_time_is_a_straggler(tmp_path):
    """F08: SIGSTOP and SIGCONT alternate."""
    run, over = tmp_path / "run", threading.Event()

    def halve(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.25)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.25)

    settings = (*gangs.TINY, *gangs.LONG, f"--run_dir={run}", "--logging.every=20")
    with gangs.started(tmp_path) as start:
        gang = start(*gangs.launcher(), *gangs.TRAIN, *settings)
        gang.until(lambda: len(gangs.steps(run)) > 5)
        (slow,) = (pid for pid in gang.children() if rank(pid) == "1")
        halving = threading.Thread(target=halve, args=(slow,))
        halving.start()
        try:
            gang.until(lambda: [event for event in events(run, "straggler") if event["phase"] == "stalled"])
        finally:
            over.set()
            halving.join()
        assert {event["process"] for event in events(run, "straggler") if event["phase"] == "stalled"} == {1}
        gang.until(lambda: events(run, "straggler_over"))
        assert gang.process.poll() is None, "nobody restarts"


def rank(pid: int) -> str | None:
    """The process index that the launcher gave a process."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    values = [entry.partition(b"=")[2] for entry in entries if entry.startswith(b"MEGAJAX_PROCESS_ID=")]
    return values[0].decode() if values else None


@pytest.mark.slow
def test_all_processes_are_tested_together(tmp_path):
    """By the doctor, and by a run before it begins; a failing process keeps all from starting."""
    with gangs.started(tmp_path) as start:
        doctor = (sys.executable, "-m", "megajax.doctor", "--before-run", "--devices=cpu:1", "--json")
        gang = start(*gangs.launcher(), *doctor, name="doctor")
        assert gang.wait() == 0, gang.text
        assert gang.text.count("exact over 2 devices, 5 times, in chunks of 4.0 MiB") == 2
        assert gang.text.count("apart, of 2 processes") == 2
        run = tmp_path / "run"
        checked = (*gangs.TINY, f"--run_dir={run}", "--steps=3", "--resilience.health.before_run=true")
        gang = start(*gangs.launcher(), *gangs.TRAIN, *checked, name="run")
        assert gang.wait() == 0, gang.text
        (event,) = events(run, "health_checks")
        assert event["failed"] == [] and "exact over 2 devices" in event["all_reduce"] and "clocks" in event
