"""Plans as reports: sections and tables as text for a terminal, with figures and charts as an HTML page."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from megajax import charts, pages
from megajax.charts import Box, Segment, Timeline, tick_text
from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.metrics import banner
from megajax.metrics.banner import Section
from megajax.metrics.text import count, duration
from megajax.planning.cost.costs import Device
from megajax.planning.cost.estimate import Estimate, bytes_per_step
from megajax.planning.cost.work import head_seconds, layers_work
from megajax.planning.program.devices import GIB

BY_FORMULA = "Predicted by formulas."
BYTE_CLASSES = {
    "copies": "slices, updates, copies, transposes, zeros",
    "elementwise": "casts, additions, norms, activations, the optimizer",
    "matmul": "with what is fused into them",
    "attention": "",
    "collective": "what they read and write in memory",
}
"""Classes of memory traffic, and what is in them."""
BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20))
MAX_BOXES = 9_000
"""Boxes drawn at most, if that leaves one microbatch for each stage."""
SHADES = 4
"""Shades of forward and backward, by chunk."""
NAMES = {
    **{f"forward{shade}": "forward" for shade in range(SHADES)},
    **{f"backward{shade}": "backward, with recomputation" for shade in range(SHADES)},
    "loss": "loss",
    "exposed": "exposed communication",
    "optimizer": "optimizer",
}
"""CSS class of show.css -> what it shows."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Collection[int] = (0,)
    """Columns that are text; the others are numbers and flush right."""

    def lines(self) -> list[str]:
        """Aligned, without colours or box characters."""
        cells = [self.headings, *self.rows]
        widths = [max(len(row[place]) for row in cells) for place in range(len(self.headings))]
        aligned = [
            "  ".join(
                cell.ljust(width) if place in self.text else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return [self.title] * bool(self.title) + aligned

    def html(self) -> str:
        numbers = [place for place in range(len(self.headings)) if place not in self.text]
        return pages.table(self.headings, self.rows, numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A plan, a search, a comparison or a sweep, to be printed and to be written as a page."""

    title: str
    blocks: Sequence[Section | Table]
    page_title: str
    remark: str = BY_FORMULA
    verdict: tuple[str, str] | None = None
    """CSS class and text: whether it fits."""
    figures: Sequence[tuple[str, str, str]] = ()
    """Name, value and remark of the numbers at the top of the page."""
    pictures: Callable[[], Sequence[str]] = tuple
    """Cards of the page, above the blocks, as HTML."""

    def text(self) -> str:
        lines = [self.title]
        for _, group in groupby(self.blocks, lambda block: isinstance(block, Table)):
            blocks = list(group)
            for table in blocks:
                if isinstance(table, Table):
                    lines += ["", *table.lines()]
            if sections := [block for block in blocks if not isinstance(block, Table)]:
                lines += ["" for _ in lines[1:2]] + banner.plain("", sections).splitlines()[1:]
        return "\n".join(lines)

    def write_page(self, path: Path) -> None:
        """Raises UserError if it can't be written."""
        cards = [
            pages.section(block.title, block.html())
            if isinstance(block, Table)
            else pages.section(block[0], pages.table((), block[1]))
            for block in self.blocks
        ]
        head = [pages.header(self.page_title, self.remark, self.verdict), pages.figures(self.figures)]
        style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
        page = pages.page(self.page_title, [*head, *self.pictures(), *cards], style=style)
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html={path} can't be written: {error.strerror}") from error


# One plan


def plan_report(plan: Estimate, name: str, *, memory: Sequence[Segment] = ()) -> Report:
    """A plan by formula. memory: what a device holds in a compiled program, in GiB; else by formula."""
    run = plan.run
    memory = memory or memory_parts(plan)
    return Report(
        title=f"plan for {run.devices} x {run.device.name}, by formula",
        blocks=sections(plan),
        page_title=f"{name} on {run.devices} x {run.device.name}",
        verdict=_verdict(memory, run.device),
        figures=[
            ("step", f"{plan.step_seconds:.3g} s", f"{run.step_tokens:,} tokens"),
            ("tokens/s", f"{plan.tokens_per_second_per_device:,.0f}", "per GPU"),
            ("MFU", f"{plan.mfu_causal:.1%}", f"{plan.mfu_full:.1%} with full attention"),
            _peak_figure(memory, run.device),
            ("bubble", f"{plan.bubble_seconds / plan.step_seconds:.1%}", "of the step"),
            ("exposed", f"{plan.exposed_seconds / plan.step_seconds:.1%}", "communication that is not hidden"),
        ],
        pictures=lambda: pictures(plan, memory),
    )


def memory_report(
    title: str, name: str, memory: Sequence[Segment], device: Device, blocks: Sequence[Section | Table]
) -> Report:
    """A compiled plan of a model that formulas do not know: memory without times. memory: in GiB."""
    return Report(
        title=title,
        blocks=blocks,
        page_title=f"{name}: {title}",
        remark="Compiled for virtual GPU devices.",
        verdict=_verdict(memory, device),
        figures=[_peak_figure(memory, device)],
        pictures=lambda: [_memory_picture(memory, device)],
    )


def _verdict(memory: Sequence[Segment], device: Device) -> tuple[str, str]:
    room = device.usable_gib - sum(part.size for part in memory)
    return (
        ("good", f"fits, {room:.1f} GiB to spare") if room >= 0 else ("bad", f"does not fit: {-room:.1f} GiB too much")
    )


def _peak_figure(memory: Sequence[Segment], device: Device) -> tuple[str, str, str]:
    return "peak memory", f"{sum(part.size for part in memory):.1f} GiB", f"of {device.usable_gib:.1f} usable"


def memory_parts(plan: Estimate) -> list[Segment]:
    """Parts of a device's memory by formula, in GiB."""
    parts = (
        ("master weights", plan.memory.parameters, "master"),
        ("optimizer state", plan.memory.optimizer, "state"),
        ("weights in compute dtype", plan.memory.weights, "weights"),
        ("gradients", plan.memory.gradients, "gradients"),
        ("activations", plan.memory.activations, "activations"),
        ("temporaries of a layer or the loss", plan.memory.working, "working"),
    )
    return segments(parts)


def segments(parts: Sequence[tuple[str, float, str]]) -> list[Segment]:
    """Parts of a memory bar from names, bytes and CSS classes; empty ones left out."""
    return [Segment(name, size / GIB, f"{size / GIB:.1f}", color) for name, size, color in parts if size > 0]


def pictures(plan: Estimate, memory: Sequence[Segment]) -> list[str]:
    """The timeline of a step and the memory of a device."""
    drawn = timeline(plan)
    keys: dict[str, str] = {}
    for kind, name in NAMES.items():
        if kind in drawn.boxes:
            keys.setdefault(name, kind)
    legend = charts.legend([*((kind, name, "") for name, kind in keys.items()), ("idle", "idle", "")])
    scrolled = f'<div class="scroll">{drawn.svg()}</div>{legend}'
    return [
        pages.section("A step", scrolled, f"{plan.step_seconds:.4g} s; time of each stage, by formulas"),
        _memory_picture(memory, plan.run.device),
    ]


def _memory_picture(memory: Sequence[Segment], device: Device) -> str:
    free = device.usable_gib - sum(part.size for part in memory)
    bar = charts.stacked_bar(
        [*memory, *[Segment("free", free, f"{free:.1f}", "free")] * (free > 0)],
        limit=(device.usable_gib, f"usable {device.usable_gib:.1f} of {device.memory_gib:g}"),
    )
    return pages.section("Memory of one device", bar, "GiB")


def sections(plan: Estimate) -> list[Section]:
    """Layout, memory, collectives, memory traffic and times of a plan by formula."""
    memory, device = plan.memory, plan.run.device
    parts = [
        ("weights", memory.parameters, "master weights"),
        ("optimizer", memory.optimizer, "its state"),
        ("weights in use", memory.weights, "in compute dtype"),
        ("gradients", memory.gradients, "added up over microbatches"),
        ("activations", memory.activations, "kept for the backward pass"),
        ("working", memory.working, "temporaries of a layer or the loss, and collectives"),
        ("peak", memory.peak, ""),
        ("usable", device.usable_gib * GIB, f"of {device.memory_gib:g}"),
    ]
    megatron = ("Megatron-LM says", f"{plan.report.total / GIB:8.2f}  by its own report")
    collectives = [
        (
            f"{row.axis}: {row.kind}",
            f"{row.count:9,.0f} x {row.bytes / row.count / 2**20:8,.1f} MiB {row.seconds:9.3f} s, "
            f"{row.exposed:.3f} exposed  {row.what}",
        )
        for row in plan.traffic
    ] or [("none", "")]
    return [
        ("layout", layout(plan)),
        ("memory of one device, GiB", [*memory_rows(parts, device.usable_gib - memory.peak_gib), megatron]),
        ("collectives of one device and step", collectives),
        classes(bytes_per_step(plan), device),
        ("time of a step", times(plan)),
    ]


def layout(plan: Estimate) -> list[tuple[str, str]]:
    """Devices, mesh, parameters, microbatches, schedule."""
    run, flops = plan.run, plan.flops
    parameters = run.model.parameter_count().total
    rows = [
        ("devices", f"{run.devices} in nodes of {run.per_node}"),
        ("mesh", ", ".join(f"{name} {size}" for name, size in run.sizes.items())),
        ("parameters", f"{count(parameters)} ({parameters:,})"),
        ("FLOPs per token", f"{flops.causal:.4g} with causal attention, {flops.full:.4g} with full"),
        ("microbatches", f"{run.microbatches} of {run.micro_size} rows, {run.model.sequence_length} tokens each"),
    ]
    if run.parallel.pipeline > 1:
        slots, chunks = plan.schedule.slots, run.parallel.virtual_stages
        rows.append(("schedule", f"{run.parallel.schedule}, {chunks} chunks a stage, {slots} ring slots"))
        rows.append(("bubble", f"{plan.schedule.fraction:.2%} over ideal time"))
    return rows


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
    whole = f"{run.steps:,} steps, {count(plan.tokens)} tokens: {duration(plan.days * 86_400)}, "
    return [
        *((name, f"{value:9.3f} s {value / step:6.1%}  {note}".rstrip()) for name, value, note in parts),
        ("step", f"{step:9.3f} s"),
        ("tokens/s", f"{plan.tokens_per_second_per_device:9,.0f} per device"),
        ("MFU", f"{plan.mfu_causal:9.1%} with causal attention, {plan.mfu_full:.1%} with full{peak}"),
        *([("whole run", f"{whole}{plan.device_hours:,.0f} GPU hours")] if run.steps else []),
    ]


def classes(sums: Mapping[str, float], device: Device, predicted: Mapping[str, float] | None = None) -> Section:
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


# The timeline of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of a chunk and microbatch, or of the loss of a microbatch."""

    forward: float
    forward_exposed: float
    backward: float
    backward_exposed: float
    loss: float
    loss_exposed: float
    between: float
    """Exposed communication between stages, of a tick."""
    data: float
    """Exposed communication once a step, over the devices with the same weights."""
    optimizer: float


def costs(plan: Estimate) -> Costs:
    """Of an estimate, whose step time they add up to."""
    run, layers = plan.run, layers_work(plan.run)
    chunks = run.parallel.virtual_stages
    exposed = {"forward": 0.0, "backward": 0.0, "loss": 0.0, "between": 0.0, "data": 0.0}
    for row in plan.traffic:
        exposed[_part(row.axis, row.what)] += row.exposed
    return Costs(
        forward=layers.forward.seconds / chunks,
        forward_exposed=exposed["forward"] / (run.microbatches * chunks),
        backward=layers.backward.seconds / chunks,
        backward_exposed=exposed["backward"] / (run.microbatches * chunks),
        loss=head_seconds(run),
        loss_exposed=exposed["loss"] / run.microbatches,
        between=exposed["between"] / max(1, plan.schedule.ticks),
        data=exposed["data"],
        optimizer=plan.optimizer_seconds,
    )


def _part(axis: str, what: str) -> str:
    """The part of a step in which a collective runs."""
    if axis == "data":
        return "forward" if what.endswith("forward") else "backward" if "layer" in what else "data"
    if axis == "pipeline" and not what.startswith("sums"):
        return "between"
    if what.startswith(("embeddings", "sums")):
        return "loss"
    return "forward" if what.endswith("forward") else "backward"


@dataclass(slots=True)
class _Pen:
    """Draws one tick after another."""

    rows: int
    each: Costs
    now: float = 0.0
    boxes: dict[str, list[Box]] = field(default_factory=dict)

    def work(self, kind: str, rows: dict[int, int], seconds: float, exposed: float) -> None:
        """Work and the communication that follows it, at once on some rows: row -> chunk."""
        for row, chunk in rows.items():
            self._add(kind if kind == "loss" else f"{kind}{chunk % SHADES}", row, self.now, seconds)
            self._add("exposed", row, self.now + seconds, exposed)
        self.now += seconds + exposed if rows else 0.0

    def everywhere(self, kind: str, seconds: float) -> None:
        for row in range(self.rows):
            self._add(kind, row, self.now, seconds)
        self.now += seconds

    def tick(self, forward: dict[int, int], backward: dict[int, int], loss: bool) -> None:
        """Row -> chunk of its forward and of its backward; whether a loss is computed, on all rows."""
        each = self.each
        self.work("forward", forward, each.forward, each.forward_exposed)
        self.work("loss", dict.fromkeys(range(self.rows), 0) if loss else {}, each.loss, each.loss_exposed)
        self.work("backward", backward, each.backward, each.backward_exposed)
        if self.rows > 1:
            self.everywhere("exposed", each.between)

    def _add(self, kind: str, row: int, start: float, length: float) -> None:
        if length > 0:
            self.boxes.setdefault(kind, []).append(Box(row, start, length))


def timeline(plan: Estimate) -> Timeline:
    """The timeline of a step by formula."""
    run = plan.run
    stages, chunks = run.parallel.pipeline, run.parallel.virtual_stages
    most = max(1, MAX_BOXES // (2 * stages * stages * chunks))
    drawn = min(run.microbatches, stages * min(most, 3 if chunks > 1 else 4))
    pen, breaks = _Pen(stages, costs(plan)), []
    ticks = _ticks(plan, drawn)
    # The gap is in the steady state of a pipeline; without a pipeline, before the last microbatch.
    gap = len(ticks) // 2 if stages > 1 else drawn - 1
    for place, tick in enumerate(ticks):
        if place == gap and drawn < run.microbatches:
            breaks.append((pen.now, f"… {run.microbatches - drawn:,} more microbatches …"))
        pen.tick(*tick)
    pen.everywhere("exposed", pen.each.data)
    pen.everywhere("optimizer", pen.each.optimizer)
    return Timeline(
        rows=[f"stage {stage}" for stage in range(stages)] if stages > 1 else ["a device"],
        boxes=pen.boxes,
        names=NAMES,
        end=pen.now,
        title="timeline of a step",
        breaks=breaks,
        time_text=lambda seconds: _time(seconds, pen.now),
    )


def _ticks(plan: Estimate, microbatches: int) -> list[tuple[dict[int, int], dict[int, int], bool]]:
    """Of each tick: stage -> chunk of its forward, the same of its backward, and whether a loss is computed."""
    parallel = plan.run.parallel
    if parallel.pipeline == 1:
        return [({0: 0}, {0: 0}, True)] * microbatches
    name = "interleaved" if parallel.virtual_stages > 1 else "gpipe" if parallel.schedule == "gpipe" else "1f1b"
    table = resolve("megajax.pipeline.schedule:build")(  # it imports numpy
        name,
        stages=parallel.pipeline,
        microbatches=microbatches,
        chunks=parallel.virtual_stages,
        loss_wait=parallel.loss_wait,
    )
    ticks = []
    for tick in range(table.ticks):
        forward, backward = (
            {s: int(work.chunk[tick, s]) for s in range(table.stages) if work.microbatch[tick, s] >= 0}
            for work in (table.forward, table.input_gradient)
        )
        ticks.append((forward, backward, bool(table.head[tick] >= 0)))
    return ticks


def _time(seconds: float, end: float) -> str:
    """A tick of the time axis."""
    if end < 2:
        return f"{tick_text(seconds * 1000)} ms"
    return duration(seconds) if seconds >= 60 else f"{seconds:g} s"
