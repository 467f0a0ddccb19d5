"""Run by test_store_kills.py in each of two processes: restores, checks every element, and saves until it is killed.

Arguments: process, port, folder, URL of the store. Prints `start STEP`, `begin STEP` and `committed STEP`.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.checkpoint.background_saves import CheckpointError
from megajax.checkpoint.config import CheckpointConfig

SHAPES = {"a": (256, 1024), "b": (64,), "c": (32, 512)}


def main() -> None:
    index, port, folder, url = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, coordinator_bind_address=f"127.0.0.1:{port}")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def state_of(step: int) -> dict:
        return {
            name: jax.make_array_from_callback(
                shape, sharding, lambda place, shape=shape: np.full(shape, step, np.float32)[place]
            )
            for name, shape in SHAPES.items()
        }

    with CheckpointConfig(keep_last=2, store=url).build(folder) as manager:
        actual, step = manager.start(), 0
        if actual is not None:
            source, step = actual
            like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in state_of(0).items()}
            state, meta = source.restore(step, like)
            assert meta == {"step": step}
            for array in state.values():
                assert all((np.asarray(shard.data) == step).all() for shard in array.addressable_shards)
        print("start", step, flush=True)
        while True:
            step += 1
            print("begin", step, flush=True)
            try:
                manager.save(step, state_of(step), {"step": step})
                manager.wait()
            except CheckpointError as error:
                print("failed", error, flush=True)
                continue
            print("committed", step, flush=True)


if __name__ == "__main__":
    main()
