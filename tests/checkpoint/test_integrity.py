"""Damage is found before a step is loaded, and the newest intact step is used; no run starts from nothing silently."""

import json
import os
import shutil
import threading
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from local_sets import damage
from user_errors import user_error

from megajax.checkpoint import manifest
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.inspection import DAMAGED, survey
from megajax.checkpoint.manifest import Damaged
from megajax.checkpoint.reader import CheckpointReader
from megajax.storage import disk

STATE = {"w": jnp.arange(64, dtype=jnp.float32).reshape(8, 8), "step": jnp.int32(0)}


@pytest.fixture
def folder(tmp_path):
    with CheckpointConfig().build(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {**STATE, "step": jnp.int32(step)}, {"step": step})
    return tmp_path


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete(path):
    path.unlink()


def replace_by_a_folder(path):
    """Reading it is an OSError, even for root."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [halve, delete, replace_by_a_folder])
def test_damage_of_any_file_falls_back_to_the_previous_step(folder, capfd, harm):
    newest = folder / "00000002"
    names = [name for name in disk.files_below(newest) if (newest / name).stat().st_size > 1 or harm is not halve]
    assert len(names) >= 8
    for name in names:
        content = (newest / name).read_bytes()
        harm(newest / name)
        with CheckpointConfig().build(folder) as manager:
            assert manager.newest() == 2
            source, step = manager.start()
            assert (source, step) == (manager, 1), name
            state, meta = source.restore(step, jax.eval_shape(lambda: STATE))
            assert meta == {"step": 1} and int(state["step"]) == 1
        output = capfd.readouterr().err
        assert "checkpoint step 2" in output and name.rsplit("/", 1)[-1] in output
        if name == manifest.MANIFEST:
            assert ("was never committed" if harm is delete else "can't be read") in output
        (folder / "00000002.damaged").rename(newest)
        if harm is replace_by_a_folder:
            (newest / name).rmdir()
        (newest / name).write_bytes(content)
    assert CheckpointReader(folder).newest_intact() == 2


def test_a_fallback_and_steps_set_aside_are_events(folder):
    damage(folder / "00000002" / "meta.json")
    events = []

    def event(name, **fields):
        events.append((name, fields))

    with CheckpointConfig().build(folder, event=event) as manager:
        assert manager.start() == (manager, 1)
        manager.save(5, STATE)
        manager.wait()
        manager.go_back(1)
    (damaged, fields), fallback, (abandoned, abandoned_fields) = events
    assert damaged == "checkpoint_damaged" and "meta.json" in fields.pop("why")
    assert fields == {"step": 2, "kept_as": str(folder / "00000002.damaged")}
    assert fallback == ("checkpoint_fallback", {"from_step": 2, "to_step": 1})
    assert abandoned == "checkpoint_abandoned" and abandoned_fields["step"] == 5 and abandoned_fields["back_to"] == 1


def test_the_background_of_a_save_is_watched(folder):
    entered = []

    @contextmanager
    def background(step):
        entered.append((step, threading.current_thread() is threading.main_thread()))
        yield
        entered.append((step, "over"))

    with CheckpointConfig().build(folder, background=background) as manager:
        manager.save(7, STATE)
    assert entered == [(7, False), (7, "over")]


def test_only_damaged_steps_is_an_error(folder, capfd):
    for step in ("00000001", "00000002"):
        damage(folder / step / "meta.json")
    for _ in range(2):  # the second time there are only steps that were set aside
        with CheckpointConfig().build(folder) as manager, user_error():
            manager.start()
    assert sorted(path.name for path in folder.glob("*.damaged")) == ["00000001.damaged", "00000002.damaged"]


def test_a_requested_damaged_step_is_an_error(folder):
    damage(folder / "00000001" / "meta.json")
    with CheckpointConfig(step=1).build(folder) as manager, user_error():
        manager.start()
    reader = CheckpointReader(folder)
    with user_error():
        reader.restore(1, jax.eval_shape(lambda: STATE))
    with user_error():
        reader.meta(1)


def test_a_step_that_was_copied_to_another_number_is_set_aside(folder, capfd):
    shutil.copytree(folder / "00000002", folder / "00000040")
    reason = "it is step 2 in a folder with the name 00000040: the folder was copied or renamed"
    with user_error():
        CheckpointReader(folder).meta(40)
    with CheckpointConfig(step=40).build(folder) as manager, user_error():
        manager.start()
    (committed,) = (step for step in survey(folder, lambda step: True) if step.step == 40)
    assert committed.state == DAMAGED and committed.faults == (reason,)
    with CheckpointConfig().build(folder) as manager:
        assert manager.start() == (manager, 2)
    assert (folder / "00000040.damaged").is_dir()
    assert f"checkpoint step 40 in {folder} is damaged and was skipped: {reason}" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", "a//b", "."])
def test_a_manifest_that_names_files_outside_its_step_is_refused(tmp_path, name):
    manifest.write_manifest(tmp_path, {name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(Damaged, match="outside the step"):
        manifest.read_manifest(tmp_path)


def test_an_altered_manifest_is_refused(folder):
    path = folder / "00000002" / manifest.MANIFEST
    document = json.loads(path.read_text())
    document["files"].pop("arrays/state/_METADATA")
    path.write_text(json.dumps(document))
    with pytest.raises(Damaged, match="altered"):
        manifest.read_manifest(folder / "00000002")
    document["files"] = {"a": 3}
    path.write_text(json.dumps(document | {"seal": manifest.seal({"a": 3})}))
    with pytest.raises(Damaged, match="a size and a hash for each file"):
        manifest.read_manifest(folder / "00000002")


def test_a_pipe_in_a_step_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Damaged, match="pipe: not a file"):
        manifest.verify(tmp_path, {"pipe": {"bytes": 0, "sha256": ""}})
