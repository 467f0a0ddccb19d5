"""Two processes keep replicas of each other: both are killed, one disk is lost, and the run continues exactly."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gangs
import pytest
import run_folder
from local_sets import damage

SETTINGS = ("--parallel.data_sharding=zero1", "--logging.every=1", "--model.dropout=0.1")


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in lines(run, "events.jsonl") if event["event"] == name]


def hexes(run: Path) -> dict[int, str]:
    return {line["step"]: line["loss_hex"] for line in lines(run, "metrics.jsonl") if "split" not in line}


def local_steps(run: Path) -> list[int]:
    return [event["step"] for event in events(run, "save_committed") if event.get("kind") == "local"]


@pytest.mark.slow
def test_one_lost_disk_loses_nothing_and_the_newest_whole_checkpoint_wins(tmp_path):
    run, node = tmp_path / "run", tmp_path / "node"
    settings = (*gangs.launcher(), *gangs.TRAIN, *gangs.TINY, *gangs.LONG, *SETTINGS)
    local = ("--checkpoint.local.every=2", f"--checkpoint.local.folder={node}", "--checkpoint.local.replicas=1")
    with gangs.started(tmp_path) as start:
        control = start(*settings, f"--run_dir={tmp_path / 'control'}", "--resilience.exit_after_steps=80", name="one")
        assert control.wait() == 0, control.text

        killed = start(*settings, *local, f"--run_dir={run}", name="two")
        killed.until(lambda: len(local_steps(run)) >= 4)
        for pid in killed.children():
            os.kill(pid, 9)
        assert killed.wait() != 0
        newest = max(local_steps(run))
        (folder,) = node.iterdir()
        shutil.copytree(folder, tmp_path / "copy")
        # Both processes have both parts, of which each wrote one; the machine of process 1 is another now.
        assert all((folder / f"process_{process}" / f"{newest:08d}/replicas.bin").stat().st_size for process in (0, 1))
        shutil.rmtree(folder / "process_1")

        restarted = start(*settings, *local, f"--run_dir={run}", "--resilience.exit_after_steps=10", name="three")
        assert restarted.wait() == 0, restarted.text
        first_step = events(run, "start")[-1]["step"]
        assert first_step >= newest and f"starting from step {first_step} in local checkpoints" in restarted.text
        after, expected = hexes(run), hexes(tmp_path / "control")
        assert max(after) == first_step + 10 <= 80
        assert after == {step: expected[step] for step in after}
        # It was stopped and saved in the shared folder: nothing is left on the machine.
        assert run_folder.saved(run) == [first_step + 10] and not folder.exists()

        # Older sets that turn up again do not count, though the run they belong to is this one.
        shutil.copytree(tmp_path / "copy", folder)
        shared = start(*settings, *local, f"--run_dir={run}", "--resilience.exit_after_steps=2", name="four")
        assert shared.wait() == 0, shared.text
        assert events(run, "start")[-1]["step"] == first_step + 10 and "in local checkpoints" not in shared.text


@pytest.mark.slow
def test_without_a_replica_a_lost_disk_falls_back_to_the_shared_folder(tmp_path):
    run, node = tmp_path / "run", tmp_path / "node"
    settings = (*gangs.launcher(), *gangs.TRAIN, *gangs.TINY, *gangs.LONG, *SETTINGS, f"--run_dir={run}")
    settings = (*settings, "--checkpoint.local.every=2", f"--checkpoint.local.folder={node}")
    with gangs.started(tmp_path) as start:
        killed = start(*settings, "--checkpoint.every=5", name="one")
        killed.until(lambda: len(run_folder.saved(run)) >= 2 and local_steps(run)[-1:] > run_folder.saved(run)[-1:])
        for pid in killed.children():
            os.kill(pid, 9)
        killed.wait()
        shared = run_folder.saved(run)[-1]
        (folder,) = node.iterdir()
        shutil.rmtree(folder / "process_0")
        restarted = start(*settings, "--resilience.exit_after_steps=2", name="two")
        assert restarted.wait() == 0, restarted.text
        assert events(run, "start")[-1]["step"] == shared
        passed_over = events(run, "checkpoint_fallback")
        assert passed_over[0]["kind"] == "local" and passed_over[0]["from_step"] > shared
        assert "the shards of process 0 are lost" in passed_over[0]["why"]
        assert "can't be used" in restarted.text


@pytest.mark.slow
def test_a_damaged_copy_gives_way_to_its_replica_and_damaged_replicas_to_the_step_before(tmp_path):
    """Only process 1 finds the damage; process 0 must not wait for it forever."""
    run, node = tmp_path / "run", tmp_path / "node"
    settings = (*gangs.launcher(), *gangs.TRAIN, *gangs.TINY, *gangs.LONG, *SETTINGS)
    local = ("--checkpoint.local.every=2", f"--checkpoint.local.folder={node}", "--checkpoint.local.replicas=1")
    settings = (*settings, *local, f"--run_dir={run}")
    with gangs.started(tmp_path) as start:
        killed = start(*settings, name="one")
        killed.until(lambda: len(local_steps(run)) >= 3)
        for pid in killed.children():
            os.kill(pid, 9)
        killed.wait()
        (folder,) = node.iterdir()
        processes = [folder / f"process_{process}" for process in (0, 1)]
        names = [{path.name for path in process.iterdir() if path.name.isdigit()} for process in processes]
        for process in processes:
            for path in process.iterdir():
                if path.name not in names[0] & names[1]:
                    shutil.rmtree(path)
        older, newest = sorted(map(int, names[0] & names[1]))[-2:]
        before = hexes(run)
        for name in ("run", "node"):
            shutil.copytree(tmp_path / name, tmp_path / "copies" / name)

        damage(processes[1] / f"{newest:08d}/own.bin")
        second = start(*settings, "--resilience.exit_after_steps=1", name="two")
        assert second.wait() == 0, second.text
        assert events(run, "start")[-1]["step"] == newest
        assert second.text.count("removed the local checkpoint") == 1, second.text
        assert f"process_1/{newest:08d}, which is damaged: own.bin" in second.text
        expected = before | hexes(run)

        for name in ("run", "node"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(tmp_path / "copies" / name, tmp_path / name)
        (processes[1] / f"{newest:08d}/own.bin").write_bytes(b"")
        damage(processes[0] / f"{newest:08d}/replicas.bin")
        third = start(*settings, f"--resilience.exit_after_steps={newest - older + 1}", name="three")
        assert third.wait() == 0, third.text
        assert events(run, "start")[-1]["step"] == older
        assert max(hexes(run)) == newest + 1 and hexes(run) == {step: expected[step] for step in hexes(run)}
        (passed_over,) = events(run, "checkpoint_fallback")
        assert (passed_over["kind"], passed_over["from_step"], passed_over["to_step"]) == ("local", newest, older)
        assert "has no intact copy" in passed_over["why"] and third.text.count("removed the local checkpoint") == 2


def lose_process_1(gang: gangs.Started) -> str:
    """Kills process 1 and returns the output of the gang."""
    os.kill(gang.children()[1], 9)
    assert gang.wait() != 0
    return gang.text


@pytest.mark.slow
def test_the_last_process_saves_its_state_if_it_is_whole_and_says_so_if_not(tmp_path):
    """With pure data parallelism each process has the whole state, except during a step, which never finishes here."""
    node = f"--checkpoint.local.folder={tmp_path / 'node'}"
    settings = (*gangs.launcher(), *gangs.TRAIN, *gangs.TINY, *gangs.LONG, "--logging.every=1", node)
    settings = (*settings, "--parallel.data_sharding=replicate")
    with gangs.started(tmp_path) as start:
        run = tmp_path / "a"
        during = start(*settings, "--checkpoint.local.every=3", f"--run_dir={run}", name="a")
        during.until(lambda: len(local_steps(run)) >= 2)
        text = lose_process_1(during)
        assert "another process was lost during a step, so this state is incomplete and not saved" in text, text
        assert "the newest local checkpoint is of step" in text

        run = tmp_path / "b"
        settings = (*settings, "--checkpoint.local.every=1000", f"--run_dir={run}")
        settings = (*settings, "--steps=40", "--evaluation.at_end=false")
        endless = ("--evaluation.every=4", "--evaluation.batches=3000")
        between = start(*settings, *endless, name="b")
        between.until(lambda: max(hexes(run), default=0) == 4)
        text = lose_process_1(between)
        assert "process 0 saved step 4 in" in text and "all shards" in text, text
        (saved,) = [event for event in events(run, "save_committed") if event.get("kind") == "emergency"]
        assert (saved["step"], saved["parts"], saved["whole"]) == (4, [0, 1], True)

        restarted = start(*settings, "--resilience.exit_after_steps=3", name="c")
        assert restarted.wait() == 0, restarted.text
        assert events(run, "start")[-1]["step"] == 4 and run_folder.saved(run) == [7]
        control = tmp_path / "control"
        undisturbed = start(*settings, f"--run_dir={control}", "--resilience.exit_after_steps=7", name="d")
        assert undisturbed.wait() == 0, undisturbed.text
        assert hexes(run) == hexes(control) and len(hexes(run)) == 7
