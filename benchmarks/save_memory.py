"""What saves leave in the memory of a process: calls of TensorStore by themselves, saves by Orbax alone, and ours.

    python benchmarks/save_memory.py [--saves=200] [--arrays=20]

Writes benchmarks/results/save_memory.json. Growth of the resident set after a warm-up, and of Python objects that the
garbage collector tracks. Only `saves of a run` calls MegaJAX; each figure is of a process of its own.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import outcome


def growth(call: Callable[[int], object], count: int, warm_up: int) -> dict[str, float]:
    """Growth of memory per call."""

    def size() -> tuple[int, int]:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"), len(gc.get_objects())

    for number in range(warm_up):
        call(number)
    before = size()
    for number in range(warm_up, warm_up + count):
        call(number)
    resident, objects = (round((after - start) / count, 1) for after, start in zip(size(), before, strict=True))
    return {"bytes": resident, "python_objects": objects}


def tensorstore_calls() -> Mapping[str, Callable[[int], object]]:
    """Calls that Orbax makes in a save: two of the first, one of the second for each array and process."""
    import tensorstore as ts

    spec = {"driver": "file", "path": "/tmp/x/"}
    array = {"driver": "zarr3", "kvstore": "memory://", "metadata": {"shape": [8], "data_type": "float32"}}
    return {
        "experimental_collect_matching_metrics('/tensorstore/')": lambda number: (
            ts.experimental_collect_matching_metrics("/tensorstore/")
        ),
        "KvStore.Spec(…).to_json()": lambda number: ts.KvStore.Spec(spec).to_json(),
        "Spec(…).to_json()": lambda number: ts.Spec(array).to_json(),
        "Spec(…) alone": lambda number: ts.Spec(array),
    }


def orbax(arrays: int, metrics: bool) -> Callable[[int], object]:
    import jax
    import tensorstore as ts
    from orbax.checkpoint import v1 as ocp

    if not metrics:
        ts.experimental_collect_matching_metrics = lambda prefix: []
    context, folder = ocp.Context(), tempfile.mkdtemp()
    context.array.saving.enable_pinned_host_transfer = False
    state = {f"w{number}": jax.numpy.ones((4, 4)) for number in range(arrays)}

    def save(number: int) -> None:
        with context:
            ocp.save_async(f"{folder}/{number}", state).result()

    return save


def run(arrays: int) -> Callable[[int], object]:
    import jax

    from megajax.checkpoint.config import CheckpointConfig

    state = {f"w{number}": jax.numpy.ones((4, 4)) for number in range(arrays)}
    manager = CheckpointConfig(keep_last=1).build(tempfile.mkdtemp())

    def save(number: int) -> None:
        manager.save(number + 1, state, {})
        manager.wait()
        manager.poll()

    return save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--arrays", type=int, default=20)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds: dict[str, Callable[[], Any]] = {
        "saves by Orbax alone": lambda: orbax(options.arrays, True),
        "saves by Orbax alone, without the metrics": lambda: orbax(options.arrays, False),
        "saves of a run": lambda: run(options.arrays),
    }
    if options.part == "calls":
        print(json.dumps({name: growth(call, 4000, 500) for name, call in tensorstore_calls().items()}))
    elif options.part:
        print(json.dumps(growth(kinds[options.part](), options.saves, 60)))
    else:

        def figures(part: str) -> Any:
            call = [sys.executable, __file__, "--part", part, "--saves", str(options.saves)]
            call += ["--arrays", str(options.arrays)]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            ended = subprocess.run(call, capture_output=True, text=True, check=True, env=environment)
            return json.loads(ended.stdout.splitlines()[-1])

        outcome.write("save_memory", {"calls": figures("calls"), **{name: figures(name) for name in kinds}})


if __name__ == "__main__":
    main()
