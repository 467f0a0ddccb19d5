"""What pipelines take of memory, read from compiled train steps; nothing runs.

Run:  python benchmarks/pipeline_memory.py [--only=scaling|shipped]

scaling: temporary memory of a model of 0.6 B against the number of microbatches, compiled for eight CPU devices of this
machine and for eight H100s that need not be there. It must not grow with 1f1b and interleaved (by less than 2 % from 8
to 32), and must with gpipe; exits 1 otherwise. shipped: the configs for large models on absent H100s, by schedule;
exits 1 if GPT-3 175B takes more than 40 GiB, or Llama-3 70B more than 45 GiB with every schedule.

What is absent is compiled for with the extra aot (`uv sync --extra aot`); without it the CPU's part is printed, the
message what is missing, and the exit code is 2. Writes benchmarks/results/pipeline_memory.json.
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
from megajax.pipeline.check import measure
from megajax.planning.absent import prepare
from megajax.planning.devices import GIB, read_cluster
from megajax.planning.train_step import compile_train_step
from megajax.training.program import Program
from megajax.training.run_config import RunConfig

CONFIGS = Path(__file__).parents[1] / "configs"
MICROBATCHES = (8, 16, 32)
STAGES, FLAT = 4, 0.02
SCHEDULES = {"1f1b": ("1f1b", 1), "interleaved": ("interleaved", 2), "gpipe": ("gpipe", 1)}
"""Name -> schedule and virtual stages."""

PROTOTYPE = {
    ("gpt3_175b", 128, 1): 18.5,
    ("gpt3_175b", 1024, 1): 18.2,
    ("llama3_70b", 128, 1): 35.9,
    ("llama3_70b", 128, 2): 30.9,
}
"""(config, GPUs, virtual stages) -> temporary GiB of a program written by hand for these two models alone, with the
loss in the tick of its forward (loss_wait 0) and one output projection more to compute again."""
LIMIT_GIB = {"gpt3_175b": 40.0, "llama3_70b": 45.0}
"""Peak, for the best schedule of a config."""


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
    """Bytes of temporaries on absent H100s."""
    cluster, _ = read_cluster("h100:8")
    assert cluster is not None
    return compile_train_step(cfg, cluster).memory.temporary


def scaling(devices: str) -> Iterator[dict[str, Any]]:
    """Lines of schedules on "cpu" or "h100", printed too."""
    measured = {"cpu": on_cpu, "h100": on_gpu}[devices]
    for schedule in SCHEDULES:
        found = [measured(scaled(schedule, microbatches)) / GIB for microbatches in MICROBATCHES]
        jax.clear_caches()
        growth = found[-1] / found[0] - 1
        good = growth > 0.5 if schedule == "gpipe" else abs(growth) <= FLAT
        figures = "".join(f"{gib:9.3f}" for gib in found)
        print(f"{devices:8} {schedule:12} {figures}  {growth:+8.1%}  {'' if good else 'WRONG'}", flush=True)
        yield {
            "devices": devices,
            "schedule": schedule,
            "temporary_gib": dict(zip(map(str, MICROBATCHES), [round(gib, 4) for gib in found], strict=True)),
            "growth": round(growth, 4),
            "as_expected": good,
        }


def chosen() -> Iterator[tuple[str, int, int | None, dict[str, Any]]]:
    """(config, GPUs, rows of a batch or None for the config's, fields of its parallel part)."""
    plain = [{"schedule": "1f1b", "virtual_stages": 1, "loss_wait": wait} for wait in (1, 0)]

    def several(*counts: int) -> list[dict[str, Any]]:
        return [{"schedule": "interleaved", "virtual_stages": count, "loss_wait": 1} for count in counts]

    for gpus, rows in ((128, None), (128, 64), (1024, None)):
        for fields in plain + several(2, 3, 6):
            yield "gpt3_175b", gpus, rows, fields
    yield "gpt3_175b", 1024, 512, plain[0]
    for fields in plain + several(2, 5):
        yield "llama3_70b", 128, None, fields
    for fields in plain[:1] + several(2, 4):
        yield "llama3_405b", 1024, None, fields


def shipped(name: str, gpus: int, rows: int | None, fields: dict[str, Any]) -> dict[str, Any]:
    """One config on that many H100s, compiled; printed too."""
    cfg = load(f"{CONFIGS}/{name.split('_')[0]}.py:{name}")
    cfg = cfg.but(
        parallel=replace(cfg.parallel, **fields), batch=replace(cfg.batch, global_size=rows or cfg.batch.global_size)
    )
    cluster, _ = read_cluster(f"h100:{gpus}")
    assert cluster is not None
    plan = compile_train_step(cfg, cluster)
    jax.clear_caches()
    schedule, memory = plan.schedule, plan.memory
    assert schedule is not None
    virtual = fields["virtual_stages"]
    line = {
        "config": name,
        "gpus": gpus,
        "microbatches": plan.microbatches,
        **fields,
        "recompute": cfg.model.recompute,
        "arguments_gib": round(memory.arguments / GIB, 2),
        "temporary_gib": round(memory.temporary / GIB, 2),
        "peak_gib": round(memory.peak / GIB, 2),
        "prototype_temporary_gib": PROTOTYPE.get((name, gpus, virtual)),
        "ring_slots": schedule.ring_slots,
        "bubble": round(float(measure(schedule).bubble), 5),
        "compile_seconds": round(plan.compile_seconds, 1),
    }
    print(
        f"{name:12}{gpus:6}{plan.microbatches:6} {schedule.name:12}{virtual:2}{schedule.loss_wait:5}"
        f"{memory.arguments / GIB:8.2f}{memory.temporary / GIB:8.2f}{memory.peak / GIB:8.2f}"
        f"{line['prototype_temporary_gib'] or '':>10}{schedule.ring_slots:6}{line['bubble']:9.2%}"
        f"{plan.compile_seconds:9.1f}",
        flush=True,
    )
    return line


def over_limit(lines: list[dict[str, Any]]) -> list[str]:
    """Configs that take more than their limit with every schedule."""
    best = {
        name: min(line["peak_gib"] for line in lines if line["config"] == name)
        for name in {line["config"] for line in lines} & LIMIT_GIB.keys()
    }
    return [name for name, peak in best.items() if peak > LIMIT_GIB[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", choices=("scaling", "shipped"))
    asked = parser.parse_args()
    missing = None
    try:
        prepare()
    except UserError as error:
        missing = error
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    started = time.monotonic()
    figures: dict[str, Any] = {}
    if asked.only != "shipped":
        print(f"{'devices':8} {'schedule':12} " + "".join(f"{'M=' + str(m):>9}" for m in MICROBATCHES) + "    growth")
        figures["scaling"] = [*scaling("cpu"), *(scaling("h100") if missing is None else ())]
    if asked.only != "scaling" and missing is None:
        print(
            f"\n{'config':12}{'GPUs':>6}{'M':>6} {'schedule':12}{'V':>2}{'wait':>5}{'args':>8}{'temp':>8}{'peak':>8}"
            f"{'prototype':>10}{'slots':>6}{'bubble':>9}{'compile':>9}"
        )
        figures["shipped"] = [shipped(*one) for one in chosen()]
    if missing is not None:
        print(f"\n{missing}", file=sys.stderr)
        return 2
    figures["seconds"] = round(time.monotonic() - started)
    outcome.write("pipeline_memory" + (f"_{asked.only}" if asked.only else ""), figures)
    wrong = [f"{one['schedule']} on {one['devices']}" for one in figures.get("scaling", []) if not one["as_expected"]]
    wrong += over_limit(figures.get("shipped", []))
    print("" if not wrong else f"not as it should be: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
