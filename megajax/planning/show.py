"""Plans as tables for a terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.metrics.banner import Report, Section, Table
from megajax.metrics.text import byte_size, count, duration
from megajax.models.protocol import counted
from megajax.planning.cost.estimate import Estimate, bytes_per_step
from megajax.planning.cost.serving import Serving, batches
from megajax.planning.program.devices import GIB, MIB, Device

BYTE_CLASSES = {
    "copies": "slices, updates, copies, transposes, zeros",
    "elementwise": "casts, additions, norms, activations, the optimizer",
    "matmul": "with what is fused into them",
    "attention": "",
    "collective": "what they read and write in memory",
}
"""Classes of memory traffic, and what is in them."""
FIGURES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "step, s": lambda plan: f"{plan['step_seconds']:#.4g}".rstrip("."),
    "tokens/s/GPU": lambda plan: f"{plan['tokens_per_second_per_device']:,.0f}",
    "MFU": lambda plan: f"{plan['mfu_causal']:.1%}",
    "bubble": lambda plan: f"{plan['bubble_seconds'] / plan['step_seconds']:.1%}",
    "exposed": lambda plan: f"{plan['exposed_seconds'] / plan['step_seconds']:.1%}",
    "peak GiB": lambda plan: f"{plan['peak_gib']:.1f}",
    "fits": lambda plan: "yes" if plan["fits"] else "NO",
}
"""Columns of tables that list plans, from the figures of a plan's JSON."""
BYTE_UNITS = (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB))


def cells(plan: Mapping[str, Any]) -> list[str]:
    """A plan in the columns of FIGURES; nothing where its figures are unknown."""
    return [text(plan) if plan.get("step_seconds") else "" for text in FIGURES.values()]


def plan_report(plan: Estimate) -> Report:
    """Layout, memory, collectives, memory traffic and times of a plan by formula."""
    run, device = plan.run, plan.run.device
    usable = ("usable", device.usable_gib * GIB, f"of {device.memory_gib:g}")
    memory = [*memory_parts(plan), ("peak", plan.memory.peak, ""), usable]
    collectives = [
        (
            f"{row.axis}: {row.kind}",
            f"{row.count:9,.0f} x {row.bytes / row.count / MIB:8,.1f} MiB {row.seconds:9.3f} s, "
            f"{row.exposed:.3f} exposed  {row.what}",
        )
        for row in plan.traffic
    ] or [("none", "")]
    megatron = [("Megatron-LM says", f"{each.total / GIB:8.2f}  by its own report") for each in [plan.report] if each]
    return Report(
        f"plan for {run.devices} x {device.name}, by formula",
        [
            ("layout", layout(plan)),
            ("memory of one device, GiB", [*memory_rows(memory, device.usable_gib - plan.memory.peak_gib), *megatron]),
            ("collectives of one device and step", collectives),
            traffic_by_class(bytes_per_step(plan), device),
            ("time of a step", times(plan)),
        ],
    )


def memory_parts(plan: Estimate) -> list[tuple[str, float, str]]:
    """Name, bytes and remark of the parts of a device's memory by formula."""
    memory = plan.memory
    return [
        ("weights", memory.parameters, "master weights"),
        ("optimizer", memory.optimizer, "its state"),
        ("weights in use", memory.weights, "in compute dtype"),
        ("gradients", memory.gradients, "added up over microbatches"),
        ("activations", memory.activations, "kept for the backward pass"),
        ("working", memory.working, "temporaries of a layer or the loss, and collectives"),
    ]


def layout(plan: Estimate) -> list[tuple[str, str]]:
    """Devices, mesh, parameters, microbatches, schedule."""
    run, flops = plan.run, plan.flops
    parameters = run.model.parameter_count().total
    lengths = " + ".join(f"{section.positions}" for section in run.model.section_facts())
    words = counted(run.model)
    rows = [
        ("devices", f"{run.devices} in nodes of {run.per_node}"),
        ("mesh", ", ".join(f"{name} {size}" for name, size in run.sizes.items())),
        ("parameters", f"{count(parameters)} ({parameters:,})"),
        (
            f"FLOPs per {words.removesuffix('s')}",
            f"{flops.causal:.4g} with causal attention, {flops.full:.4g} with full",
        ),
        (
            "microbatches",
            f"{run.microbatches} of {run.micro_size} rows, {lengths} {'positions' if words == 'rows' else words} each",
        ),
    ]
    if run.parallel.pipeline > 1:
        slots, chunks = plan.schedule.slots, run.parallel.virtual_stages
        rows.append(("schedule", f"{run.parallel.schedule}, {chunks} chunks a stage, {slots} ring slots"))
        rows.append(("bubble", f"{plan.schedule.fraction:.2%} over ideal time"))
    experts = (one.summary(tower.tokens, run.spread) for tower in run.towers for b in tower.blocks for one in b.experts)
    return rows + [("experts", text) for text in dict.fromkeys(experts)]


def memory_rows(parts: Sequence[tuple[str, float, str]], room_gib: float) -> list[tuple[str, str]]:
    """Name, bytes and remark of parts, and whether they fit."""
    rows = [(name, f"{size / GIB:8.2f}  {about}".rstrip()) for name, size, about in parts]
    verdict = f"{'yes' if room_gib >= 0 else 'NO':>8}  {abs(room_gib):.2f}"
    return [*rows, ("fits", f"{verdict} {'to spare' if room_gib >= 0 else 'too much'}")]


def times(plan: Estimate) -> list[tuple[str, str]]:
    """Step time by cause, speed, and time of the whole run."""
    run, step, compute = plan.run, plan.step_seconds, plan.compute_seconds
    matmul, attention = plan.matmul_seconds / compute, plan.attention_seconds / compute
    shares = f"matmuls {matmul:.0%}, attention {attention:.0%}, bound by memory {1 - matmul - attention:.0%}"
    parts = (
        ("compute", compute, shares),
        ("exposed communication", plan.exposed_seconds, f"{plan.hidden_seconds:.3f} s more are hidden"),
        ("bubble", plan.bubble_seconds, ""),
        ("optimizer", plan.optimizer_seconds, ""),
    )
    peak = ", of the bfloat16 peak" if run.compute != "bfloat16" else ""
    whole = f"{run.steps:,} steps, {count(plan.tokens)} {counted(run.model)}: {duration(plan.days * 86_400)}, "
    return [
        *((name, f"{value:9.3f} s {value / step:6.1%}  {note}".rstrip()) for name, value, note in parts),
        ("step", f"{step:9.3f} s"),
        (f"{counted(run.model)}/s", f"{plan.tokens_per_second_per_device:9,.0f} per device"),
        ("MFU", f"{plan.mfu_causal:9.1%} with causal attention, {plan.mfu_full:.1%} with full{peak}"),
        *([("whole run", f"{whole}{plan.device_hours:,.0f} GPU hours")] if run.steps else []),
    ]


def serving_report(plans: Sequence[Serving]) -> Report:
    """The room of each layout and dtype, and bounds of the speed of the fastest, unquantized if one has room."""
    run, context = plans[0].run, plans[0].context
    rows = [
        (
            f"{plan.tensor}",
            f"{plan.run.replicas}",
            plan.weights,
            plan.cache,
            f"{plan.weight_bytes / GIB:.2f}",
            byte_size(plan.token_bytes) if plan.token_bytes else "none",
            "any" if plan.tokens is None else f"{plan.tokens:,}",
            f"{plan.rows:,}",
            f"{plan.first_token_seconds * 1e3:,.1f}",
        )
        for plan in plans
    ]
    headings = ("tensor", "replicas", "weights", "cache", "weights, GiB", "token", "tokens", "rows", "first token, ms")
    room = Table("a replica; weights and bytes of a token are of one device", headings, rows, (2, 3))
    blocks: list[Section | Table] = [("rows", [("of", f"{context:,} tokens, prompt and answer")]), room]
    fitting = [plan for plan in plans if plan.rows]
    if fitting:
        whole = [plan for plan in fitting if plan.weights == plan.cache == run.dtype]
        blocks.append(_serving_speed(max(whole or fitting, key=lambda plan: plan.tokens_per_second(plan.rows))))
    return Report(f"text generation on {run.devices} x {run.device.name}, by formula", blocks)


def _serving_speed(plan: Serving) -> Table:
    lines = []
    for rows in batches(plan.rows):
        memory, compute, sums = (1e3 * each for each in plan.step_seconds(rows))
        speed = f"{plan.tokens_per_second(rows):,.0f}"
        lines.append((f"{rows:,}", f"{memory:.2f}", f"{compute:.2f}", f"{sums:.2f}", speed))
    headings = ("rows", "bandwidth, ms", "compute, ms", "collectives, ms", "tokens/s of all devices")
    title = f"bounds of a step: tensor {plan.tensor}, weights {plan.weights}, cache {plan.cache}"
    return Table(title, headings, lines, ())


def traffic_by_class(
    sums: Mapping[str, float], device: Device, predicted: Mapping[str, float] | None = None
) -> Section:
    """Bytes by class, counted or by formula; predicted: what a formula says beside what is counted."""
    total = sums["total"]
    name, unit = unit_of(total)

    def line(kind: str, share: str, about: str) -> tuple[str, str]:
        formula = "" if predicted is None else f"  by formula {predicted[kind] / unit:6.2f}"
        return kind, f"{sums[kind] / unit:8.2f} {share:>6}{formula}  {about}".rstrip()

    seconds = f"{total / device.bandwidth:.3g} s at the data sheet's {device.bandwidth / 1e12:.3g} TB/s"
    lines = [line(kind, f"{sums[kind] / total:.1%}", about) for kind, about in BYTE_CLASSES.items()]
    return f"memory traffic of one device and step, {name}", [line("total", "", seconds), *lines]


def unit_of(total: float) -> tuple[str, int]:
    """Name and bytes of the unit that suits a total."""
    return next(((name, unit) for name, unit in BYTE_UNITS if total >= unit), BYTE_UNITS[-1])
