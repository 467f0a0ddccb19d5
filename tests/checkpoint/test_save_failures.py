"""Failed saves: one-line reasons, full disks, and programs that end without `close`."""

import asyncio
import errno
import os
import subprocess
import sys
import types
import weakref

import jax.numpy as jnp
import pytest
from user_errors import user_error

from megajax.checkpoint import array_serialization, step_folders
from megajax.checkpoint.background_saves import CheckpointError, reason
from megajax.checkpoint.checkpoint_manager import finish_at_exit
from megajax.checkpoint.config import CheckpointConfig
from megajax.storage import disk
from megajax.storage.write_errors import remedy

MIB = 2**20
STATE = {"w": jnp.zeros((512, 512), jnp.float32)}


def free(monkeypatch, count: int | None) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: count)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ESTALE, errno.EIO, errno.EFBIG])
def test_an_error_of_the_file_system_names_the_path(tmp_path, number):
    error = OSError(number, os.strerror(number), "/runs/a/file")
    text = f"{os.strerror(number)}; {remedy(number)}"
    assert reason(error, tmp_path / "step", MIB) == f"/runs/a/file: {text}"
    assert reason(OSError(number, os.strerror(number)), tmp_path / "step", MIB) == f"{tmp_path}: {text}"
    error = OSError(number, os.strerror(number), str(tmp_path / "step/state/ocdbt.process_0/d/bed77460f08e5c9a"))
    assert reason(error, tmp_path / "step", MIB) == f"{tmp_path}: {text}", "the folder, once"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Error writing "/runs/a/d/x": No space left on device [OS error 28: ENOSPC] [source locations=\'', "full"),
        ("RESOURCE_EXHAUSTED: Disk quota exceeded\nmore\nlines", "quota"),
        ('Failed to open "/runs/a/d/x": Stale file handle [source', "/runs/a/d/x: Stale file handle; {stale}"),
        ("something else\nand its stack", "something else ({folder})"),
    ],
)
def test_errors_of_libraries_become_one_line(tmp_path, monkeypatch, text, expected):
    free(monkeypatch, 310 * MIB)
    outer = RuntimeError("wrapped")
    outer.__cause__ = ValueError(text)
    texts = {name: os.strerror(number) for name, number in (("full", errno.ENOSPC), ("quota", errno.EDQUOT))}
    if expected in texts:
        advice = f"; {remedy(errno.EDQUOT)}" * (expected == "quota")
        expected = "{folder} needs 1.2 GiB, 310.0 MiB are free (" + texts[expected] + ")" + advice
    expected = expected.replace("{stale}", remedy(errno.ESTALE))
    assert reason(outer, tmp_path / "step", int(1.2 * 2**30)) == expected.replace("{folder}", str(tmp_path))


def test_what_the_failed_save_has_written_counts_as_free(tmp_path, monkeypatch):
    free(monkeypatch, 0)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "part").write_bytes(os.urandom(MIB))
    text = reason(OSError(errno.ENOSPC, "x"), tmp_path / "step", 3 * MIB)
    assert text == f"{tmp_path} needs 3.0 MiB, 1.0 MiB are free (No space left on device)"


def test_a_save_that_cannot_fit_is_not_begun(tmp_path, monkeypatch):
    with CheckpointConfig().build(tmp_path) as manager:
        free(monkeypatch, MIB // 2)
        with user_error(kind=CheckpointError) as caught:
            manager.save(1, STATE)
        assert (caught.value.code, caught.value.step) == (1, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        for unlimited in (MIB, None):
            free(monkeypatch, unlimited)
            assert manager.save(unlimited or 1, STATE)
            manager.wait()


def test_free_bytes_are_those_of_the_file_system(tmp_path, monkeypatch):
    stat = os.statvfs(tmp_path)
    assert 0 < disk.free_bytes(tmp_path) <= stat.f_frsize * stat.f_blocks
    assert disk.free_bytes(tmp_path / "missing") is None
    sizeless = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: sizeless)
    assert disk.free_bytes(tmp_path) is None


def test_a_disk_too_small_for_the_checkpoints_is_a_warning(tmp_path, monkeypatch):
    with CheckpointConfig(keep_last=2).build(tmp_path) as manager:
        free(monkeypatch, MIB // 2)
        assert "has 512.0 KiB free, but a checkpoint of this run needs 1.0 MiB" in manager.space_warning(STATE)
        free(monkeypatch, 2 * MIB)
        assert "keep_last=2 needs 3.0 MiB for 3 more checkpoints of 1.0 MiB" in manager.space_warning(STATE)
        manager.save(1, STATE)
        manager.wait()
        assert manager.space_warning(STATE) is None
        free(monkeypatch, None)
        assert manager.space_warning(STATE) is None


def test_a_process_that_cannot_write_is_an_error_at_the_start(tmp_path, monkeypatch):
    step_folders.probe(tmp_path, 3)
    assert not list(tmp_path.iterdir())

    def fail(descriptor):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fsync", fail)
    with user_error() as caught:
        CheckpointConfig().build(tmp_path)
    assert caught.value.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_loses_no_step_and_works_again_with_space(small_disk):
    with CheckpointConfig(keep_last=1).build(small_disk) as manager:
        manager.save(1, STATE)
        manager.wait()
        ballast = small_disk / "ballast"
        # The arrays fit, but not all else.
        ballast.write_bytes(bytes(disk.free_bytes(small_disk) - MIB - 8192))
        manager.save(2, STATE)
        with user_error(kind=CheckpointError):
            manager.wait()
        assert sorted(path.name for path in small_disk.iterdir()) == ["00000001", "ballast", "lock"]
        ballast.unlink()
        manager.save(3, STATE)
        manager.wait()
        assert manager.newest_intact() == 3 and manager.steps() == [3]


DELETED_AFTER_THE_SAVE = "result = manager._pending.result; futures.wait([result]); del manager, result"


@pytest.mark.parametrize("ending", ["", pytest.param(DELETED_AFTER_THE_SAVE, marks=pytest.mark.slow)])
def test_a_program_without_close_is_told_that_its_last_save_failed(tmp_path, ending):
    script = f"""
import resource, sys, jax.numpy as jnp
from concurrent import futures
from megajax.checkpoint.config import CheckpointConfig
manager = CheckpointConfig().build(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
manager.save(1, {{"w": jnp.ones((512, 512))}})
{ending}
"""
    process = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert "megajax: checkpoint step 1 not saved: " in process.stderr, process.stderr
    assert process.returncode == (0 if ending else 1)


def test_the_last_save_of_a_program_without_close_is_finished_at_its_end(tmp_path, capfd):
    manager = CheckpointConfig().build(tmp_path)
    finish_at_exit(weakref.ref(manager))
    manager.save(1, STATE)
    finish_at_exit(weakref.ref(manager))
    assert manager.steps() == [1] and "waiting for checkpoint step 1" in capfd.readouterr().err


def unraisable(error, trace):
    """What sys.unraisablehook is called with."""
    return types.SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=trace, err_msg=None, object=None)


def test_callbacks_that_come_after_a_failed_save_print_nothing(tmp_path, capsys, monkeypatch):
    """TensorStore's futures call an event loop that Orbax has closed; other errors are still printed."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    unraisables = []
    monkeypatch.setattr(sys, "unraisablehook", unraisables.append)
    array_serialization.start_writing(tmp_path / "arrays", {"a": jnp.zeros(2)}).result()
    loop = asyncio.new_event_loop()
    loop.close()

    def from_python():
        loop.call_soon_threadsafe(print)

    with pytest.raises(RuntimeError) as first_error:
        loop.call_soon_threadsafe(print)
    trace = first_error.value.__traceback__
    while trace.tb_frame.f_code.co_name != "call_soon_threadsafe":
        trace = trace.tb_next  # as from C++, where there is no caller
    sys.excepthook(RuntimeError, first_error.value, trace)
    sys.unraisablehook(unraisable(first_error.value, trace))
    assert capsys.readouterr().err == "" and not unraisables
    with pytest.raises(RuntimeError) as second_error:
        from_python()
    sys.excepthook(RuntimeError, second_error.value, second_error.value.__traceback__)
    assert "Event loop is closed" in capsys.readouterr().err
    sys.unraisablehook(other := unraisable(second_error.value, second_error.value.__traceback__))
    assert unraisables == [other]
