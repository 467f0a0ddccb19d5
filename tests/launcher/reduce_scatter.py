"""Run by test_training_in_gangs.py, once per process: sums and scatters 4 MiB to each process, repeatedly."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from megajax.processes.start import finish, start

ROUNDS, CHUNK = 20, 1 << 20


def main() -> int:
    assert start(patience=60) is not None
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")

    def scatter(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x[0], "data", scatter_dimension=0, tiled=True)[None]

    scattered = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    rng, failures = np.random.default_rng(0), 0
    for _ in range(ROUNDS):
        values = rng.integers(0, 1000, (2, 2 * CHUNK)).astype(np.float32)
        placed = jax.make_array_from_callback(
            values.shape, NamedSharding(mesh, split), lambda index, values=values: values[index]
        )
        expected = values.sum(0).reshape(2, CHUNK)
        shards = scattered(placed).addressable_shards
        failures += sum(not np.array_equal(shard.data, expected[shard.index]) for shard in shards)
    print(f"{failures} of {ROUNDS} wrong", flush=True)
    finish()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
