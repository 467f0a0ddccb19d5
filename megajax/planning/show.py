"""Plans as tables for a terminal."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.config.dump import diff
from megajax.display.banner import Report, Section, Table
from megajax.display.text import byte_size, count, duration
from megajax.mesh.config import DATA_AXES, devices_over
from megajax.models.protocol import position_unit
from megajax.planning.compiled.devices import GIB, MIB, Device
from megajax.planning.cost.estimate import SPEED, Case, Estimate, bytes_per_step, to_dict
from megajax.planning.cost.serving import CACHE_SHARE, Serving

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
    "range": lambda plan: "{:,.0f} to {:,.0f}".format(*plan["tokens_per_second_per_device_range"]),
    "MFU": lambda plan: f"{plan['mfu_causal']:.1%}",
    "bubble": lambda plan: f"{plan['bubble_seconds'] / plan['step_seconds']:.1%}",
    "exposed": lambda plan: f"{plan['exposed_seconds'] / plan['step_seconds']:.1%}",
    "peak GiB": lambda plan: f"{plan['peak_gib']:.1f}",
    "fits": lambda plan: "yes" if plan["fits"] else "NO",
}
"""Columns of tables that list plans, from the figures of a plan's JSON."""
DEVICES_AXIS = "devices"
SCALING = {
    "weak": "weak scaling: the batch grows with the devices",
    "strong": "strong scaling: the batch stays the same",
    "": "one setting at several values",
}
"""Modes of the points of a sweep, and their titles."""
PREDICTION = "predicted by formulas, not measured"
type Point = dict[str, Any]
"""JSON of a plan: `value`, `mode`, `devices`, `global_size`, and its figures or the `refusal` of the rules."""


def cells(plan: Mapping[str, Any]) -> list[str]:
    """A plan in the columns of FIGURES; empty where its figures are unknown."""
    return [text(plan) if plan.get("step_seconds") else "" for text in FIGURES.values()]


def plan_report(plan: Estimate) -> Report:
    """Layout, memory, collectives, memory traffic and times of a plan by formula."""
    run, device = plan.run, plan.run.device
    memory = plan.memory
    sizes = [
        ("weights", memory.parameters, "master weights"),
        ("optimizer", memory.optimizer, "its state"),
        ("weights in use", memory.weights, "in compute dtype"),
        ("gradients", memory.gradients, "added up over microbatches"),
        ("activations", memory.activations, "kept for the backward pass"),
        ("working", memory.working, "temporaries of a layer or the loss, and collectives"),
        ("peak", memory.peak, ""),
        ("usable", run.usable_gib * GIB, f"of {device.memory_gib:g}: xla.memory_fraction={run.memory_fraction:g}"),
    ]
    memory = memory_rows(sizes)
    collectives = [
        (
            f"{row.axis}: {row.kind}",
            f"{row.count:9,.0f} x {row.bytes / row.count / MIB:8,.1f} MiB {row.seconds:9.3f} s, "
            f"{row.exposed:.3f} exposed  {row.what}",
        )
        for row in plan.traffic
    ]
    return Report(
        f"plan for {run.devices} x {device.name}, by formula",
        [
            ("layout", layout(plan)),
            ("memory of one device, GiB", memory),
            ("collectives of one device and step", collectives or [("none", "")]),
            traffic_by_class(bytes_per_step(plan), device),
            ("time of a step", times(plan)),
        ],
    )


def memory_rows(parts: Sequence[tuple[str, float, str]]) -> list[tuple[str, str]]:
    """Parts of a device's memory (name, bytes, remark), among them `peak` and `usable`; and whether the peak fits."""
    sizes = {name: size for name, size, _ in parts}
    room = sizes["usable"] - sizes["peak"]
    fits = f"{'yes' if room >= 0 else 'NO':>8}  {abs(room) / GIB:.2f} {'to spare' if room >= 0 else 'too much'}"
    return [*((name, f"{size / GIB:8.2f}  {about}".rstrip()) for name, size, about in parts), ("fits", fits)]


def placement(devices: int, per_node: int, mesh: Mapping[str, int], parameters: int) -> list[tuple[str, str]]:
    """Devices, mesh, parameters."""
    return [
        ("devices", f"{devices} in nodes of {per_node}"),
        ("mesh", ", ".join(f"{name} {size}" for name, size in mesh.items())),
        ("parameters", f"{count(parameters)} ({parameters:,})"),
    ]


def layout(plan: Estimate) -> list[tuple[str, str]]:
    """Devices, mesh, parameters, microbatches, schedule."""
    run, unit = plan.run, position_unit(plan.run.model)
    lengths = " + ".join(f"{section.positions}" for section in run.sections)
    rows = [
        *placement(run.devices, run.per_node, run.sizes, run.model.parameter_count().total),
        (f"FLOPs per {unit.removesuffix('s')}", plan.flops.text()),
        (
            "microbatches",
            f"{run.microbatches} of {run.micro_size} rows, {lengths} {'positions' if unit == 'rows' else unit} each",
        ),
    ]
    if run.parallel.pipeline > 1:
        chunks = f"{run.parallel.virtual_stages} chunks a stage, {run.schedule.slots} ring slots"
        rows.append(("schedule", f"{run.parallel.schedule}, {chunks}"))
        rows.append(("bubble", f"{run.schedule.fraction:.2%} over ideal time"))
    layers = [(tower, layer) for tower in run.towers for block in tower.blocks for layer in block.experts]
    texts = [layer.summary(tower.tokens, run.spread) for tower, layer in layers]
    texts += [note for _, layer in layers if (note := layer.way_note(run.spread, on_cpu=False))]
    return rows + [("experts", text) for text in dict.fromkeys(texts)]


def times(plan: Estimate) -> list[tuple[str, str]]:
    """Step time by cause, speed, and time of the whole run."""
    run, step, compute, unit = plan.run, plan.step_seconds, plan.compute_seconds, position_unit(plan.run.model)
    matmul, attention = plan.matmul_seconds / compute, plan.attention_seconds / compute
    shares = f"matmuls {matmul:.0%}, attention {attention:.0%}, bound by memory {1 - matmul - attention:.0%}"
    parts = (
        ("compute", compute, shares),
        ("exposed communication", plan.exposed_seconds, f"{plan.hidden_seconds:.3f} s more are hidden"),
        ("bubble", plan.bubble_seconds, ""),
        ("optimizer", plan.optimizer_seconds, ""),
    )
    speed = plan.tokens_per_second_per_device
    low, high = plan.tokens_per_second_per_device_range_tuned
    peak = ", of the bfloat16 peak" if run.compute != "bfloat16" else ""
    rows = [
        *((name, f"{value:9.3f} s {value / step:6.1%}  {note}".rstrip()) for name, value, note in parts),
        ("step", f"{step:9.3f} s"),
        (f"{unit}/s", f"{speed:9,.0f} per device; {plan.errors.text(speed)}"),
        ("", f"{'':9} {low:,.0f} to {high:,.0f} if tuned as NVIDIA's programs are"),
        ("MFU", f"{plan.mfu_causal:9.1%} causal, {plan.mfu_full:.1%} full (no mask){peak}"),
    ]
    if run.steps:
        tokens = f"{run.steps:,} steps, {count(plan.tokens)} {unit}: {duration(plan.days * 86_400)}"
        rows.append(("whole run", f"{tokens}, {plan.device_hours:,.0f} GPU hours"))
    return rows


def traffic_by_class(
    sums: Mapping[str, float], device: Device, predicted: Mapping[str, float] | None = None, workspace: float = 0.0
) -> Section:
    """Bytes by class, counted or by formula.

    predicted: bytes by formula, for comparison; workspace: counted bytes of cuBLAS's scratch arrays.
    """
    total = sums["total"]
    name, unit = ("TiB", 2**40) if total >= 2**40 else ("GiB", GIB) if total >= GIB else ("MiB", MIB)
    seconds = f"{total / device.bandwidth:.3g} s at the data sheet's {device.bandwidth / 1e12:.3g} TB/s"
    lines = []
    for kind, about in {"total": seconds, **BYTE_CLASSES}.items():
        share = f"{sums[kind] / total:.1%}" if kind != "total" else ""
        formula = "" if predicted is None else f"  by formula {predicted[kind] / unit:6.2f}"
        lines.append((kind, f"{sums[kind] / unit:8.2f} {share:>6}{formula}  {about}".rstrip()))
    if workspace:
        lines.append(("cuBLAS workspace", f"{workspace / unit:8.2f}  of matmul: scratch space, at most"))
    return f"memory traffic of one device and step, {name}", lines


def serving_report(plans: Sequence[Serving], chosen: Serving) -> Report:
    """Weights, cache and speed of each layout and dtype that fit; settings of the chosen one."""
    run, context = chosen.run, chosen.context
    fitting = [plan for plan in plans if plan.rows]
    columns: dict[str, Callable[[Serving], str]] = {
        "tensor": lambda plan: f"{plan.tensor}",
        "expert": lambda plan: f"{plan.expert}",
        "replicas": lambda plan: f"{plan.run.replicas}",
        "weights": lambda plan: plan.weights,
        "cache": lambda plan: plan.cache,
        "weights, GiB": lambda plan: f"{plan.weight_bytes / GIB:.2f}",
        "token": lambda plan: byte_size(plan.token_bytes) if plan.token_bytes else "none",
        "tokens": lambda plan: "any" if plan.tokens is None else f"{plan.tokens:,}",
        "rows": lambda plan: f"{plan.rows:,}",
        "tokens/s": lambda plan: f"{plan.tokens_per_second:,.0f}",
    }
    if all(plan.expert == 1 for plan in plans):
        del columns["expert"]
    rows = [tuple(cell(plan) for cell in columns.values()) for plan in fitting]
    names = [*columns]
    room = Table(
        "a replica; weights and bytes of a token of one device, tokens/s of all, by bandwidth at most",
        names,
        rows,
        (names.index("weights"), names.index("cache")),
    )
    facts = [("of", f"{context:,} tokens, prompt and answer")]
    facts += [("fit", f"{len(fitting)} of {len(plans)} layouts and dtypes")] * (len(fitting) < len(plans))
    layout = f"tensor {chosen.tensor}" + f", expert {chosen.expert}" * (chosen.expert > 1)
    lines = [("settings of serve", shlex.join(chosen.flags))]
    if chosen.memory_share < CACHE_SHARE:
        lines.append(("memory_share", f"temporaries of a step need {chosen.buffer_bytes / GIB:.1f} GiB"))
    fastest = f"{layout}, weights {chosen.weights}, cache {chosen.cache}"
    blocks: list[Section | Table] = [("rows", facts), room, (fastest, lines)]
    return Report(f"text generation on {run.devices} x {run.device.name}, by formula", blocks)


def comparison(names: tuple[str, str], cases: tuple[Case, Case]) -> tuple[Report, dict[str, Any]]:
    """Two plans side by side, and their JSON: both plans, and the ratios of the second's figures to the first's."""
    first, second = (to_dict(case.estimate) for case in cases)
    ratios = {name: second[name] / first[name] for name in (*SPEED, "peak_gib") if first[name]}
    facts: dict[str, Callable[[Estimate], str]] = {
        "devices": lambda plan: f"{plan.run.devices} x {plan.run.device.name}",
        "parameters": lambda plan: count(plan.run.model.parameter_count().total),
        "mesh": lambda plan: ", ".join(f"{axis} {n}" for axis, n in plan.run.sizes.items() if n > 1) or "1",
        "microbatches": lambda plan: f"{plan.run.microbatches} x {plan.run.micro_size} rows",
        "fits": lambda plan: "yes" if plan.fits else "NO",
        "whole run": lambda plan: duration(plan.days * 86_400) if plan.run.steps else "",
    }
    rows = [[name, *(fact(case.estimate) for case in cases), ""] for name, fact in facts.items()]
    for name, ratio in ratios.items():
        rows.append([name.replace("_", " "), f"{first[name]:.4g}", f"{second[name]:.4g}", f"{ratio:.3f}"])
    spans = (FIGURES["range"](plan) for plan in (first, second))
    rows.append(["range of tokens per second per device", *spans, ""])
    blocks: list[Section | Table] = [Table("side by side", ("", *names, "ratio"), rows)]
    if changed := diff(cases[0].cfg, cases[1].cfg):
        blocks.append(("settings that differ", [("", line) for line in changed]))
    return Report(" and ".join(names), blocks), {"first": first, "second": second, "ratios": ratios}


def tokens_per_second(point: Point) -> float:
    """Of all devices."""
    return point["tokens_per_second_per_device"] * point["devices"]


def sweep_report(source: str, axis: str, points: Sequence[Point]) -> Report:
    """A table of each mode, and the points that the rules refuse."""
    columns = (axis, "data", "rows", "microbatches", "efficiency", "tokens/s", *FIGURES)
    blocks: list[Section | Table] = []
    for mode, title in SCALING.items():
        rows, base = [], 0.0
        for point in points:
            if point["mode"] != mode:
                continue
            texts = ["refused", "", "", "", ""]
            if "refusal" not in point:
                speed = point["tokens_per_second_per_device"]
                base = base or speed
                counts = devices_over(point["mesh"], DATA_AXES), point["global_size"], point["microbatches"]
                texts = [*(f"{n:,}" for n in counts), f"{speed / base:.1%}", f"{tokens_per_second(point):,.0f}"]
            rows.append([point["value"], *texts, *cells(point)])
        if rows:
            blocks.append(Table(title, columns, rows, ()))
    refused = [f"{point['mode']} {point['value']}: {point['refusal']}" for point in points if "refusal" in point]
    if refused:
        blocks.append(("refused", [("", line.strip()) for line in refused]))
    return Report(f"{source} by {axis}, {PREDICTION}", blocks)


def draw_sweep(plan: str, axis: str, points: Sequence[Point], axes: Any) -> None:
    """Tokens per second, a curve of each mode, on matplotlib axes; over devices, also perfect scaling.

    plan: the config and the device, for the title.
    """
    planned = [point for point in points if "refusal" not in point]
    scaling = axis == DEVICES_AXIS
    for mode, title in SCALING.items():
        if curve := [point for point in planned if point["mode"] == mode]:
            at = [point["devices"] if scaling else point["value"] for point in curve]
            axes.plot(at, [*map(tokens_per_second, curve)], marker="o", label=title)
    axes.set_title(f"{plan}: tokens per second, {PREDICTION}", fontsize=10)
    axes.set(xlabel=axis, ylabel="predicted tokens/s")
    axes.grid(alpha=0.25)
    if scaling:
        devices = sorted({point["devices"] for point in planned})
        ideal = [tokens_per_second(planned[0]) * number / planned[0]["devices"] for number in devices]
        axes.plot(devices, ideal, color="gray", linestyle=":", label="in proportion to the devices")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(devices, map(str, devices))
        axes.set_xticks([], minor=True)
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
