"""Cost of checkpoints and of checks for silent corruption."""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.checkpoint import arrays
from megajax.checkpoint.config import CheckpointConfig, LocalConfig
from megajax.checkpoint.local.manager import LocalCheckpoints
from megajax.checkpoint.reader import CheckpointReader
from megajax.config import load
from megajax.faults.config import RecomputeConfig
from megajax.job.integrity.recompute import CheckGradients
from megajax.job.integrity.replicas import state_hash
from megajax.training.session import Run, setup

SETTINGS = (
    *("model.hidden=512", "model.stack.repeats=8", "model.sequence_length=256", "data.type=MockConfig"),
    *("batch.global_size=4", "batch.micro_size=2", "precision.compute=float32", "evaluation.every=none"),
)
"""A GPT of 11 million weights (a state of 131 MB), whose steps take at least 0.3 s on a CPU."""


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
    plain_context = arrays._context

    def with_zstd(partial: bool = False) -> Any:
        context = plain_context()
        context.array.saving.use_compression = True
        return context

    with tempfile.TemporaryDirectory(dir=folder) as place:
        save = time_saves(Path(place) / "plain", state, repeats)
        restore = time_restore(Path(place) / "plain", like)
        arrays._context = with_zstd  # ty: ignore[invalid-assignment]
        try:
            compressed = time_saves(Path(place) / "zstd", state, repeats)
        finally:
            arrays._context = plain_context
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


def processor_seconds() -> float:
    """Of this process, until now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def save_alone(local: LocalCheckpoints, run: Run, number: int) -> dict[str, float]:
    """Seconds of waiting, of writing, and of processor time of a local save without other work."""
    before = processor_seconds()
    local.save(number, run.state, {})
    local.wait()
    (report,) = local.poll()
    assert report.failure is None, report
    cpu = processor_seconds() - before
    return {"blocking": report.blocking_seconds, "total": report.total_seconds, "cpu": cpu}


def steps_beside(local: LocalCheckpoints, run: Run, every: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of `every` steps without a save, and of as many with one at the first; `rounds` times each, in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds):
        began = time.perf_counter()
        if number % 2:
            local.save(1000 + number, run.state, {})
        for _ in run.steps(every):
            pass
        seconds[number % 2].append(time.perf_counter() - began)
        local.wait()
        assert all(report.failure is None for report in local.poll())
    return seconds


def local_checkpoints(*, every: int = 40, rounds: int = 6, folder: Path | None = None) -> dict[str, Any]:
    """Cost of local checkpoints: the copy to host memory, the background writes, and the steps meanwhile.

    Trains a GPT of 11 million weights (a state of 131 MB). Rounds with and without a local checkpoint in their first
    step alternate, so that other load on the machine affects both.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="local-checkpoints-") as temporary:
        place = Path(temporary)
        run = setup(load("gpt2.py:debug", *SETTINGS, f"run_dir={place / 'run'}"))
        shared = place / "run" / "checkpoints"
        shared.mkdir(parents=True)
        with LocalConfig(every=every, folder=place / "node").build(shared) as local:
            for _ in run.steps(3):
                pass
            local.begin(0, run.state)
            samples = [save_alone(local, run, number) for number in range(1, 5)]
            plain, saving = steps_beside(local, run, every, rounds)
            like = run.program.state_like()
            restore_began = time.perf_counter()
            saved = local.newest_intact()
            assert saved is not None
            jax.block_until_ready(local.restore(saved, like)[0])
            restored = time.perf_counter() - restore_began
            size = local.need
    step = statistics.median(plain) / every
    shares = [with_save / without - 1 for without, with_save in zip(plain, saving, strict=True)]
    blocking, total, cpu = (statistics.median(s[name] for s in samples) for name in ("blocking", "total", "cpu"))
    return {
        "bytes": size,
        "every": every,
        "step_seconds": round(step, 4),
        "blocking_seconds": round(blocking, 4),
        "total_seconds": round(total, 3),
        "cpu_seconds": round(cpu, 3),
        "restore_seconds": round(restored, 3),
        "overhead_percent_median": round(100 * statistics.median(shares), 2),
        "overhead_percent_of_rounds": [round(100 * share, 2) for share in shares],
        "overhead_percent_if_all_writes_delayed_steps": round(100 * cpu / (every * step), 2),
    }


def integrity(*, rounds: int = 5, folder: Path | None = None) -> dict[str, Any]:
    """Cost of the checks for silent corruption: time of a state hash and of a recomputed step, relative to a step.

    Uses replicated data parallelism, so that the whole state has copies. Shares are for a hash every 100 steps and a
    recomputed step every 1000. Run it with --devices=cpu:2.
    """
    place = [f"run_dir={folder}"] if folder else []
    data = ("parallel.data_sharding=replicate", f"parallel.data={jax.device_count()}")
    run = setup(load("gpt2.py:debug", *SETTINGS, *data, *place))
    steps = [info.seconds for info in run.steps(rounds + 2)]
    step, hashed = statistics.median(steps[2:]), state_hash(run.program)
    check = CheckGradients(RecomputeConfig(every=1), run, print, print, ())
    with jax.set_mesh(run.mesh):
        hash_seconds = median_seconds(lambda: hashed(run.state), rounds)
    recompute_seconds = median_seconds(lambda: check.verdict(run, run.step), rounds)
    copied = sum(leaf.bytes for leaf in hashed.leaves if leaf.copies(run.mesh) > 1)
    run.close()
    return {
        "bytes_hashed_per_device": sum(leaf.bytes for leaf in hashed.leaves),
        "bytes_with_copies_per_device": copied,
        "step_seconds": round(step, 5),
        "hash_seconds": round(hash_seconds, 5),
        "recompute_seconds": round(recompute_seconds, 5),
        "hash_every_100": round(hash_seconds / step / 100, 5),
        "recompute_every_1000": round(recompute_seconds / step / 1000, 5),
    }


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call, after an untimed one."""
    call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
