"""Cost of each recomputation setting: compile time, step time, memory.

Run:  python benchmarks/recompute.py [--config=FILE] [--rounds=8] [--steps=3] [--deviceless=CONFIG --devices=h100:8]

Short rounds of all settings alternate, so that other load on the machine affects all. Ratios are relative to `none`.
Temporary memory is the compiler's; kept memory is computed from the shapes of the tensors that layers save for a
microbatch. --deviceless also compiles a config for virtual GPUs (extra aot) and reports memory only. Writes
benchmarks/results/recompute.json.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import outcome

from megajax.config import UserError, load
from megajax.job.banner import saved_by_layers
from megajax.planning.program.train_step import compile_train_step
from megajax.planning.virtual_devices import GIB, prepare, read_cluster
from megajax.training import setup
from megajax.training.run_config import RunConfig
from megajax.training.session import Run

MIB = 2**20
WAYS = {
    "none": ["recompute=none"],
    "norm": ["recompute=norm"],
    "selective": ["recompute=selective"],
    "selective, mlp": ["recompute=norm,latent,activation,mlp"],
    "selective, residual": ["recompute=norm,latent,activation,residual"],
    "selective, core_attention": ["recompute=norm,latent,activation,core_attention"],
    "selective in half the layers": ["recompute=selective", "recompute_layers=HALF"],
    "full in half the layers": ["recompute=full", "recompute_layers=HALF"],
    "selective, no loop over layers": ["recompute=selective", "unroll=none"],
    "full": ["recompute=full"],
    "full, in twos": ["recompute=full", "layers_per_checkpoint=2"],
    "selective, mlp on the host": ["recompute=selective", "offload=mlp"],
    "full, input on the host": ["recompute=full", "offload=input"],
}
"""Name -> settings of the model, where HALF is half its layers."""


def loaded(config: str, name: str) -> RunConfig:
    """A config that keeps and computes again so."""
    half = str(load(config).model.stack.layers() // 2)
    return load(config, *[f"model.{setting}".replace("HALF", half) for setting in WAYS[name]])


def seconds(run: Run, batch: object, steps: int) -> float:
    """Of a step."""
    start = time.perf_counter()
    for _ in range(steps):
        run.state, metrics = run.train_step(run.state, batch)
    jax.block_until_ready(metrics)
    return (time.perf_counter() - start) / steps


def compiled(run: Run, batch: object) -> dict[str, Any]:
    """Time to compile, and memory."""
    start = time.perf_counter()
    memory = run.train_step.lower(run.state, batch).compile().memory_analysis()
    record = {"compile_seconds": round(time.perf_counter() - start, 2)}
    saved = saved_by_layers(run, run.cfg.model)[""]
    return record | {
        "temporary_mib": round(memory.temp_size_in_bytes / MIB, 1),
        "kept_mib_per_layer": [round(layer.device / MIB, 2) for layer in saved],
        "kept_on_the_host_mib_per_layer": [round(layer.host / MIB, 2) for layer in saved],
    }


def measure_here(config: str, rounds: int, steps: int) -> dict[str, Any]:
    """On the devices of this machine."""
    records: dict[str, Any] = {}
    runs = {name: setup(loaded(config, name)) for name in WAYS}
    batches = {name: next(run.batches)[0] for name, run in runs.items()}
    any_run = runs["none"]
    precision = any_run.cfg.precision.matmul_precision()
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with jax.set_mesh(any_run.mesh), jax.default_matmul_precision(precision):
        for name, run in runs.items():
            records[name] = compiled(run, batches[name])
        for number in range(rounds + 1):
            for name, run in runs.items():
                samples = seconds(run, batches[name], steps)
                if number:
                    times[name].append(samples)
    for name, run in runs.items():
        run.close()
        records[name] |= {
            "step_ms": round(1e3 * statistics.median(times[name]), 2),
            "ratio_of_medians": round(statistics.median(times[name]) / statistics.median(times["none"]), 3),
            "ratio_of_fastest": round(min(times[name]) / min(times["none"]), 3),
        }
    return records


def elsewhere(config: str, devices: str) -> dict[str, Any]:
    """Compiled for virtual GPU devices: GiB of one of them."""
    cluster, problems = read_cluster(devices, 8)
    if cluster is None:
        raise UserError(f"--devices={devices}: {problems[0].message}")
    records = {}
    for name in WAYS:
        start = time.perf_counter()
        plan = compile_train_step(loaded(config, name), cluster)
        records[name] = {
            "compile_seconds": round(time.perf_counter() - start, 1),
            "temporary_gib": round(plan.memory.temporary / GIB, 2),
            "peak_gib": round(plan.memory.peak / GIB, 2),
        }
        print(name, records[name], flush=True)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="quickstart.py")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--deviceless")
    parser.add_argument("--devices", default="h100:8")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"config": arguments.config, "device": jax.devices()[0].device_kind}
    try:
        if arguments.deviceless:
            prepare()
            figures[f"{arguments.deviceless} on {arguments.devices}, deviceless"] = elsewhere(
                arguments.deviceless, arguments.devices
            )
        figures["here"] = measure_here(arguments.config, arguments.rounds, arguments.steps)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    outcome.write("recompute", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
