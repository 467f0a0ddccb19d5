"""Pipeline schedules: counts of their tables against formulas, and memory by the number of microbatches."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax

from megajax.config import load
from megajax.config.errors import UserError
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.models.presets.llama import llama3
from megajax.pipeline.check import formulas, measure, violations
from megajax.pipeline.schedule import Schedule, build
from megajax.planning.program.train_step import compile_train_step
from megajax.planning.virtual_devices import GIB, prepare, read_cluster
from megajax.training.program import Program
from megajax.training.run_config import RunConfig

SIZES = (
    *((2, 1, 1), (3, 1, 7), (4, 1, 2), (4, 1, 8), (8, 1, 64), (16, 1, 64), (16, 1, 1536)),
    *((2, 2, 4), (4, 2, 8), (4, 3, 16), (4, 5, 128), (8, 2, 16), (8, 6, 32), (16, 4, 256), (16, 6, 64)),
)
"""(P, V, M); among them fewer microbatches than stages, and a number that stages do not divide."""
HEAD = "schedule       P  V     M wait     F   F+B     B   bubble  slots  in flight"
MICROBATCHES = (8, 16, 32)
STAGES, FLAT = 4, 0.02
SCHEDULES = {"1f1b": ("1f1b", 1), "interleaved": ("interleaved", 2), "gpipe": ("gpipe", 1)}
"""Name -> schedule and virtual stages."""


def schedules() -> dict[str, Any]:
    """Ticks, bubble, activations in flight and ring slots of pipeline schedules: from their tables and from formulas.

    One line for each schedule and size: P stages, V chunks of layers per stage, M microbatches, and `wait`, the ticks
    that a loss waits. Each table is checked (megajax.pipeline.check). Its counts are compared with the formulas here
    and in the library; the exit code is 1 if any two differ. Needs no device.
    """
    print(HEAD)
    lines = []
    for sizes in SIZES:
        name = "1f1b" if sizes[1] == 1 else "interleaved"
        lines += [line("gpipe", sizes, 0), line(name, sizes, 0), line(name, sizes, 1)]
    mismatches = sum(not record["equal"] for record in lines)
    print(f"{len(lines)} tables, {mismatches} differ from the formulas")
    return {"tables": len(lines), "wrong": mismatches, "lines": lines}


def closed_form(name: str, sizes: tuple[int, int, int], wait: int) -> dict[str, Any]:
    """The figures of `count_costs` by formulas (Narayanan et al., 2104.04473, for stages in lockstep)."""
    stages, chunks, microbatches = sizes
    work = microbatches * chunks
    # Ticks with forward passes only, if all are done: until the first loss, and then as long as it waits.
    warm_up = work + stages - 1 if name == "gpipe" else min(stages * chunks - 1 + wait, work + stages - 1)
    ring = warm_up + stages if name != "gpipe" else work
    return {
        "ticks": [warm_up, work + stages - 1 - warm_up, warm_up],
        "bubble": Fraction(stages - 1, work),
        "in_flight": [work if name == "gpipe" else min(work, ring - 2 * s) for s in range(stages)],
        "slots": min(work, ring),
    }


def count_costs(schedule: Schedule) -> dict[str, Any]:
    """ticks: with forward passes only, with both, with backward only; bubble over ideal time; in_flight by stage."""
    figures = measure(schedule)
    kinds = ((True, False), (True, True), (False, True))
    return {
        "ticks": [
            sum(phase.ticks for phase in schedule.phases if (phase.forward, phase.input_gradient) == kind)
            for kind in kinds
        ],
        "bubble": figures.pipeline_bubble,
        "in_flight": list(figures.in_flight),
        "slots": figures.slots,
    }


def line(name: str, sizes: tuple[int, int, int], wait: int) -> dict[str, Any]:
    """Print and return the figures of one schedule, and whether they agree."""
    stages, chunks, microbatches = sizes
    schedule = build(name, stages=stages, microbatches=microbatches, chunks=chunks, loss_wait=wait)
    actual, expected, library = count_costs(schedule), closed_form(name, sizes, wait), formulas(schedule)
    equal = actual == expected and library == measure(schedule) and not violations(schedule)
    ticks = " ".join(f"{n:5}" for n in actual["ticks"])
    size = f"{stages:3} {chunks:2} {microbatches:5} {wait:4}"
    flight = " ".join(map(str, actual["in_flight"]))
    print(f"{name:12} {size} {ticks} {float(actual['bubble']):8.3%} {actual['slots']:6}  {flight}", flush=True)
    if not equal:
        print(f"  WRONG: the formulas say {expected} and {library}; {violations(schedule)[:3]}")
    place = {"schedule": name, "stages": stages, "virtual_stages": chunks, "microbatches": microbatches}
    figures = {**actual, "bubble": str(actual["bubble"]), "spare_slot": schedule.spare_slot, "equal": equal}
    return place | {"loss_wait": wait} | figures


def pipeline_memory() -> dict[str, Any]:
    """Temporary memory of pipelines by the number of microbatches, from compiled train steps; nothing is run.

    Compiles a model of 0.6 B for eight CPU devices (--devices=cpu:8) and for eight virtual H100s (extra aot). From 8 to
    32 microbatches, memory must grow by less than 2 % with 1f1b and interleaved, and by more than half with gpipe;
    otherwise the exit code is 1. compiled_peaks has the figures of large models by schedule.
    """
    if (jax.default_backend(), jax.device_count()) != ("cpu", 8):
        raise UserError("this needs eight CPU devices: --devices=cpu:8")
    prepare()
    print(f"{'devices':8} {'schedule':12} " + "".join(f"{'M=' + str(m):>9}" for m in MICROBATCHES) + "    growth")
    kinds: dict[str, Callable[[RunConfig], int]] = {"cpu": on_cpu, "h100": on_gpu}
    lines = [scaling(devices, memory_of, name) for devices, memory_of in kinds.items() for name in SCHEDULES]
    return {"scaling": lines, "wrong": sum(not record["as_expected"] for record in lines)}


def scaling(devices: str, memory_of: Callable[[RunConfig], int], name: str) -> dict[str, Any]:
    """Print and return the memory of one schedule by microbatches."""
    peaks = [memory_of(scaled(name, microbatches)) / GIB for microbatches in MICROBATCHES]
    jax.clear_caches()
    growth = peaks[-1] / peaks[0] - 1
    as_expected = growth > 0.5 if name == "gpipe" else abs(growth) <= FLAT
    figures = "".join(f"{gib:9.3f}" for gib in peaks)
    print(f"{devices:8} {name:12} {figures}  {growth:+8.1%}  {'' if as_expected else 'WRONG'}", flush=True)
    temporary = dict(zip(map(str, MICROBATCHES), [round(gib, 4) for gib in peaks], strict=True))
    place = {"devices": devices, "schedule": name, "temporary_gib": temporary}
    return place | {"growth": round(growth, 4), "as_expected": as_expected}


def scaled(schedule: str, microbatches: int) -> RunConfig:
    """A model of 16 layers in 4 stages x tensor 2, with that many microbatches."""
    name, virtual = SCHEDULES[schedule]
    model = llama3("8b", sequence_length=2048, vocabulary_size=32000)
    (block,) = model.stack.pattern
    block = replace(block, mixer=replace(block.mixer, heads=16, kv_heads=8), mlp=replace(block.mlp, ffn=4096))
    cfg = load("llama3.py:debug")
    return cfg.but(
        model=replace(model, hidden=1536, stack=replace(model.stack, pattern=(block,), repeats=16)),
        precision=replace(cfg.precision, compute="bfloat16"),
        parallel=ParallelConfig(pipeline=STAGES, tensor=2, sequence=True, schedule=name, virtual_stages=virtual),
        batch=replace(cfg.batch, global_size=microbatches, micro_size=1),
    )


def on_cpu(cfg: RunConfig) -> int:
    """Bytes of temporary memory on CPU devices."""
    program = Program.of(cfg, build_mesh(cfg.parallel, jax.devices()))
    step: Any = program.train_step
    with jax.set_mesh(program.mesh):
        compiled = step.lower(program.state_like(), program.batch_like()).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def on_gpu(cfg: RunConfig) -> int:
    """Bytes of temporary memory on virtual H100s."""
    cluster, _ = read_cluster("h100:8")
    assert cluster is not None
    return compile_train_step(cfg, cluster).memory.temporary
