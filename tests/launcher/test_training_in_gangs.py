"""Real training in gangs: killed, failing, asked to stop, left by its launcher, restarted, started from weights."""

import os
import signal
import sys
from pathlib import Path

import pytest
from gangs import LONG, TINY, TRAIN, Started, alive, launcher
from run_folder import events, saved, steps
from waiting import wait_until

from megajax.launcher.gang_watch import process_state

pytestmark = pytest.mark.slow

FAILING = Path(__file__).with_name("failing_train.py")


def gone(pids: list[int]) -> bool:
    return wait_until(lambda: not any(map(alive, pids)))


def training(start, run_dir: Path, *settings: object) -> Started:
    """Two processes in the middle of their run."""
    gang = start(*launcher(), *TRAIN, *TINY, *LONG, f"--run_dir={run_dir}", *settings)
    gang.until(lambda: len(steps(run_dir)) > 3)
    return gang


def check_end(gang: Started, pids: list[int], code: int, failure: str) -> None:
    """It ends with `code`, and leaves nothing; its last line names the first failure."""
    assert gang.wait() == code, gang.text
    last = gang.text.splitlines()[-1]
    for words in ("megajax.launch: ", failure, "; the others were stopped"):
        assert words in last, gang.text
    assert gone(pids), "orphans"


def test_a_process_that_ignores_sigterm_is_killed_after_the_end_of_another(start, tmp_path):
    gang = training(start, tmp_path / "run")
    first, second = gang.children()
    os.kill(first, signal.SIGSTOP)
    assert wait_until(lambda: process_state(first) == "T")
    os.kill(second, signal.SIGKILL)
    check_end(gang, [first, second], 1, "process 1 killed by SIGKILL after ")


def test_an_error_of_the_user_in_one_process_ends_all(start, tmp_path):
    gang = start(*launcher(), sys.executable, FAILING, *TINY, *LONG, f"--run_dir={tmp_path / 'run'}")
    gang.until(lambda: "raised on purpose" in gang.text)
    check_end(gang, gang.children(), 2, "process 1 exited with code 2 after ")
    lines = [line for line in gang.text.splitlines() if line.startswith("[1]")]
    assert sum("raised on purpose" in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)


def test_sigterm_to_one_process_saves_one_step_of_all(start, tmp_path):
    gang = training(start, tmp_path / "run")
    os.kill(gang.children()[1], signal.SIGTERM)
    assert gang.wait() == 0, gang.text
    assert saved(tmp_path / "run") == [max(steps(tmp_path / "run"))]
    assert f"stopped after step {saved(tmp_path / 'run')[0]} of 200000" in gang.text


def numbers(run_dir: Path) -> list[tuple[int, str, float]]:
    return [(step, line["loss_hex"], line["grad_norm"]) for step, line in steps(run_dir).items()]


def test_losses_after_kills_equal_those_of_an_uninterrupted_run(start, tmp_path):
    """First process 1 is killed, then process 0, which hosts the coordinator."""

    def trained(name: str, *more: str) -> Started:
        """Twelve steps, a checkpoint every third."""
        settings = (*TINY, "--steps=12", "--evaluation.batches=0", f"--run_dir={tmp_path / name}", *more)
        gang = start(*launcher("--backoff=0.1", "--max-restarts=5"), *TRAIN, *settings, name=name)
        assert gang.wait(400) == 0, gang.text
        return gang

    gang = trained("killed", "--resilience.inject=kill:step=5:process=1,kill:step=8:process=0:attempt=2")
    trained("plain")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "plain")
    assert [line[0] for line in numbers(tmp_path / "plain")] == list(range(1, 13))
    restarts = events(tmp_path / "killed", "restart")
    assert [(event["process"], event["after_code"], event["attempt"]) for event in restarts] == [(1, 1, 2), (0, 1, 3)]
    for process, event in zip((1, 0), restarts, strict=True):
        assert event["cause"].startswith(f"process {process} killed by SIGKILL after ")
    assert "the others were stopped; restart 1 of 5 in 0.1 s, from " in gang.text


def test_the_same_command_continues_after_the_launcher_was_killed(start, tmp_path):
    """Nothing that the killed launcher left is in the way."""
    command = (*launcher(), *TRAIN, *TINY, *LONG, f"--run_dir={tmp_path / 'run'}", "--checkpoint.every=3")
    first = start(*command, name="first")
    first.until(lambda: saved(tmp_path / "run"))
    pids = first.children()
    first.process.kill()
    first.process.wait()
    assert len(pids) == 2 and gone(pids)
    second = start(*command, "--resilience.exit_after_steps=3", name="second")
    assert second.wait() == 0, second.text
    assert f"step {max(saved(tmp_path / 'run'))} saved" in second.text and len(steps(tmp_path / "run")) >= 6
