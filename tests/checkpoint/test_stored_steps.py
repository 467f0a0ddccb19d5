"""Checkpoints in object stores, on real servers: saved, resumed, retired, damaged, inspected and refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from object_stores import faulty, serving
from user_errors import user_error

from megajax.checkpoint import inspection, object_store_steps
from megajax.checkpoint.background_saves import CheckpointError
from megajax.checkpoint.committed_steps import locate
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import CheckpointReader, open_checkpoints
from megajax.config.errors import UserError
from megajax.storage import stores
from megajax.storage.stores import open_store
from megajax.tools import inspect

pytest.importorskip("moto")
STATE = {"w": jnp.arange(1024.0).reshape(64, 16), "b": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(7)}
LIKE = jax.eval_shape(lambda: STATE)


def equal(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.fixture(scope="module", params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def bucket(request, tmp_path_factory):
    """s3://bucket or gs://bucket, for all tests of this file."""
    with serving(request.param, tmp_path_factory.mktemp("cache")) as url:
        yield url


def manager(folder: Path, url: str, **settings):
    return CheckpointConfig(store=Path(url), keep_last=2, **settings).build(folder / "checkpoints")


def test_a_run_saves_resumes_and_retires_steps(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/run"
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    with manager(tmp_path, url) as first:
        assert first.start() is None
        for step in (1, 2, 3):
            assert first.save(step, jax.tree.map(lambda x, step=step: x + step, STATE), {"step": step})
        first.wait()
        assert first.steps() == [2, 3] and not first.save(3, STATE)
        assert not any(name.startswith("00000001.") for name in open_store(f"{url}/checkpoints").names())
    with manager(tmp_path, url) as second:
        assert second.start() == (second, 3)
        state, meta = second.restore(3, LIKE)
        assert meta == {"step": 3}
        equal(state, jax.tree.map(lambda x: x + 3, STATE))
        second.go_back(2)
        assert second.steps() == [2]
    folder, step = locate(f"{url}/checkpoints/00000002")
    assert step == 2 and (folder.parent / "config.yaml").read_text() == "steps: 3\n"
    reader, _ = open_checkpoints(url)
    equal(reader.restore(reader.newest_intact() or 0, LIKE)[0], jax.tree.map(lambda x: x + 2, STATE))
    states = {step.name: step.state for step in inspection.survey(folder, lambda number: True)}
    assert states == {"00000002": inspection.WHOLE, "00000003.abandoned": inspection.ASIDE["abandoned"]}
    assert inspect.main([url, "--verify"]) == 0
    for settings, message in (
        ({}, "checkpoint.store is none"),
        ({"store": Path(f"{bucket}/b")}, "but checkpoint.store is"),
    ):
        with pytest.raises(UserError, match=message):
            CheckpointConfig(**settings).build(tmp_path / "checkpoints")
    with CheckpointConfig().build(tmp_path / "other") as local:
        local.save(1, STATE)
    with user_error():
        CheckpointConfig(store=Path(f"{bucket}/c")).build(tmp_path / "other")


DAMAGES = ("flipped", "manifest", "shorter", "longer", "missing")


@pytest.mark.parametrize("damages", [DAMAGES[:2], pytest.param(DAMAGES[2:], marks=pytest.mark.slow)], ids="-".join)
def test_damaged_steps_are_set_aside_and_the_one_before_used(bucket: str, tmp_path: Path, damages, capfd) -> None:
    for damage in damages:
        check_damage(f"{bucket}/{damage}", tmp_path / damage, damage)
        assert "is damaged and was skipped" in capfd.readouterr().err


def check_damage(url: str, tmp_path: Path, damage: str) -> None:
    with manager(tmp_path, url) as saving:
        for step in (1, 2):
            saving.save(step, STATE, {"step": step})
    store = open_store(f"{url}/checkpoints")
    ending = "manifest.json" if damage == "manifest" else ".bin"
    pack = next(name for name in store.names("00000002") if name.endswith(ending))
    content = bytearray(store.read(pack))
    content[len(content) // 2] ^= 1
    changed = {"shorter": content[:-1], "longer": content + b"x"}.get(damage, content)
    store.delete(pack) if damage == "missing" else store.write(pack, bytes(changed))
    with manager(tmp_path, url) as resuming:
        assert resuming.start() == (resuming, 1)
        assert resuming.steps() == [1]
        equal(resuming.restore(1, LIKE)[0], STATE)
        resuming.save(2, STATE)
    assert stored_names(url) == ["00000001", "00000002", "00000002.damaged"]


def stored_names(url: str) -> list[str]:
    return open_store(f"{url}/checkpoints/committed").names()


@pytest.mark.slow
def test_another_run_is_refused_until_its_lease_ends(bucket: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(object_store_steps, "LEASE_SECONDS", 0.5)
    store = open_store(f"{bucket}/lease/checkpoints")
    store.write("lease", "elsewhere pid 7 0 token")
    read, renewals = stores.Store.generation, iter(range(100))

    def renewed(self, name):
        if name == "lease":
            self.write(name, f"elsewhere pid 7 0 token {next(renewals)}")
        return read(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(stores.Store, "generation", renewed)
        with user_error():
            manager(tmp_path, f"{bucket}/lease")
    with manager(tmp_path, f"{bucket}/lease") as second:  # it is not renewed any more
        second.save(1, STATE)
        second.wait()
        store.write("lease", "elsewhere pid 8 0 token")  # and now another run takes it over from this one
        with user_error(kind=CheckpointError):
            second.save(2, STATE)
            second.wait()
    assert stored_names(f"{bucket}/lease") == ["00000001"]


@pytest.mark.slow
def test_a_failing_store_is_retried_then_refused_in_one_line(bucket: str, tmp_path: Path) -> None:
    with manager(tmp_path, f"{bucket}/faults") as saving:
        saving.save(1, STATE)
    with faulty(bucket, 3) as proxy:
        for fault, count in (("503", 3), ("500", 2)):
            proxy.inject(fault, count)
            equal(CheckpointReader(tmp_path / "checkpoints").restore(1, LIKE)[0], STATE)
            assert proxy.count == 0
        for fault, cause in (
            ("503", "All 3 retry attempts failed"),
            ("expired", "ExpiredToken: No. Check the credentials"),
            ("denied", "AccessDenied|PERMISSION_DENIED"),
        ):
            proxy.inject(fault, 1000)
            if fault == "expired" and bucket.startswith("gs"):
                continue  # its tokens are renewed by the driver
            with pytest.raises(UserError, match=cause) as raised:
                CheckpointReader(tmp_path / "checkpoints").restore(1, LIKE)
            assert "\n" not in str(raised.value) and "AKIATESTKEY" not in str(raised.value)
            proxy.inject(fault, 0)
        with manager(tmp_path, f"{bucket}/faults") as saving:  # nothing was set aside as damaged
            assert saving.start() == (saving, 1)
            proxy.inject("503", 1000)
            with user_error(kind=CheckpointError):
                saving.save(2, STATE)
                saving.wait()
            proxy.inject("503", 0)
            saving.save(3, STATE)
        assert stored_names(f"{bucket}/faults") == ["00000001", "00000003"]


def test_shards_are_written_once_and_restored_on_another_mesh(bucket: str, tmp_path: Path) -> None:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, turned = Mesh(devices, ("a", "b")), Mesh(devices.T, ("a", "b"))
    values = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "r": np.arange(6, dtype=np.int8)}

    def place(mesh, spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    state = {
        "w": jax.device_put(values["w"], place(mesh, ("a", "b"))),
        "r": jax.device_put(values["r"], place(mesh, ())),
    }
    with manager(tmp_path, f"{bucket}/mesh") as saving:
        saving.save(1, state)
        saving.wait()
        files = saving.place.files(1)
        chunks = [key for key, _ in json.loads(files.read("arrays/process_0/index.json")) if "/c" in key]
        assert sorted(chunks) == ["r/c/0", "w/c/0/0", "w/c/0/1", "w/c/1/0", "w/c/1/1"]
        like = {
            "w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=place(turned, (None, "a"))),
            "r": jax.ShapeDtypeStruct((6,), np.int8, sharding=place(turned, ("b",))),
        }
        restored, _ = saving.restore(1, like)
    equal(restored, values)
