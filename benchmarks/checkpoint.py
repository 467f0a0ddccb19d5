"""Cost of a checkpoint in seconds: the wait of the training loop, the time to the commit, and the time to read it.

    python benchmarks/checkpoint.py [--megabytes=500] [--devices=8] [--folder=DIR]

Writes benchmarks/results/checkpoint.json. The state is float32 noise, which compresses as badly as weights and moments.
It is sharded over all devices, which are virtual on a CPU.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import outcome
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.checkpoint import arrays
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import CheckpointReader


def make_state(megabytes: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    rows, count = 4096, 10
    columns = megabytes * 1_000_000 // 4 // rows // count // 8 * 8
    return {
        f"array{number}": jax.device_put(rng.standard_normal((rows, columns), np.float32), sharding)
        for number in range(count)
    }


def time_saves(folder: Path, state: dict[str, jax.Array], repeats: int) -> dict[str, list[float]]:
    with CheckpointConfig(keep_last=1).build(folder) as manager:
        reports = []
        for step in range(1, repeats + 1):
            manager.save(step, state, {})
            manager.wait()
            reports += manager.poll()
    return {
        "blocking_seconds": [round(report.blocking_seconds, 4) for report in reports],
        "total_seconds": [round(report.total_seconds, 3) for report in reports],
        "bytes_on_disk": reports[-1].bytes,
    }


def time_restore(folder: Path, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, float]:
    reader = CheckpointReader(folder)
    start = time.perf_counter()
    step = reader.newest_intact()
    verified = time.perf_counter()
    jax.block_until_ready(reader.restore(step, like)[0])
    return {
        "verify_seconds": round(verified - start, 3),
        "read_seconds": round(time.perf_counter() - verified, 3),
    }


def with_zstd() -> object:
    context = plain_context()
    context.array.saving.use_compression = True
    return context


plain_context = arrays._context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2) if devices.size % 2 == 0 else devices.reshape(-1, 1), ("data", "tensor"))
    state = make_state(options.megabytes, NamedSharding(mesh, PartitionSpec("data", "tensor")))
    resharded = NamedSharding(mesh, PartitionSpec(None, ("data", "tensor")))
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=resharded) for name, leaf in state.items()}
    result = {
        "state_bytes": sum(leaf.nbytes for leaf in state.values()),
        "devices": f"{devices.size} x {devices[0].device_kind}",
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result["save"] = time_saves(Path(folder) / "plain", state, options.repeats)
        result["restore_on_another_layout"] = time_restore(Path(folder) / "plain", like)
        arrays._context = lambda partial=False: with_zstd()
        result["save_with_zstd"] = time_saves(Path(folder) / "zstd", state, options.repeats)
        arrays._context = plain_context
    save = result["save"]
    result["blocking_share_of_total"] = round(
        statistics.median(save["blocking_seconds"]) / statistics.median(save["total_seconds"]), 4
    )
    outcome.write("checkpoint", result)


if __name__ == "__main__":
    main()
