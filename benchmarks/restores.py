"""Bytes that a restore reads, and its time: processes and layouts, from the disk and not from its cache.

    python benchmarks/restores.py [--megabytes=1000] [--processes=1,2] [--before=FOLDER] [--folder=DIR]

Writes benchmarks/results/restores.json. For each number of processes, a state of float32 noise is saved with that many
processes and restored by as many, in the layout it was saved in, in another, and its weights alone, a third of it.
Bytes are those of read calls of all processes, from /proc/PID/io. --before: another checkout, measured as well.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
CASES = ("as saved", "another layout", "weights alone")


def bytes_read() -> int:
    """Bytes that this process has read from files until now."""
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


def drop_from_cache(folder: Path) -> None:
    """The next read of these files is one of the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def process(index: int, count: int, port: int, folder: Path, megabytes: int, case: str | None) -> None:
    """One of the processes: saves, or restores and prints its figures."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from megajax.checkpoint.config import CheckpointConfig
    from megajax.checkpoint.reader import CheckpointReader

    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = Mesh(np.array(jax.devices()).reshape(4), ("data",))
    shape = (4096, megabytes * 1_000_000 // 4 // 4096 // 12 * 4)  # of each of three arrays
    saved = NamedSharding(mesh, PartitionSpec("data"))
    names = ["params.a", *(f"optimizer.{moment}.a" for moment in ("mu", "nu"))]
    if case is None:

        def make(part: Any) -> np.ndarray:
            sizes = [len(range(*side.indices(size))) for side, size in zip(part, shape, strict=True)]
            return np.random.default_rng(part[0].start or 0).standard_normal(sizes, np.float32)

        state = {name: jax.make_array_from_callback(shape, saved, make) for name in names}
        with CheckpointConfig().build(folder) as manager:
            manager.save(1, state, {})
        return
    layout = NamedSharding(mesh, PartitionSpec(None, "data")) if case == "another layout" else saved
    like = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=layout) for name in names}
    like = {name: like[name] for name in names if case != "weights alone" or name.startswith("params.")}
    reader = CheckpointReader(folder)
    jax.block_until_ready(jax.jit(lambda: 1)())
    if count > 1:
        multihost_utils.sync_global_devices("begin")
    began, read = time.perf_counter(), bytes_read()
    step = reader.newest_intact()
    state = reader.restore(step, like, partial=case == "weights alone")[0]
    jax.block_until_ready(state)
    size = sum(shard.data.nbytes for leaf in state.values() for shard in leaf.addressable_shards)
    print(json.dumps([round(time.perf_counter() - began, 3), bytes_read() - read, size]), flush=True)


def run(code: Path, folder: Path, count: int, megabytes: int, case: str | None) -> dict[str, Any]:
    """All processes of a save (case None) or a restore."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    call = [sys.executable, __file__, "--of", str(count), "--port", str(port), "--folder", str(folder)]
    call += ["--megabytes", str(megabytes), *(["--case", case] if case else [])]
    environment = os.environ | {"PYTHONPATH": str(code), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([*call, "--index", str(index)], env=environment, stdout=subprocess.PIPE, text=True)
        for index in range(count)
    ]
    outputs = [child.communicate()[0] for child in running]
    if any(child.returncode for child in running):
        raise SystemExit(f"a process of {count} ended with an error ({case or 'save'})")
    if case is None:
        return {}
    figures = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "seconds": max(seconds for seconds, _, _ in figures),
        "bytes_read": sum(read for _, read, _ in figures),
        "bytes_of_arrays": sum(size for _, _, size in figures),
    }


def measured(code: Path, place: Path, count: int, megabytes: int) -> dict[str, Any]:
    folder = place / f"{code.name}_{count}"
    run(code, folder, count, megabytes, None)
    results = {}
    for case in CASES:
        drop_from_cache(folder)
        results[case] = run(code, folder, count, megabytes, case)
        results[case]["read_per_byte"] = round(results[case]["bytes_read"] / results[case]["bytes_of_arrays"], 3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--folder", type=Path)
    for name in ("--index", "--of", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.index is not None:
        process(options.index, options.of, options.port, options.folder, options.megabytes, options.case)
        return
    import outcome

    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for count in map(int, options.processes.split(",")):
            for label, code in (("before", options.before), ("now", REPOSITORY)):
                if code is not None:
                    (Path(place) / label).mkdir(exist_ok=True)
                    figures.setdefault(f"{count} processes", {})[label] = measured(
                        code, Path(place) / label, count, options.megabytes
                    )
    outcome.write("restores", figures)


if __name__ == "__main__":
    main()
