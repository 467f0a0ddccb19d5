"""A compiled plan as a report and as JSON: memory, custom calls, step time, collectives, memory traffic."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from megajax.metrics.banner import Section
from megajax.metrics.text import byte_size, count, duration
from megajax.planning.cost.costs import Device
from megajax.planning.cost.description import has_formulas
from megajax.planning.cost.estimate import SPEED, Estimate, bytes_per_step, speed
from megajax.planning.cost.step_time import program_traffic, step_time
from megajax.planning.program.audit import Audit, largest_arrays
from megajax.planning.program.collectives import grouped, kernel_rows, runs
from megajax.planning.program.devices import CONTEXT_GIB, GIB, LOST_SHARE, NCCL_GIB
from megajax.planning.program.train_step import TrainPlan
from megajax.planning.search.candidates import Case
from megajax.planning.search.whatif import advice, largest_table
from megajax.planning.show import (
    Report,
    Table,
    classes,
    layout,
    memory_report,
    memory_rows,
    plan_report,
    segments,
    times,
    unit_of,
)

MARGIN = 0.03
"""Fraction of usable memory that a change of a compiled plan must leave: its excess over the formula may change."""
ORIGIN_WIDTH, RESULT_WIDTH = 60, 44
"""Characters of a kernel's origin and result that are shown."""
COMMON_SCOPES = ("while", "body", "eval_jaxpr", "shard_map", "checkpoint")
"""Parts of an operation's path that are left out."""

UNKNOWN_TIME = ("unknown", "the cost model needs facts of the model (megajax.models.facts) and one repeated pattern")


def to_dict(plan: TrainPlan, device: Device, times: Estimate | None, audit: Audit | None = None) -> dict[str, Any]:
    """Everything about a plan; memory, bytes and seconds are of one device.

    Rows of `collectives` are those of `grouped`, with their seconds. times: of `step_time`; None where the formulas do
    not hold for the model.
    """
    memory, cluster = plan.memory, plan.cluster
    collectives = [
        row | {"seconds": moved.seconds}
        for row, moved in zip(
            grouped(plan.contents.collectives, plan.unknown_trips), program_traffic(plan, device), strict=True
        )
    ]
    sizes = ("peak", "arguments", "parameters", "optimizer", "host", "temporary", "outputs", "aliased")
    return {
        "fits": plan.fits,
        **{f"{name}_gib": getattr(memory, name) / GIB for name in sizes},
        "usable_gib": cluster.gpu.usable_gib,
        "device_gib": cluster.gpu.memory_gib,
        "bubble_fraction": plan.bubble,
        "schedule": None if plan.schedule is None else plan.schedule.name,
        "virtual_stages": plan.cfg.parallel.virtual_stages,
        "ring_slots": None if plan.schedule is None else plan.schedule.ring_slots,
        "collectives": collectives,
        "loops": [
            {
                "loop": loop.place.name,
                "trips": list(loop.place.trips),
                "count": runs(loop.place, plan.unknown_trips),
                "conditional": loop.place.conditional,
                "matmuls": loop.matmuls,
            }
            for loop in plan.contents.loops
        ],
        "kernels": kernel_rows(plan.contents.kernels, plan.unknown_trips),
        "attention": list(plan.kernels),
        **(dict.fromkeys(SPEED) if times is None else speed(times)),
        **({} if audit is None else audit.to_dict()),
        "device": cluster.name,
        "devices": cluster.devices,
        "gpus_per_node": cluster.per_node,
        "mesh": plan.mesh,
        "microbatches": plan.microbatches,
        "parameters": plan.parameters,
        "compile_seconds": plan.compile_seconds,
        "jax_version": jax.__version__,
    }


def report(plan: TrainPlan, device: Device, name: str, audit: Audit | None = None) -> tuple[Report, dict[str, Any]]:
    """The report of a compiled plan, and its JSON."""
    memory, here = plan.memory, Case(plan.cfg, plan.cluster, device)
    step = step_time(plan, device) if has_formulas(plan.cfg) else None
    rest = memory.arguments - memory.parameters - memory.optimizer + memory.outputs - memory.aliased
    parts = (
        ("master weights", memory.parameters, "master"),
        ("optimizer state", memory.optimizer, "state"),
        ("temporaries: weights in compute dtype, gradients, activations", memory.temporary, "activations"),
        ("batch and outputs", rest, "working"),
    )
    blocks: list[Section | Table] = [
        ("layout", [*(_layout(plan) if step is None else layout(step)), *_attention(plan)]),
        ("memory of one device, GiB", _memory(plan)),
        ("custom calls", _kernels(plan)),
        ("time of a step, by the cost model", [UNKNOWN_TIME] if step is None else times(step)),
        *(
            []
            if audit is None
            else [traffic_section(audit, device, None if step is None else bytes_per_step(here.estimate))]
        ),
        ("compile", [("time", duration(plan.compile_seconds)), ("jax", jax.__version__), *_options(plan)]),
        _collectives(plan),
        *([] if audit is None else [_largest_kernels(audit)]),
    ]
    if not plan.fits and step is None:
        blocks.append(largest_table(largest_arrays(plan.text)))
    elif not plan.fits:
        excess = memory.peak / GIB - here.estimate.memory.peak_gib
        blocks += advice(here, excess_gib=excess, margin=MARGIN, arrays=largest_arrays(plan.text))
    title, held = f"plan for {plan.cluster.devices} x {plan.cluster.gpu.description}", segments(parts)
    if step is None:
        page = memory_report(title, name, held, device, blocks)
    else:
        remark = "Compiled for virtual GPU devices; times by the cost model, the timeline by formulas."
        page = replace(plan_report(step, name, memory=held), title=title, blocks=blocks, remark=remark)
    return page, to_dict(plan, device, step, audit)


def _layout(plan: TrainPlan) -> list[tuple[str, str]]:
    """Of a model without facts."""
    return [
        ("devices", f"{plan.cluster.devices} in nodes of {plan.cluster.per_node}"),
        ("mesh", ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())),
        ("parameters", f"{count(plan.parameters)} ({plan.parameters:,})"),
        ("microbatches", f"{plan.microbatches} of {plan.cfg.batch.micro_size} rows"),
    ]


def _attention(plan: TrainPlan) -> list[tuple[str, str]]:
    if plan.kernels:
        return [("attention", "; ".join(dict.fromkeys(plan.kernels)))]
    auto = any(getattr(block.mixer, "kernel", None) == "auto" for block in plan.cfg.model.stack.pattern)
    return [("attention", "kernel=auto is what this machine would take: name one in the config")] if auto else []


def _memory(plan: TrainPlan) -> list[tuple[str, str]]:
    memory, gpu = plan.memory, plan.cluster.gpu
    rest = memory.arguments - memory.parameters - memory.optimizer
    reserve = f"{LOST_SHARE:.0%} lost, CUDA {CONTEXT_GIB:g}, NCCL {NCCL_GIB:g}"
    parts = [
        ("weights", memory.parameters, "master weights"),
        ("optimizer", memory.optimizer, "its state"),
        *([("in host memory", memory.host, "beside that")] if memory.host else []),
        ("batch and rest", rest, "other arguments of the step"),
        ("temporary", memory.temporary, "weights in compute dtype, gradients, activations"),
        ("outputs", memory.outputs - memory.aliased, "not in the place of arguments"),
        ("peak", memory.peak, ""),
        ("usable", gpu.usable_gib * GIB, f"of {gpu.memory_gib:g}: {reserve}"),
    ]
    return memory_rows(parts, gpu.usable_gib - memory.peak / GIB)


def _kernels(plan: TrainPlan) -> list[tuple[str, str]]:
    return [
        (
            row["target"],
            f"{'at most ' * row['conditional']}{_count(row['count'])} a step, {row['instructions']} in the program",
        )
        for row in kernel_rows(plan.contents.kernels, plan.unknown_trips)
    ] or [("none", "")]


def _options(plan: TrainPlan) -> list[tuple[str, str]]:
    options = ", ".join(f"{name}={value}" for name, value in plan.cfg.xla.options.items())
    return [("XLA, as asked", options)] if options else []


def _collectives(plan: TrainPlan) -> Table:
    """One line for each kind of collective of each loop, below the loop's own."""
    unknown = ", ".join(loop.place.name for loop in plan.contents.loops if loop.place.times is None)
    note = f"; ?: the compiler does not know the trip count of loop {unknown}, {plan.unknown_trips:,} is taken"
    headings = ("loop, collective", "axis", "in program", "per step", "bytes each time", "bytes per step")
    rows = [*_collective_rows(plan)]
    title = f"collectives of one device{note * bool(unknown)}"
    return Table(title, (*headings, "beside matmuls"), rows, (0, 1, 6))


def _collective_rows(plan: TrainPlan) -> Iterator[Sequence[str]]:
    rows = grouped(plan.contents.collectives, plan.unknown_trips)
    for loop in plan.contents.loops:
        place = loop.place
        inside = [row for row in rows if row["loop"] == place.name]
        if not inside and not loop.matmuls:
            continue
        indent = "  " * len(place.path)
        trips = " x ".join("?" if trips is None else f"{trips:,}" for trips in place.trips)
        heading = (f"{place.name}: {trips} times" if place.path else "step") + " at most" * place.conditional
        yield f"{indent}{heading}, {loop.matmuls} matmul{'s' * (loop.matmuls != 1)}", "", "", "", "", "", ""
        for row in inside:
            yield (
                f"{indent}  {row['kind']}{' (in a branch)' * row['conditional']}",
                row["axis"],
                str(row["instructions"]),
                _count(row["count"]),
                byte_size(row["bytes_once"] / row["instructions"]),
                "?" if row["bytes"] is None else byte_size(row["bytes"]),
                "yes" if row["overlapped"] else "no",
            )


def traffic_section(audit: Audit, device: Device, predicted: dict[str, float] | None) -> Section:
    """Bytes by class, and how conditionals and loops of unknown trip count are counted.

    predicted: by formula; None where there is none for the model.
    """
    (_, unit), plain = unit_of(audit.by_class()["total"]), audit.to_dict()
    title, (*lines,) = classes(audit.by_class(), device, predicted)
    if workspace := plain["bytes_of_workspace"]:
        lines.append(("cuBLAS workspace", f"{workspace / unit:8.2f}  of matmul: scratch space, at most"))
    counted, most = plain["bytes_in_branches"].values()
    if most:
        text = f"{counted / unit:8.2f}  of it in conditionals; {most / unit:.2f} if every branch ran"
        lines.append(("in branches", text))
    if loops := plain["loops_of_unknown_rounds"]:
        some = ", ".join(loops[:4]) + (f" and {len(loops) - 4} more" if len(loops) > 4 else "")
        lines.append(("unknown trip counts", f"of loop {some}; counted as docs/planning.md says"))
    return title, lines


def _largest_kernels(audit: Audit) -> Table:
    """The kernels that move most bytes per step; equal ones are one row."""
    plain = audit.to_dict()
    name, unit = unit_of(plain["bytes_per_step"]["total"])
    rows = [
        (
            f"{row['bytes'] / unit:.2f}",
            row["work"],
            row["loop"] or "step",
            f"{row['runs']:,}",
            f"{row['bytes_once'] / row['instructions'] / 2**20:,.1f}",
            _cut(row["result"]),
            _end("/".join(part for part in row["origin"].split("/") if part not in COMMON_SCOPES)),
        )
        for row in plain["largest_kernels"]
    ]
    return Table("kernels that move most", (name, "work", "loop", "runs", "MiB each", "result", "origin"), rows,
                 (1, 2, 5, 6))  # fmt: skip


def _cut(text: str) -> str:
    return text if len(text) <= RESULT_WIDTH else text[: RESULT_WIDTH - 1] + "…"


def _end(text: str) -> str:
    return text if len(text) <= ORIGIN_WIDTH else f"...{text[3 - ORIGIN_WIDTH :]}"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
