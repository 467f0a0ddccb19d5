"""Training that the launcher restarts computes bit for bit the same as an uninterrupted run."""

import json
import signal
from pathlib import Path

import pytest
from gangs import LONG, TINY, TRAIN, Started, alive, launcher, saved, steps


def numbers(run_dir: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss_hex"], line["grad_norm"]) for line in lines if "split" not in line]


def events(run_dir: Path, *names: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in names]


def trained(start, tmp_path: Path, name: str, *options: str, faults: str = "") -> Started:
    """Twelve steps, a checkpoint every third."""
    inject = [f"--resilience.inject={faults}"] * bool(faults)
    settings = (*TINY, "--steps=12", "--evaluation.batches=0", f"--run_dir={tmp_path / name}", *inject)
    gang = start(*launcher("--backoff=0.1", *options), *TRAIN, *settings, name=name)
    assert gang.wait(400) == 0, gang.text
    return gang


@pytest.mark.slow
def test_losses_after_kills_equal_those_of_an_uninterrupted_run(start, tmp_path):
    """F01 and F02: first process 1, then process 0, which hosts the coordinator."""
    faults = "kill:step=5:process=1,kill:step=8:process=0:attempt=2"
    gang = trained(start, tmp_path, "killed", "--max-restarts=5", faults=faults)
    trained(start, tmp_path, "plain")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "plain")
    assert [line[0] for line in numbers(tmp_path / "plain")] == list(range(1, 13))
    restarts = events(tmp_path / "killed", "restart")
    assert [(event["process"], event["after_code"], event["attempt"]) for event in restarts] == [(1, 1, 2), (0, 1, 3)]
    for process, event in zip((1, 0), restarts, strict=True):
        assert event["cause"].startswith(f"process {process} killed by SIGKILL after ")
        assert event["seconds_down"] < 30  # ten on a quiet machine
    assert "the others were stopped; restart 1 of 5 in 0.1 s, from " in gang.text


@pytest.mark.slow
def test_a_frozen_process_is_blamed_by_the_launcher(start, tmp_path):
    """F04: SIGSTOP of process 1. Process 0, which waits in its step, is not blamed."""
    faults = "frozen:step=5:process=1"
    gang = trained(start, tmp_path, "frozen", "--max-restarts=1", "--beat-timeout=20", faults=faults)
    (restart,) = events(tmp_path / "frozen", "restart")
    assert (restart["process"], restart["after_code"]) == (1, 124)
    assert restart["cause"].startswith("process 1 is stopped (state T), its last beat is ")
    assert str(tmp_path / "frozen/hangs/process_0.txt") in gang.text
    assert "run_steps" in (tmp_path / "frozen/hangs/process_0.txt").read_text()


@pytest.mark.slow
def test_a_repeated_exception_ends_with_93(start, tmp_path):
    """F09, with the exception at step 7. Whether step 6 is saved before depends on the speed of the disk."""
    run_dir = tmp_path / "run"
    settings = (*TINY, "--steps=12", "--evaluation.batches=0", f"--run_dir={run_dir}")
    inject = "--resilience.inject=crash:step=7:process=1:always"
    gang = start(*launcher("--backoff=0.1", "--max-restarts=9"), *TRAIN, *settings, inject)
    assert gang.wait(500) == 93, gang.text
    newest = max(saved(run_dir))
    assert newest in (3, 6)
    assert gang.text.splitlines()[-1].endswith(f"no progress past step {newest} in 3 attempts")
    restarts = events(run_dir, "restart")
    assert len(restarts) >= 3 and {event["process"] for event in restarts} == {1}
    assert events(run_dir, "supervisor_stop")[-1]["code"] == 93


@pytest.mark.slow
def test_a_transient_fault_is_restarted(start, tmp_path):
    """Exit code 16: the numbers are nonfinite in both runs of the step, but differ."""
    run_dir = tmp_path / "run"
    inject = "--resilience.inject=nan:step=5:attempt=1,nan_gradients:step=5:always"
    settings = (*TINY, "--evaluation.batches=0", f"--run_dir={run_dir}", inject)
    gang = start(*launcher("--max-restarts=1", "--backoff=0.1"), *TRAIN, *settings)
    assert gang.wait(300) == 17, gang.text  # The second attempt fails in the same way in both runs.
    assert [event["after_code"] for event in events(run_dir, "restart")] == [16]
    assert [event["exit_code"] for event in events(run_dir, "numeric_fault")] == [16, 17]
    assert gang.text.splitlines()[-1].endswith("exit code 17 is never retried")


@pytest.mark.slow
def test_two_of_three_processes_finish_without_the_failing_third(start, tmp_path):
    """The layout is fitted to the remaining two: data 3 -> 2, with the same rows per step."""
    run_dir = tmp_path / "run"
    layout = (
        "--parallel.data=3",
        "--parallel.data_sharding=replicate",
        "--batch.global_size=12",
        "--batch.micro_size=2",
        "--devices=cpu:1",
    )
    inject = "--resilience.inject=crash:step=4:process=2:always"
    settings = (TINY[0], *layout, "--evaluation.batches=0", f"--run_dir={run_dir}", inject)
    options = ("--min-processes=2", "--max-restarts=5", "--backoff=0.1")
    gang = start(*launcher(*options, processes=3), *TRAIN, *settings)
    assert gang.wait(500) == 0, gang.text
    # Two failures without a new checkpoint between them: the first or the second may have saved step 3.
    restarted = [event["processes"] for event in events(run_dir, "restart")]
    assert restarted in ([3, 2], [3, 3, 2])
    assert [event["devices"] for event in events(run_dir, "start")] == [3, *restarted]
    assert list(steps(run_dir)) == [1, 2, 3, 4, 5, 6]
    assert "the one in place 2 keeps failing, from " in gang.text


@pytest.mark.slow
def test_the_same_command_continues_after_the_launcher_was_killed(start, tmp_path):
    """F10: nothing left by it is in the way."""
    command = (*launcher(), *TRAIN, *TINY, *LONG, f"--run_dir={tmp_path / 'run'}", "--checkpoint.every=3")
    first = start(*command, name="first")
    first.until(lambda: saved(tmp_path / "run"))
    pids = first.children()
    first.process.kill()
    first.process.wait()
    second = start(*command, "--resilience.exit_after_steps=3", name="second")
    assert second.wait() == 0, second.text
    assert not any(map(alive, pids))
    assert f"step {max(saved(tmp_path / 'run'))} saved" in second.text and len(steps(tmp_path / "run")) >= 6


@pytest.mark.slow
def test_ctrl_c_twice_ends_training_at_once(start, tmp_path):
    gang = start(*launcher("--max-restarts=3"), *TRAIN, *TINY, *LONG, f"--run_dir={tmp_path / 'run'}")
    gang.until(lambda: len(steps(tmp_path / "run")) > 3)
    for _ in range(2):
        gang.process.send_signal(signal.SIGINT)
        gang.until(lambda: "SIGINT received" in gang.text)
    code = gang.wait(30)
    assert code in (0, 130), gang.text  # 0: the step had ended before the second.
    assert "restart 1 of" not in gang.text
