"""The manager of a checkpoints folder: settings, policy, retention, the start of a run, failed saves and the lock."""

import errno
import gc
import os
import resource
import subprocess
import sys
from collections import Counter
from concurrent import futures
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from user_errors import user_error

from megajax.checkpoint import array_serialization
from megajax.checkpoint.background_saves import CheckpointError
from megajax.checkpoint.config import CheckpointConfig, LocalConfig
from megajax.config.compose import problems_of


def state_of(step):
    return {"w": jnp.full((4, 4), step, jnp.float32)}


def save_all(manager, steps):
    for step in steps:
        manager.save(step, state_of(step), {"step": step})
    manager.wait()


def folders(path):
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"every": 0}, "every"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": -5}, "keep_every"),
        ({"step": -1}, "step"),
        ({"every": 300, "keep_every": 1000}, "keep_every"),
        ({"step": 5, "load": Path("runs/a"), "parts": "weights"}, "step"),
    ],
)
def test_invalid_settings_are_named(settings, setting):
    (problem,) = problems_of(CheckpointConfig(**settings))
    assert problem.setting == setting and str(next(iter(settings.values()))) in str(problem)


def test_settings_of_local_checkpoints_below_one_are_named():
    for name in ("every", "keep", "failures", "jump"):
        cfg = LocalConfig(**{"every": 1, "folder": Path("/tmp"), name: 0})
        assert [problem.setting for problem in problems_of(cfg)] == [name]
    for cfg in (
        CheckpointConfig(local=LocalConfig(every=1, folder=Path("/tmp"))),
        CheckpointConfig(every=None, keep_last=None, keep_every=1000, step=0),
        CheckpointConfig(every=250, keep_every=1000),
    ):
        assert problems_of(cfg) == []


def test_due_follows_the_policy(tmp_path):
    def steps(total, **settings):
        with CheckpointConfig(**settings).build(tmp_path) as manager:
            return [step for step in range(total + 1) if manager.due(step, total)]

    assert steps(10, every=4) == [4, 8, 10]
    assert steps(8, every=4) == [4, 8]
    assert steps(10, every=4, at_end=False) == [4, 8]
    assert steps(10, every=None) == [10]
    assert steps(10, every=None, at_end=False) == []


@pytest.mark.parametrize(
    ("settings", "remaining"),
    [
        ({"keep_last": 2}, [3, 4]),
        ({"keep_last": None}, [1, 2, 3, 4]),
        ({"every": 1, "keep_last": 1, "keep_every": 2}, [2, 4]),
    ],
)
def test_old_steps_are_deleted_except_kept_ones(tmp_path, settings, remaining):
    with CheckpointConfig(**settings).build(tmp_path) as manager:
        save_all(manager, range(1, 5))
        assert manager.steps() == remaining
    assert folders(tmp_path) == [f"{step:08d}" for step in remaining]


def test_nothing_is_deleted_when_the_new_step_fails(tmp_path, monkeypatch):
    with CheckpointConfig(keep_last=1).build(tmp_path) as manager:
        save_all(manager, [1])
        monkeypatch.setattr(manager, "_commit", lambda save: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        manager.save(2, state_of(2))
        with user_error(kind=CheckpointError):
            manager.wait()
        assert folders(tmp_path) == ["00000001"]
        monkeypatch.undo()
        save_all(manager, [2])  # space is back
        assert manager.steps() == [2]


class FailsLater:
    def result(self, timeout):
        raise RuntimeError("wrapped") from OSError(errno.EROFS, os.strerror(errno.EROFS), "/some/file")


@pytest.mark.parametrize("method", ["save", "wait", "poll", "close", "__exit__"])
def test_a_background_failure_is_raised(tmp_path, monkeypatch, method):
    manager = CheckpointConfig().build(tmp_path)
    monkeypatch.setattr(array_serialization, "start_writing", lambda path, leaves: FailsLater())
    manager.save(3, state_of(3))
    futures.wait([manager._pending.result])
    message = r"step 3 not saved: /some/file: Read-only file system; it is mounted read-only"
    arguments = {"save": (4, state_of(4)), "__exit__": (None, None, None)}
    with pytest.raises(CheckpointError, match=message):
        getattr(manager, method)(*arguments.get(method, ()))
    assert folders(tmp_path) == [] and manager.poll() == []


def test_poll_reports_each_save_once(tmp_path):
    with CheckpointConfig().build(tmp_path) as manager:
        manager.save(1, state_of(1))
        futures.wait([manager._pending.result])
        (report,) = manager.poll()
        assert report.step == 1 and 0 < report.blocking_seconds <= report.total_seconds and report.bytes > 64
        assert manager.poll() == []


def test_a_failed_save_does_not_hide_another_error(tmp_path, monkeypatch):
    monkeypatch.setattr(array_serialization, "start_writing", lambda path, leaves: FailsLater())
    with pytest.raises(ZeroDivisionError) as caught, CheckpointConfig().build(tmp_path) as manager:
        manager.save(3, state_of(3))
        raise ZeroDivisionError
    assert "step 3 not saved" in caught.value.__notes__[0]


def test_synchronous_saves_are_committed_on_return(tmp_path):
    with CheckpointConfig(asynchronous=False).build(tmp_path) as manager:
        manager.save(1, state_of(1))
        assert folders(tmp_path) == ["00000001"]


def test_a_run_starts_from_the_highest_step_and_prints_nothing(tmp_path, capfd):
    with CheckpointConfig().build(tmp_path / "run" / "checkpoints") as manager:
        assert manager.start() is None and manager.newest() is None
        save_all(manager, [2, 10, 3])
        os.utime(manager.folder / "00000002", (2e9, 2e9))
        assert manager.newest() == 10 and manager.start() == (manager, 10)
        before = (manager.folder / "00000010" / "manifest.json").stat().st_mtime_ns
        assert not manager.save(10, state_of(10))  # a committed step is not written again
        assert (manager.folder / "00000010" / "manifest.json").stat().st_mtime_ns == before
        state, meta = manager.restore(10, jax.eval_shape(lambda: state_of(0)))
    np.testing.assert_array_equal(state["w"], np.full((4, 4), 10.0))
    assert meta == {"step": 10} and capfd.readouterr() == ("", "")


def test_start_from_another_run_and_then_from_its_own(tmp_path):
    with CheckpointConfig().build(tmp_path / "a" / "checkpoints") as manager:
        save_all(manager, [1, 2])
    for load, step, expected in (("a", None, 2), ("a", 1, 1), ("a/checkpoints/00000001", None, 1)):
        with CheckpointConfig(load=tmp_path / load, step=step).build(tmp_path / "b") as manager:
            source, actual = manager.start()
            assert source is not manager and actual == expected and source.meta(actual) == {"step": expected}
    with CheckpointConfig(load=tmp_path / "a", step=1).build(tmp_path / "b") as manager:
        save_all(manager, [5])
        assert manager.start() == (manager, 5)


@pytest.mark.parametrize("case", ["typo", "empty", "only_unfinished", "missing_step"])
def test_loading_from_an_empty_folder_is_an_error(tmp_path, case):
    (tmp_path / "empty").mkdir()
    (tmp_path / "only_unfinished" / "00000003.0123abcd.saving").mkdir(parents=True)
    with CheckpointConfig().build(tmp_path / "missing_step") as manager:
        save_all(manager, [1])
    cfg = CheckpointConfig(load=tmp_path / case, step=9 if case == "missing_step" else None)
    with cfg.build(tmp_path / "own") as manager, user_error():
        manager.start()


def test_going_back_sets_later_steps_aside(tmp_path, capfd):
    with CheckpointConfig(keep_last=None).build(tmp_path) as manager:
        save_all(manager, [1, 2, 3])
    with CheckpointConfig(step=2).build(tmp_path) as manager:
        assert manager.start() == (manager, 2)
        assert manager.steps() == [1, 2, 3]
        manager.go_back(2)
        assert manager.steps() == [1, 2]
        save_all(manager, [3])
    assert folders(tmp_path) == ["00000001", "00000002", "00000003", "00000003.abandoned"]
    assert "00000003.abandoned" in capfd.readouterr().err
    with CheckpointConfig(step=7).build(tmp_path) as manager, user_error():
        manager.start()


def test_only_unfinished_steps_of_dead_attempts_are_removed(tmp_path, capfd):
    remains = ["00000003.0123abcd0001.saving", "00000001.deleting"]
    for name in [*remains, "00000002.damaged", "notes"]:
        (tmp_path / name / "inside").mkdir(parents=True)
    with CheckpointConfig().build(tmp_path):
        assert folders(tmp_path) == ["00000002.damaged", "notes"]
    output = capfd.readouterr().err
    assert all(name in output for name in remains)


def test_the_folder_of_a_running_writer_is_left_alone(tmp_path, monkeypatch):
    script = (
        "import sys; from megajax.checkpoint.config import CheckpointConfig\n"
        "manager = CheckpointConfig().build(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    )
    monkeypatch.setattr("megajax.checkpoint.step_folders.LOCK_TIMEOUT_SECONDS", 0.3)
    holder = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "ready\n"
        (tmp_path / "00000003.0123abcd0001.saving").mkdir()
        with user_error():
            CheckpointConfig().build(tmp_path)
        assert folders(tmp_path) == ["00000003.0123abcd0001.saving"]
    finally:
        holder.kill()
        holder.communicate()
    with CheckpointConfig().build(tmp_path):  # a killed writer holds nothing
        assert folders(tmp_path) == []


def test_an_unwritable_folder_is_an_error_at_the_start(tmp_path):
    tmp_path.chmod(0o500)
    was = os.geteuid()
    if was == 0:
        for parent in tmp_path.parents:
            if parent.stat().st_uid == 0 and parent.name.startswith("pytest"):
                parent.chmod(0o755)
        os.seteuid(65534)
    try:
        with user_error():
            CheckpointConfig().build(tmp_path / "checkpoints")
    finally:
        os.seteuid(was)
        tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("")
    with user_error():
        CheckpointConfig().build(tmp_path / "file" / "checkpoints")


def test_a_failing_disk_keeps_older_steps_and_gives_one_line(tmp_path, capfd):
    """A real error of Orbax's threads, whose tracebacks are not printed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointConfig(keep_last=1).build(tmp_path) as manager:
        save_all(manager, [1])
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            manager.save(2, {"w": jnp.ones((512, 512))})
            with user_error(kind=CheckpointError) as caught:
                manager.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "\n" not in str(caught.value) and manager.steps() == [1]
        save_all(manager, [3])
    assert folders(tmp_path) == ["00000003"] and capfd.readouterr() == ("", "")


SAVES = 6
LIBRARIES = ("megajax", "jax", "orbax", "concurrent", "asyncio", "threading")


def objects() -> Counter[str]:
    """Type -> number of objects, without the lists that the metrics of TensorStore keep, about 20 a save."""
    gc.collect()
    kinds = (type(entry) for entry in gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__name__}" for kind in kinds if str(kind.__module__).startswith(LIBRARIES))


def test_a_save_leaves_no_objects_behind(tmp_path):
    state = {f"weight{index}": jnp.ones((4, 4)) for index in range(3)}
    with CheckpointConfig(keep_last=1).build(tmp_path) as manager:
        for step in range(1, 2 * SAVES + 1):
            if step == SAVES + 1:
                before = objects()
            manager.save(step, state, {})
            manager.wait()
            manager.poll()
        growth = objects() - before
    assert all(count < SAVES for count in growth.values()), growth
