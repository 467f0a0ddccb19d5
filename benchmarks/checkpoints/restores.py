"""Bytes that a restore reads, and its time."""

import contextlib
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import command_of, results_of

CASES = ("as saved", "another layout", "weights alone")


def restores(
    *, megabytes: int = 1000, processes: tuple[int, ...] = (1, 2), folder: Path | None = None
) -> dict[str, Any]:
    """Bytes that a restore reads, and its time, by processes and layouts; from the disk, not from its cache.

    For each number of processes, a state of float32 noise is saved with that many processes and restored by as many, in
    the layout it was saved in, in another, and its weights alone, a third of it. Bytes are those of read calls of all
    processes, from /proc/PID/io.
    """
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for count in processes:
            place = Path(name) / str(count)
            run("save", place, count, megabytes)
            figures[f"{count} processes"] = rows = {}
            for case in CASES:
                drop_from_cache(place)
                answers = run(case, place, count, megabytes)
                seconds, read, size = zip(*answers, strict=True)
                rows[case] = {"seconds": max(seconds), "bytes_read": sum(read), "bytes_of_arrays": sum(size)}
                rows[case]["read_per_byte"] = round(sum(read) / sum(size), 3)
    return figures


def run(case: str, folder: Path, count: int, megabytes: int) -> list[Any]:
    """All processes of a save or a restore."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = (count, port, folder, megabytes, case)
    commands = [command_of("benchmarks.checkpoints.restores:process", index, *words) for index in range(count)]
    return results_of(commands, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(4 // count))


def drop_from_cache(folder: Path) -> None:
    """Make the next read of these files one from the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_read() -> int:
    """Bytes that this process has read from files until now."""
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


def process(*words: str) -> list[Any]:
    """One of the processes: saves, or restores. Returns seconds, bytes read and bytes of arrays."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from megajax.checkpoint.config import CheckpointConfig
    from megajax.checkpoint.reader import CheckpointReader

    (index, count, port, megabytes), folder, case = (int(words[n]) for n in (0, 1, 2, 4)), Path(words[3]), words[5]
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = Mesh(np.array(jax.devices()).reshape(4), ("data",))
    shape = (4096, megabytes * 1_000_000 // 4 // 4096 // 12 * 4)  # of each of three arrays
    saved = NamedSharding(mesh, PartitionSpec("data"))
    names = ["params.a", *(f"optimizer.{moment}.a" for moment in ("mu", "nu"))]
    if case == "save":

        def make(part: Any) -> np.ndarray:
            sizes = [len(range(*side.indices(size))) for side, size in zip(part, shape, strict=True)]
            return np.random.default_rng(part[0].start or 0).standard_normal(sizes, np.float32)

        state = {name: jax.make_array_from_callback(shape, saved, make) for name in names}
        with CheckpointConfig().build(folder) as manager:
            manager.save(1, state, {})
        return []
    layout = NamedSharding(mesh, PartitionSpec(None, "data")) if case == "another layout" else saved
    chosen = [name for name in names if case != "weights alone" or name.startswith("params.")]
    like = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=layout) for name in chosen}
    reader = CheckpointReader(folder)
    jax.block_until_ready(jax.jit(lambda: 1)())
    if count > 1:
        multihost_utils.sync_global_devices("begin")
    began, read = time.perf_counter(), bytes_read()
    step = reader.newest_intact()
    assert step is not None
    state = jax.block_until_ready(reader.restore(step, like, partial=case == "weights alone")[0])
    size = sum(shard.data.nbytes for leaf in state.values() for shard in leaf.addressable_shards)
    return [round(time.perf_counter() - began, 3), bytes_read() - read, size]
