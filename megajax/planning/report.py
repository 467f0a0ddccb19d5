"""A compiled plan as tables for people and as JSON for programs."""

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import jax
import rich.console
from rich.table import Table

from megajax.config.errors import UserError
from megajax.metrics import banner
from megajax.metrics.banner import Section
from megajax.metrics.text import count, duration
from megajax.planning.cost import formula
from megajax.planning.cost.costs import Device, known_device
from megajax.planning.cost.estimate import bytes_per_step, speed
from megajax.planning.cost.formula import times
from megajax.planning.cost.step_time import step_time
from megajax.planning.program import audit_report
from megajax.planning.program.audit import Audit
from megajax.planning.program.collectives import grouped, kernel_rows, runs
from megajax.planning.program.devices import CONTEXT_GIB, GIB, LOST_SHARE, NCCL_GIB
from megajax.planning.program.train_step import TrainPlan

NAMELESS = "step"
"""How the table names the part of a program that is outside of all loops."""


def to_dict(plan: TrainPlan, device: Device | None = None, found: Audit | None = None) -> dict[str, Any]:
    """Everything about a plan; memory, bytes and seconds are of one device.

    Rows of `collectives` are those of `grouped`, with how long they take. device: see `timed`; found: the program's
    memory traffic, where it is asked for.
    """
    memory, cluster, time = plan.memory, plan.cluster, step_time(plan, device)
    collectives = [
        row | {"seconds": moved.seconds}
        for row, moved in zip(grouped(plan.contents.collectives, plan.counts), time.traffic, strict=True)
    ]
    return {
        "fits": plan.fits,
        "peak_gib": memory.peak / GIB,
        "usable_gib": cluster.gpu.usable_gib,
        "device_gib": cluster.gpu.memory_gib,
        "arguments_gib": memory.arguments / GIB,
        "parameters_gib": memory.parameters / GIB,
        "optimizer_gib": memory.optimizer / GIB,
        "host_gib": memory.host / GIB,
        "temporary_gib": memory.temporary / GIB,
        "outputs_gib": memory.outputs / GIB,
        "aliased_gib": memory.aliased / GIB,
        "bubble_fraction": plan.bubble,
        "schedule": None if plan.schedule is None else plan.schedule.name,
        "virtual_stages": plan.cfg.parallel.virtual_stages,
        "ring_slots": None if plan.schedule is None else plan.schedule.ring_slots,
        "collectives": collectives,
        "loops": [
            {
                "loop": loop.place.name,
                "trips": list(loop.place.trips),
                "count": runs(loop.place, plan.counts),
                "conditional": loop.place.conditional,
                "matmuls": loop.matmuls,
            }
            for loop in plan.contents.loops
        ],
        "kernels": kernel_rows(plan.contents.kernels, plan.counts),
        "attention": list(plan.kernels),
        **speed(time),
        **({} if found is None else audit_report.to_dict(found)),
        "device": cluster.name,
        "devices": cluster.devices,
        "gpus_per_node": cluster.per_node,
        "mesh": plan.mesh,
        "microbatches": plan.microbatches,
        "parameters": plan.cfg.model.parameter_count().total,
        "compile_seconds": plan.compile_seconds,
        "jax_version": jax.__version__,
    }


def write_json(plan: TrainPlan, path: Path, device: Device | None = None, found: Audit | None = None) -> None:
    """Raises UserError where the file can't be written."""
    try:
        path.write_text(json.dumps(to_dict(plan, device, found), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def show(plan: TrainPlan, file: TextIO | None = None, device: Device | None = None, found: Audit | None = None) -> None:
    """Print the facts and the tables; plain text where it is not a terminal. device, found: see `to_dict`."""
    file = file or sys.stdout
    title = f"plan for {plan.cluster.devices} x {plan.cluster.gpu.description}"
    facts, tables = sections(plan, device), [collective_table(plan)]
    if found is not None:
        device = device or known_device(plan.cluster.name)
        predicted = bytes_per_step(formula.plan(plan.cfg, plan.cluster, device))
        facts.insert(-1, audit_report.section(found, device, predicted))
        tables.append(audit_report.kernel_table(found))
    unknown = ", ".join(loop.place.name for loop in plan.contents.loops if loop.place.times is None)
    taken = f"the outermost is taken to run {plan.counts.rounds([None]):,} times"
    note = f"? : the compiler does not know how often loop {unknown} runs; {taken}" if unknown else ""
    if file.isatty():
        console = rich.console.Console(file=file, highlight=False)
        console.print(banner.box(title, facts), "", *tables, note, sep="\n")
        return
    drawn = StringIO()
    rich.console.Console(file=drawn, width=160, highlight=False, color_system=None).print(*tables, sep="\n")
    lines = [banner.plain(title, facts), "", *(line.rstrip() for line in drawn.getvalue().splitlines()), note]
    print("\n".join(lines).rstrip(), file=file)


def sections(plan: TrainPlan, device: Device | None = None) -> list[Section]:
    """What `banner.plain` and `banner.box` print."""
    cluster, memory, parameters = plan.cluster, plan.memory, plan.cfg.model.parameter_count()
    gpu, batch = cluster.gpu, plan.cfg.batch
    room = gpu.usable_gib - memory.peak / GIB
    rest = memory.arguments - memory.parameters - memory.optimizer
    reserve = f"{LOST_SHARE:.0%} lost, CUDA {CONTEXT_GIB:g}, NCCL {NCCL_GIB:g}"
    layout = [
        ("devices", f"{cluster.devices} in {cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.per_node}"),
        ("mesh", ", ".join(f"{name} {size}" for name, size in plan.mesh.items())),
        ("parameters", f"{count(parameters.total)} ({parameters.total:,})"),
        (
            "microbatches",
            f"{plan.microbatches} of {batch.micro_size} rows, {plan.cfg.model.sequence_length} tokens each",
        ),
        ("attention", "; ".join(dict.fromkeys(plan.kernels))),
    ]
    if plan.schedule is not None:
        chunks = f", {plan.schedule.chunks} chunks a stage" if plan.schedule.chunks > 1 else ""
        layout.append(("schedule", f"{plan.schedule.name}{chunks}, {plan.schedule.ring_slots} ring slots"))
        layout.append(("bubble", f"{plan.bubble:.2%} over ideal time"))
    held = [
        ("weights", f"{_gib(memory.parameters)}  master weights"),
        ("optimizer", f"{_gib(memory.optimizer)}  its state"),
        *([("in host memory", f"{_gib(memory.host)}  beside that")] if memory.host else []),
        ("batch and rest", f"{_gib(rest)}  other arguments of the step"),
        ("temporary", f"{_gib(memory.temporary)}  weights in compute dtype, gradients, activations"),
        ("outputs", f"{_gib(memory.outputs - memory.aliased)}  not in the place of arguments"),
        ("peak", f"{_gib(memory.peak)}"),
        ("usable", f"{gpu.usable_gib:8.2f}  of {gpu.memory_gib:g}: {reserve}"),
        ("fits", f"{'yes' if plan.fits else 'NO':>8}  {abs(room):.2f} {'to spare' if room >= 0 else 'too much'}"),
    ]
    kernels = [
        (
            row["target"],
            f"{'at most ' * row['conditional']}{_times(row['count'])} a step, {row['instructions']} in the program",
        )
        for row in kernel_rows(plan.contents.kernels, plan.counts)
    ] or [("none", "")]
    return [
        ("layout", layout),
        ("memory of one device, GiB", held),
        ("custom calls", kernels),
        ("time of a step, by the cost model", times(step_time(plan, device))),
        ("compile", [("time", duration(plan.compile_seconds)), ("jax", jax.__version__), *_asked(plan)]),
    ]


def _asked(plan: TrainPlan) -> list[tuple[str, str]]:
    options = ", ".join(f"{name}={value}" for name, value in plan.cfg.xla.options.items())
    return [("XLA, as asked", options)] if options else []


def collective_table(plan: TrainPlan) -> Table:
    """One line for each kind of collective of each loop, below the loop's own."""
    table = Table(box=None, pad_edge=False, title="collectives of one device", title_justify="left", title_style="")
    table.add_column("loop, collective")
    table.add_column("axis")
    for name in ("in program", "per step", "bytes each time", "bytes per step"):
        table.add_column(name, justify="right")
    table.add_column("beside matmuls")
    rows = grouped(plan.contents.collectives, plan.counts)
    for loop in plan.contents.loops:
        place = loop.place
        inside = [row for row in rows if row["loop"] == place.name]
        if not inside and not loop.matmuls:
            continue
        indent = "  " * len(place.path)
        trips = " x ".join("?" if trips is None else f"{trips:,}" for trips in place.trips)
        heading = f"{place.name}: {trips} times" if place.path else NAMELESS
        heading += " at most" if place.conditional else ""
        table.add_row(f"{indent}{heading}, {loop.matmuls} matmul{'s' * (loop.matmuls != 1)}", style="bold")
        for row in inside:
            table.add_row(
                f"{indent}  {row['kind']}{' (in a branch)' if row['conditional'] else ''}",
                row["axis"],
                str(row["instructions"]),
                _times(row["count"]),
                _amount(row["bytes_once"] / row["instructions"]),
                "?" if row["bytes"] is None else _amount(row["bytes"]),
                "yes" if row["overlapped"] else "no",
            )
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:8.2f}"


def _times(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _amount(size: float) -> str:
    """Bytes in the unit that suits them: 36 B, 64.0 MiB, 1,024.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
