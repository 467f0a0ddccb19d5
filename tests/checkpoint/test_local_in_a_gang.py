"""Local checkpoints of two processes: one loses its disk, or is killed, and the run continues with the same losses."""

import os
from pathlib import Path

import gangs
import pytest
from run_folder import events, exact_losses, saved


def local_steps(run: Path) -> list[int]:
    return [event["step"] for event in events(run, "save_committed") if event.get("kind") == "local"]


def kill_process_1(gang: gangs.Started) -> str:
    """Kills process 1 and returns the output of the gang."""
    os.kill(gang.children()[1], 9)
    assert gang.wait() != 0
    return gang.text


@pytest.mark.slow
def test_the_survivor_saves_its_state_between_steps_and_not_during_a_step(tmp_path):
    """With pure data parallelism each process has the whole state, except during a step, which never finishes here."""
    node = f"--checkpoint.local.folder={tmp_path / 'node'}"
    settings = (*gangs.launcher(), *gangs.TRAIN, *gangs.TINY, *gangs.LONG, "--logging.every=1", node)
    settings = (*settings, "--parallel.data_sharding=replicate")
    with gangs.started(tmp_path) as start:
        run = tmp_path / "a"
        during = start(*settings, "--checkpoint.local.every=3", f"--run_dir={run}", name="a")
        during.until(lambda: len(local_steps(run)) >= 2)
        text = kill_process_1(during)
        assert "another process was lost during a step, so this state is incomplete and not saved" in text, text
        assert "the newest local checkpoint is of step" in text

        run = tmp_path / "b"
        settings = (*settings, "--checkpoint.local.every=1000", f"--run_dir={run}")
        settings = (*settings, "--steps=40", "--evaluation.at_end=false")
        endless = ("--evaluation.every=4", "--evaluation.batches=3000")
        between = start(*settings, *endless, name="b")
        between.until(lambda: max(exact_losses(run), default=0) == 4)
        text = kill_process_1(between)
        assert "process 0 saved step 4 in" in text and "all shards" in text, text
        (emergency,) = [event for event in events(run, "save_committed") if event.get("kind") == "emergency"]
        assert (emergency["step"], emergency["parts"], emergency["whole"]) == (4, [0, 1], True)

        restarted = start(*settings, "--resilience.exit_after_steps=3", name="c")
        assert restarted.wait() == 0, restarted.text
        assert events(run, "start")[-1]["step"] == 4 and saved(run) == [7]
        control = tmp_path / "control"
        undisturbed = start(*settings, f"--run_dir={control}", "--resilience.exit_after_steps=7", name="d")
        assert undisturbed.wait() == 0, undisturbed.text
        assert exact_losses(run) == exact_losses(control) and len(exact_losses(run)) == 7
