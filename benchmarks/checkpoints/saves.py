"""Cost of checkpoints."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.checkpoint import array_serialization
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.reader import CheckpointReader


def checkpoint(*, megabytes: int = 500, repeats: int = 4, folder: Path | None = None) -> dict[str, Any]:
    """Cost of a checkpoint in seconds: the wait of the training loop, the time to the commit, and the time to read it.

    The state is float32 noise, which compresses as badly as weights and moments, and is sharded over all devices
    (--devices=cpu:8). --folder: parent of the checkpoints.
    """
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2) if devices.size % 2 == 0 else devices.reshape(-1, 1), ("data", "tensor"))
    saved, resharded = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data", "tensor"), (None, ("data", "tensor")))
    )
    rng, rows, count = np.random.default_rng(0), 4096, 10
    shape = (rows, megabytes * 1_000_000 // 4 // rows // count // 8 * 8)
    state = {f"array{n}": jax.device_put(rng.standard_normal(shape, np.float32), saved) for n in range(count)}
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=resharded) for name, leaf in state.items()}
    plain_context = array_serialization._context

    def with_zstd(partial: bool = False) -> Any:
        context = plain_context()
        context.array.saving.use_compression = True
        return context

    with tempfile.TemporaryDirectory(dir=folder) as place:
        save = time_saves(Path(place) / "plain", state, repeats)
        restore = time_restore(Path(place) / "plain", like)
        array_serialization._context = with_zstd  # ty: ignore[invalid-assignment]
        try:
            compressed = time_saves(Path(place) / "zstd", state, repeats)
        finally:
            array_serialization._context = plain_context
    blocking, total = (statistics.median(save[name]) for name in ("blocking_seconds", "total_seconds"))
    return {
        "state_bytes": sum(leaf.nbytes for leaf in state.values()),
        "devices": f"{devices.size} x {devices[0].device_kind}",
        "save": save,
        "restore_on_another_layout": restore,
        "save_with_zstd": compressed,
        "blocking_share_of_total": round(blocking / total, 4),
    }


def time_saves(folder: Path, state: dict[str, jax.Array], repeats: int) -> dict[str, Any]:
    """Seconds of several saves of a state, one after another."""
    reports = []
    with CheckpointConfig(keep_last=1).build(folder) as manager:
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
    """Seconds to verify and to read the newest checkpoint."""
    reader = CheckpointReader(folder)
    start = time.perf_counter()
    step = reader.newest_intact()
    assert step is not None
    verified = time.perf_counter()
    jax.block_until_ready(reader.restore(step, like)[0])
    return {"verify_seconds": round(verified - start, 3), "read_seconds": round(time.perf_counter() - verified, 3)}
