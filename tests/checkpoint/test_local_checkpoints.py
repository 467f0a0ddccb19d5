"""Local checkpoints of one process on eight devices: restores, errors, and full disks."""

import contextlib
import resource
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from local_sets import damage, like, pack_of, sets, small
from test_restore import bits, mesh_of, state_on
from user_errors import user_error

from megajax.checkpoint.config import LocalConfig
from megajax.checkpoint.local.local_checkpoints import LocalCheckpoints
from megajax.checkpoint.local.machine_folder import RunHistory
from megajax.checkpoint.reader import DamagedStep
from megajax.storage import disk

META = {"mesh": {"data": 4}, "spikes": {}}


def opened(folder: Path, **settings: Any) -> LocalCheckpoints:
    """A start of the run whose shared checkpoints are in folder/shared."""
    (folder / "shared").mkdir(exist_ok=True)
    return LocalConfig(**{"every": 1, "folder": folder / "node"} | settings).build(folder / "shared")


def saved(folder: Path, *steps: int, first: int = 0, **settings: Any) -> None:
    """An attempt that saves these steps and ends."""
    with opened(folder, **settings) as local:
        local.begin(first, small(0))
        for step in steps:
            local.save(step, small(step), META | {"step": step})
        local.wait()
        assert [report.failure for report in local.poll()] == [None] * len(steps)


def newest(folder: Path) -> tuple[int | None, list[int], float | None]:
    """The result of a start: its step, the skipped steps, and a value of the state."""
    with opened(folder) as local:
        passed_over = list[int]()
        while True:
            step, value = local.newest_intact(), None
            passed_over += [skipped.step for skipped in local.skipped]
            with contextlib.suppress(DamagedStep):
                value = None if step is None else float(local.restore(step, like(small(0)))[0]["w"][0, 0])
                return step, passed_over, value


def laid_out(mesh: jax.sharding.Mesh, state: Any) -> Any:
    """The first dimension over `tensor` and the second over `data`, where they divide: not as it was saved."""

    def spec_of(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        pairs = zip(leaf.shape, ("tensor", "data"), strict=False)
        spec = jax.sharding.PartitionSpec(*(axis if size % mesh.shape[axis] == 0 else None for size, axis in pairs))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(spec_of, state)


@pytest.mark.smoke
@pytest.mark.parametrize(("data", "tensor"), [(4, 2), (2, 4), (8, 1), (1, 1)])
def test_restores_are_bit_exact_on_the_same_layout_and_on_others(tmp_path, data, tensor):
    state = state_on(mesh_of(4, 2))
    with opened(tmp_path) as local:
        local.begin(0, state)
        local.save(7, state, META)
    with opened(tmp_path) as local:
        assert local.newest_intact() == 7 and local.meta(7) == META
        unchanged, _ = local.restore(7, like(state))
        restored, meta = local.restore(7, laid_out(mesh_of(data, tensor), state))
    assert meta == META
    leaves = (jax.tree.leaves(tree) for tree in (state, unchanged, restored))
    for saved, same_layout, new_layout in zip(*leaves, strict=True):
        assert bits(saved) == bits(same_layout) == bits(new_layout)
        assert same_layout.sharding == saved.sharding and saved.dtype == new_layout.dtype
        assert dict(new_layout.sharding.mesh.shape) == {"data": data, "tensor": tensor}


def test_donating_the_state_after_a_save_does_not_change_the_saved_values(tmp_path):
    change = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"w": jax.device_put(np.zeros((1024, 1024), np.float32))}
    with opened(tmp_path, keep=3) as local:
        local.begin(0, state)
        for step in (1, 2, 3):
            state = change(state)
            local.save(step, state, META)
            for _ in range(5):
                state = change(state)
    for path in sets(tmp_path):
        values = np.frombuffer((path / pack_of(0)).read_bytes(), np.float32)
        assert set(values) == {6 * int(path.name) - 5}
    assert [int(path.name) for path in sets(tmp_path)] == [1, 2, 3]


def test_a_state_of_other_shapes_is_refused_with_a_table(tmp_path):
    saved(tmp_path, 1)
    with opened(tmp_path) as local:
        local.newest_intact()
        with user_error():
            local.restore(1, like({"w": np_zeros(5)}))


def np_zeros(size: int) -> jax.Array:
    return jax.device_put(np.zeros((size, size), np.float32))


def test_the_newest_sets_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3, 4)
    assert [path.name for path in sets(tmp_path)] == ["00000003", "00000004"]
    assert newest(tmp_path) == (4, [], 4.0)


@pytest.mark.parametrize(
    ("file", "every"), [(pack_of(0), 11), ("manifest.json", 61), ("meta.json", 29), ("arrays/process_0/index.json", 61)]
)
def test_a_flipped_bit_anywhere_is_found(tmp_path, capfd, file, every):
    """A set whose description can't be read is no set; one whose shards differ is a skipped step. Both are removed."""
    saved(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "node", tmp_path / "copy")
    content = (sets(tmp_path)[-1] / file).read_bytes()
    for at in range(0, len(content), every):
        (sets(tmp_path)[-1] / file).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        assert newest(tmp_path) == (1, [2] if file == pack_of(0) else [], 1.0)
        assert "removed the local checkpoint" in capfd.readouterr().err
        assert [path.name for path in sets(tmp_path)] == ["00000001"]
        shutil.rmtree(tmp_path / "node")
        shutil.copytree(tmp_path / "copy", tmp_path / "node")
    assert newest(tmp_path) == (2, [], 2.0)


def test_shortened_and_missing_files_are_damage(tmp_path):
    saved(tmp_path, 1, 2)
    older, newer = sets(tmp_path)
    (newer / pack_of(0)).write_bytes((newer / pack_of(0)).read_bytes()[:-1])
    (older / pack_of(0)).unlink()
    assert newest(tmp_path) == (None, [2, 1], None)


def test_unfinished_sets_and_those_of_a_former_run_are_removed(tmp_path, capfd):
    saved(tmp_path, 1, 2)
    shutil.copytree(sets(tmp_path)[-1], sets(tmp_path)[-1].with_name("00000003.00aa0001.saving"))
    assert newest(tmp_path)[0] == 2
    assert not list((tmp_path / "node").rglob("*.saving"))
    shutil.rmtree(tmp_path / "shared")  # a new run in the same place
    assert newest(tmp_path)[0] is None and sets(tmp_path) == []
    assert "local checkpoints of a former run" in capfd.readouterr().err


def test_two_runs_with_one_folder_do_not_mix(tmp_path):
    for name, step in (("a", 5), ("b", 9)):
        (tmp_path / name).mkdir()
        with LocalConfig(every=1, folder=tmp_path / "node").build(tmp_path / name) as local:
            local.begin(0, small(0))
            local.save(step, small(step), META)
    for name, step in (("a", 5), ("b", 9)):
        with LocalConfig(every=1, folder=tmp_path / "node").build(tmp_path / name) as local:
            assert local.newest_intact() == step
    assert oct((tmp_path / "node" / local.history.run).stat().st_mode & 0o777) == "0o700"


def test_a_history_includes_steps_up_to_the_start_of_the_next_attempt():
    history = RunHistory("run").begin("a", 0).begin("b", 10).begin("c", 20)
    assert history.includes("a", 10) and not history.includes("a", 11)
    assert history.includes("b", 20) and not history.includes("b", 21)
    assert history.includes("c", 500) and not history.includes("of another run", 1)
    assert not history.begin("d", 4).includes("c", 500)


def test_sets_after_the_step_that_a_run_resumes_from_are_deleted_and_not_used_if_they_return(tmp_path):
    """A machine with step 4 is lost while the run continues from step 2, and returns later."""
    saved(tmp_path, 2, 4)
    shutil.copytree(sets(tmp_path)[-1], tmp_path / "away")
    saved(tmp_path, first=2)
    assert [path.name for path in sets(tmp_path)] == ["00000002"]
    shutil.copytree(tmp_path / "away", sets(tmp_path)[-1].with_name("00000004"))
    assert newest(tmp_path)[0] == 2


def test_failed_saves_keep_older_sets_and_stop_after_a_number_in_a_row(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"w": np_zeros(100)}
    with opened(tmp_path, failures=2) as local:
        local.begin(0, big)
        local.save(1, big, META)
        local.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, limits[1]))
            local.save(2, big, META)
            local.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        first, second = local.poll()
        assert first.failure is None and "File too large" in str(second.failure) and not local.stopped
        assert [path.name for path in sets(tmp_path)] == ["00000001"]
        assert not list((tmp_path / "node").rglob("*.saving"))
        local.save(3, big, META)  # there is room again
        local.wait()
        assert [report.failure for report in local.poll()] == [None] and local.failures == 0
        shutil.rmtree(local.store.path)
        for step in (4, 5):
            assert local.due(step)
            local.save(step, big, META)
        local.wait()
        assert all("No such file" in str(report.failure) for report in local.poll())
        assert local.stopped


def test_a_full_disk_is_named_with_both_sizes(tmp_path, monkeypatch):
    with opened(tmp_path) as local:
        local.begin(0, small(0))
        monkeypatch.setattr(disk, "free_bytes", lambda path: 63)
        local.save(1, small(1), META)
        local.wait()
        (report,) = local.poll()
        assert "process_0 needs 64 B, 63 B are free (No space left on device)" in str(report.failure)
    with opened(tmp_path) as local, user_error("checkpoint.local.folder"):
        local.begin(0, small(0))


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "node").write_text("a file")
    with user_error("checkpoint.local.folder"):
        opened(tmp_path)


def test_clear_deletes_all_sets_of_the_run(tmp_path):
    """It deletes those of a process of an earlier start with more of them too."""
    with opened(tmp_path) as local:
        (local.store.path / "process_3").mkdir()
        local.begin(0, small(0))
        local.save(1, small(1), META)
        local.clear()
    assert list((tmp_path / "node").iterdir()) == []


def test_after_a_restore_finds_damage_the_step_before_is_chosen(tmp_path):
    saved(tmp_path, 1, 2)
    with opened(tmp_path) as local:
        assert local.newest_intact() == 2
        damage(sets(tmp_path)[1] / pack_of(0))
        with user_error(kind=DamagedStep):
            local.restore(2, like(small(0)))
        assert [path.name for path in sets(tmp_path)] == ["00000001"]
        assert local.newest_intact() == 1 and [skipped.step for skipped in local.skipped] == [2]
        assert float(local.restore(1, like(small(0)))[0]["w"][0, 0]) == 1
        assert local.newest_intact() == 1 and local.skipped == []


@pytest.mark.parametrize("laid_out_as_saved", [True, False])
def test_a_restore_reads_each_byte_once(tmp_path, laid_out_as_saved):
    values = np.arange(2**22, dtype=np.float32).reshape(2**11, 2**11)
    mesh = mesh_of(4, 2)
    state = {"w": jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))}
    with opened(tmp_path) as local:
        local.begin(0, state)
        local.save(1, state, META)
    target = like(state) if laid_out_as_saved else laid_out(mesh_of(2, 4), state)
    with opened(tmp_path) as local:
        before = bytes_read()
        assert local.newest_intact() == 1
        restored, _ = local.restore(1, target)
        count = bytes_read() - before
    assert values.nbytes <= count < 1.1 * values.nbytes
    np.testing.assert_array_equal(restored["w"], values)


def bytes_read() -> int:
    """Bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_a_history_that_cannot_be_written_is_a_user_error(tmp_path, monkeypatch):
    def fails(self: RunHistory, shared: Path) -> None:
        raise OSError(28, "No space left on device", str(shared))

    monkeypatch.setattr(RunHistory, "write", fails)
    with opened(tmp_path) as local, user_error():
        local.begin(0, small(0))
