"""Memory of pipelines by the number of microbatches, from compiled train steps; nothing is run.

Run:  python benchmarks/pipeline_memory.py

Compiles a model of 0.6 B for eight CPU devices and for eight virtual H100s, and prints its temporary memory. From 8 to
32 microbatches, it must grow by less than 2 % with 1f1b and interleaved, and by more with gpipe; otherwise the exit
code is 1. compiled_peaks.py has the figures of large models by schedule.

Virtual H100s need the extra aot (`uv sync --extra aot`). Without it, the program prints the figures of the CPU and the
missing package, and exits with 2. Writes benchmarks/results/pipeline_memory.json.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import outcome

from megajax.config import UserError, load
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.presets.llama import llama3
from megajax.planning.program.train_step import compile_train_step
from megajax.planning.virtual_devices import GIB, prepare, read_cluster
from megajax.training.program import Program
from megajax.training.run_config import RunConfig

CONFIGS = Path(__file__).parents[1] / "configs"
MICROBATCHES = (8, 16, 32)
STAGES, FLAT = 4, 0.02
SCHEDULES = {"1f1b": ("1f1b", 1), "interleaved": ("interleaved", 2), "gpipe": ("gpipe", 1)}
"""Name -> schedule and virtual stages."""


def scaled(schedule: str, microbatches: int) -> RunConfig:
    """A model of 16 layers in 4 stages x tensor 2, with that many microbatches."""
    name, virtual = SCHEDULES[schedule]
    model = llama3("8b", sequence_length=2048, vocabulary_size=32000)
    (block,) = model.stack.pattern
    block = replace(block, mixer=replace(block.mixer, heads=16, kv_heads=8), mlp=replace(block.mlp, ffn=4096))
    model = replace(model, hidden=1536, stack=replace(model.stack, pattern=(block,), repeats=16))
    cfg = load(f"{CONFIGS}/llama3.py:debug")
    return cfg.but(
        model=model,
        precision=replace(cfg.precision, compute="bfloat16"),
        parallel=ParallelConfig(pipeline=STAGES, tensor=2, sequence=True, schedule=name, virtual_stages=virtual),
        batch=replace(cfg.batch, global_size=microbatches, micro_size=1),
    )


def on_cpu(cfg: RunConfig) -> int:
    """Bytes of temporaries on CPU devices."""
    mesh = build_mesh(cfg.parallel, jax.devices()[:8])
    program = Program.of(cfg, mesh)
    step: Any = program.train_step
    with jax.set_mesh(mesh):
        compiled = step.lower(program.state_like(), program.batch_like()).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def on_gpu(cfg: RunConfig) -> int:
    """Bytes of temporaries on virtual H100s."""
    cluster, _ = read_cluster("h100:8")
    assert cluster is not None
    return compile_train_step(cfg, cluster).memory.temporary


def scaling(devices: str) -> Iterator[dict[str, Any]]:
    """Lines of schedules on "cpu" or "h100", printed too."""
    peak_of = {"cpu": on_cpu, "h100": on_gpu}[devices]
    for schedule in SCHEDULES:
        peaks = [peak_of(scaled(schedule, microbatches)) / GIB for microbatches in MICROBATCHES]
        jax.clear_caches()
        growth = peaks[-1] / peaks[0] - 1
        as_expected = growth > 0.5 if schedule == "gpipe" else abs(growth) <= FLAT
        figures = "".join(f"{gib:9.3f}" for gib in peaks)
        print(f"{devices:8} {schedule:12} {figures}  {growth:+8.1%}  {'' if as_expected else 'WRONG'}", flush=True)
        yield {
            "devices": devices,
            "schedule": schedule,
            "temporary_gib": dict(zip(map(str, MICROBATCHES), [round(gib, 4) for gib in peaks], strict=True)),
            "growth": round(growth, 4),
            "as_expected": as_expected,
        }


def main() -> int:
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    missing = None
    try:
        prepare()
    except UserError as error:
        missing = error
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    started = time.monotonic()
    print(f"{'devices':8} {'schedule':12} " + "".join(f"{'M=' + str(m):>9}" for m in MICROBATCHES) + "    growth")
    lines = [*scaling("cpu"), *(scaling("h100") if missing is None else ())]
    if missing is not None:
        print(f"\n{missing}", file=sys.stderr)
        return 2
    outcome.write("pipeline_memory", {"scaling": lines, "seconds": round(time.monotonic() - started)})
    unexpected = [f"{line['schedule']} on {line['devices']}" for line in lines if not line["as_expected"]]
    print("" if not unexpected else f"unexpected growth: {', '.join(unexpected)}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
