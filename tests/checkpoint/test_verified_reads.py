"""Large files are verified while they are read: a restore uses the bytes that were hashed, and reads them once."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from user_errors import user_error

from megajax.checkpoint import manifest, verified_reads, zarr_reader
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import CheckpointReader, DamagedStep
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.storage import disk

BLOCK = 512


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(verified_reads, "BLOCK_BYTES", BLOCK)


def layout(*axes: str | None) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    return NamedSharding(mesh, P(*axes))


def state(step: int) -> dict[str, jax.Array]:
    values = np.arange(64 * 96, dtype=np.float32).reshape(64, 96) + step
    return {
        "params.rows": jax.device_put(values, layout("a")),
        "params.both": jax.device_put(values, layout("a", "b")),
        "params.copies": jax.device_put(values.astype(jnp.bfloat16), layout()),
        "optimizer.columns": jax.device_put(values, layout(None, "b")),
        "flags": jax.device_put(np.arange(96) % 3 == 0, layout()),
        "step": jnp.int32(step),
    }


def like(**axes: Any) -> dict[str, Any]:
    leaves = jax.eval_shape(lambda: {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in state(0).items()})
    shardings = {name: layout(*axes.get(name, ())) for name in leaves}
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name]) for name, x in leaves.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with CheckpointConfig().build(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step), {"step": step})
    return tmp_path


def largest(step: Path) -> str:
    """The largest file, which has several blocks."""
    entries = manifest.read_manifest(step)
    return max((name for name in entries if "block" in entries[name]), key=lambda name: entries[name]["bytes"])


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_a_flipped_bit_anywhere_is_found_and_the_step_before_is_used(folder: Path, capfd) -> None:
    """A bit in every part of every file: values, gaps, and nodes of the database."""
    newest, pristine = folder / "00000002", folder.parent / "pristine"
    shutil.copytree(newest, pristine)
    draw, found = np.random.default_rng(0), 0
    for name in disk.files_below(pristine):
        size = (pristine / name).stat().st_size
        places = range(size) if size < 8 else {0, *draw.integers(size, size=size // (8 * BLOCK) + 1).tolist()}
        for at in places:
            flip(newest / name, at)
            with CheckpointConfig().build(folder) as manager:
                source, step = manager.start() or (None, None)
                assert source is manager
                if step == 2:
                    with pytest.raises(DamagedStep, match=r"checkpoint step 2 .* is damaged: "):
                        manager.restore(2, like())
                    assert manager.start() == (manager, 1)
                restored, meta = manager.restore(1, like())
                assert meta == {"step": 1} and int(restored["step"]) == 1
            assert name.rsplit("/", 1)[-1] in capfd.readouterr().err
            shutil.rmtree(folder / "00000002.damaged")
            shutil.copytree(pristine, newest)
            found += 1
    assert found > 7


def test_other_damage_of_a_large_file_is_found(folder: Path, capfd) -> None:
    newest, other = folder / "00000002", folder / "00000001"
    name, donor = largest(newest), largest(other)
    content = (newest / name).read_bytes()
    for damaged in (content[:-1], content + b"x", b"", (other / donor).read_bytes()[: len(content)], None):
        (newest / name).unlink() if damaged is None else (newest / name).write_bytes(damaged)
        reader = CheckpointReader(folder)
        if (step := reader.newest_intact()) == 2:  # another step's file, of the same size
            assert damaged is not None and len(damaged) == len(content)
            with user_error(kind=DamagedStep):
                reader.restore(2, like())
            step = reader.newest_intact()
        assert step == 1
        (newest / name).write_bytes(content)
    assert CheckpointReader(folder).newest_intact() == 2


def test_a_file_that_changes_after_the_choice_is_found(folder: Path) -> None:
    reader = CheckpointReader(folder)
    assert reader.newest_intact() == 2
    reader.restore(2, like())
    name = largest(folder / "00000002")
    flip(folder / "00000002" / name, 700)
    with user_error(kind=DamagedStep):
        reader.restore(2, like())


def test_a_read_of_some_arrays_verifies_only_those(folder: Path) -> None:
    step = folder / "00000002"
    name = largest(step)
    stored = StoredArrays(step)
    first = {key: place for key, place in stored._index.items() if not isinstance(place, bytes)}
    moment = next(place.start for key, place in first.items() if key.startswith("optimizer."))
    weight = next(place.start for key, place in first.items() if key.startswith("params.rows"))
    flip(step / name, moment + 600)
    rows, reader = state(2)["params.rows"], CheckpointReader(folder)
    box = tuple(slice(0, side) for side in rows.shape)
    np.testing.assert_array_equal(reader.use_arrays(2, lambda stored: stored.read("params.rows", box)), rows)
    flip(step / name, weight + 1000)
    with user_error():
        reader.use_arrays(2, lambda stored: stored.read("params.rows", box))


def test_each_byte_is_read_once(folder: Path, monkeypatch) -> None:
    name, read = largest(folder / "00000002"), list[tuple[int, int]]()
    total = (folder / "00000002" / name).stat().st_size
    real = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        size = real(descriptor, buffers, offset)
        if os.fstat(descriptor).st_size == total:
            read.append((offset, offset + size))
        return size

    monkeypatch.setattr(os, "preadv", counted)
    hashed: list[str] = []
    monkeypatch.setattr(manifest, "_hash", lambda folder, name, first, last: hashed.append(name) or "")
    monkeypatch.setattr(manifest, "block_fault", lambda entry, block, actual: None)
    reader = CheckpointReader(folder)
    assert reader.newest_intact() == 2
    reader.restore(2, like(**{"params.rows": ("a",), "params.both": ("a", "b"), "optimizer.columns": (None, "b")}))
    assert sorted(read) == [(start, min(start + BLOCK, total)) for start in range(0, total, BLOCK)]
    assert hashed and name not in hashed


def test_a_step_that_is_saved_anew_is_read_anew(tmp_path: Path) -> None:
    like = {"values": jax.ShapeDtypeStruct((4096,), jnp.float32)}
    with CheckpointConfig().build(tmp_path) as manager:
        for value in (1, 2):
            manager.save(1, {"values": jnp.zeros(4096)})
            manager.save(2, {"values": jnp.full(4096, value, jnp.float32)})
            manager.wait()
            assert manager.restore(2, like)[0]["values"][0] == value
            manager.go_back(1)


def test_columns_of_many_arrays_take_little_memory(tmp_path: Path, monkeypatch) -> None:
    """The rows between the parts of a column are read and hashed too, but not for all arrays at a time."""
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 2**15)
    monkeypatch.setattr(zarr_reader, "BUFFER_BYTES", 2**18)
    with CheckpointConfig().build(tmp_path) as manager:
        manager.save(1, {f"columns{number:02}": jnp.full((256, 256), number, jnp.float32) for number in range(24)})
    stored = StoredArrays(tmp_path / "00000001")
    tracemalloc.start()
    columns = stored.read_all([(name, (slice(0, 256), slice(8, 12))) for name in stored.arrays])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [column.tolist() for column in columns] == [[[number] * 4] * 256 for number in range(24)]
    assert peak < 2 * 2**20, peak  # of 6 MiB


def test_a_step_of_format_1_is_verified_and_then_restored(folder: Path, capfd) -> None:
    step = folder / "00000002"
    names = [name for name in disk.files_below(step) if name != manifest.MANIFEST]
    manifest.BLOCK_BYTES = 2**30  # one hash for each file
    entries = manifest.hash_files(step, names)
    manifest.BLOCK_BYTES = BLOCK
    document = {"format": 1, "files": entries, "seal": manifest.seal(entries)}
    (step / manifest.MANIFEST).write_text(json.dumps(document))
    restored, _ = CheckpointReader(folder).restore(2, like())
    np.testing.assert_array_equal(restored["params.both"], state(2)["params.both"])
    largest = max(names, key=lambda name: (step / name).stat().st_size)
    flip(step / largest, 3000)
    assert CheckpointReader(folder).newest_intact() == 1
    assert largest in capfd.readouterr().err


def test_a_cyclic_index_of_a_database_is_refused(tmp_path, monkeypatch) -> None:
    node = "btree::a:0:10"
    pages = {None: {"versions": [{"generation_number": 1, "root": {"location": node}}]}}
    pages[node] = {"entries": [{"location": node, "subtree_common_prefix": b""}]}
    ocdbt = SimpleNamespace(dump=lambda base, location=None: SimpleNamespace(result=lambda: pages[location]))
    opened = SimpleNamespace(open=lambda spec: SimpleNamespace(result=lambda: None))
    monkeypatch.setattr(zarr_reader, "ts", SimpleNamespace(KvStore=opened, ocdbt=ocdbt))
    with pytest.raises(ValueError, match=f"two nodes of its index refer to {node}"):
        zarr_reader.database_index(tmp_path, lambda place: None)
