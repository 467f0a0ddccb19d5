"""Run by test_processes.py in each of two processes with two fake devices: saves and restores."""

import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.checkpoint import manifest, step_folders
from megajax.checkpoint.background_saves import CheckpointError
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import DamagedStep
from megajax.config.errors import UserError


def put_on_mesh(values, mesh, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def check(array, values):
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def main() -> None:
    index, port, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    manifest.BLOCK_BYTES = 256  # large files are verified while they are read
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, coordinator_bind_address=f"127.0.0.1:{port}")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
    other_mesh = Mesh(np.array(jax.devices()).reshape(4, 1), ("data", "tensor"))
    rng = np.random.default_rng(0)
    values = {"w": rng.standard_normal((64, 32)).astype(np.float32), "r": rng.integers(0, 9, (3,), np.int32)}
    state = {"w": put_on_mesh(values["w"], mesh, "data", "tensor"), "r": put_on_mesh(values["r"], mesh)}
    like = {
        "w": jax.ShapeDtypeStruct(
            (64, 32), np.float32, sharding=NamedSharding(other_mesh, PartitionSpec(None, "data"))
        ),
        "r": jax.ShapeDtypeStruct((3,), np.int32, sharding=NamedSharding(other_mesh, PartitionSpec())),
    }
    with CheckpointConfig(keep_last=2).build(path) as manager:
        assert manager.start() is None
        for step in (1, 2, 3):
            manager.save(step, state, {"step": step})
        manager.wait()
        assert manager.steps() == [2, 3]
        files = manifest.read_manifest(path / "00000003")
        assert {name.split("/")[2] for name in files if "ocdbt.process_" in name} == {
            "ocdbt.process_0",
            "ocdbt.process_1",
        }
        restored, meta = manager.restore(3, like)
        assert meta == {"step": 3}
        for name in values:
            check(restored[name], values[name])

        # One process fails in the background: both are told in seconds, not after Orbax's minutes; step 3 stays.
        if index == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
        began = time.monotonic()
        try:
            manager.save(4, state)
            manager.wait()
            raise AssertionError("the failed save passed for good")
        except CheckpointError as error:
            assert "process 1: " in str(error) and "File too large" in str(error), error
        assert time.monotonic() - began < 30
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert manager.steps() == [2, 3]
        manager.save(4, state, {"step": 4})
        manager.wait()
        assert manager.steps() == [3, 4]

    # Damage in a file that process 1 wrote and alone reads again, in a restore: both fall back to the same step.
    if index == 0:
        flip_a_byte(max((path / "00000004" / "arrays/state/ocdbt.process_1/d").iterdir()))
    as_saved = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
    with CheckpointConfig(keep_last=2).build(path) as manager:
        assert manager.start() == (manager, 4)
        try:
            manager.restore(4, as_saved)
            raise AssertionError("a damaged step was restored")
        except DamagedStep as error:
            assert "process 1: arrays/state/ocdbt.process_1/d/" in str(error), error
        assert manager.start() == (manager, 3)
        restored, _ = manager.restore(3, like)
        check(restored["w"], values["w"])
        try:
            manager.restore(4, like)
            raise AssertionError("a step that was set aside was restored")
        except UserError:
            pass
    assert step_folders.steps_in(path) == [3]

    # Folders that are not shared are noticed when the manager is made.
    try:
        CheckpointConfig().build(path / f"of_process_{index}")
        raise AssertionError("two folders passed for one")
    except UserError as error:
        assert "is not shared by all processes" in str(error)
    # One process can't write: both refuse to start.
    if index == 1:

        def probe(path, process):
            raise UserError("Read-only file system")

        step_folders.probe = probe
    try:
        CheckpointConfig().build(path)
        raise AssertionError("a folder that process 1 can't write passed")
    except UserError as error:
        assert str(error) == "process 1: Read-only file system", error
    print("process", index, "done", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    from megajax.checkpoint import checkpoint_writers

    checkpoint_writers.SHARED_FOLDER_TIMEOUT_SECONDS = 1.0
    main()
