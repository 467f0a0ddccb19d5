"""What each stage does when, in one step: the schedule's table with the cost model's seconds, as an SVG.

A step of hundreds of microbatches is the same pattern again and again: the picture has fewer, and says where it left
out how many.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from megajax.metrics.text import duration
from megajax.pipeline.schedule import build
from megajax.planning.cost.estimate import Estimate
from megajax.planning.cost.work import head_seconds, layers_work

MOST_CELLS = 9_000
"""Pieces of work that are drawn at most, if that leaves one microbatch for each stage."""
KINDS = {
    "forward": "forward",
    "backward": "backward, with what is computed again",
    "loss": "loss",
    "exposed": "communication that nothing hides",
    "optimizer": "optimizer",
    "idle": "idle",
}
SHADES = 4
"""Shades of forward and backward, by chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of one piece of work: a chunk and a microbatch, or the loss of a microbatch."""

    forward: float
    forward_exposed: float
    backward: float
    backward_exposed: float
    loss: float
    loss_exposed: float
    between: float
    """What travels between stages and is waited for, each tick."""
    data: float
    """Once a step, over the devices that hold the same weights."""
    optimizer: float


@dataclass(slots=True)
class Timeline:
    """Rectangles of one step."""

    rows: int
    names: list[str]
    cells: dict[str, list[tuple[float, int, float]]] = field(default_factory=dict)
    """By kind (and chunk): start, row, length, in seconds."""
    end: float = 0.0
    breaks: tuple[float, str] | None = None
    """Where microbatches are left out, and what to say."""

    def add(self, kind: str, row: int, start: float, length: float) -> None:
        """One rectangle; nothing where it takes no time."""
        if length > 0:
            self.cells.setdefault(kind, []).append((start, row, length))


def costs(found: Estimate) -> Costs:
    """Of an estimate, whose seconds they add up to."""
    run = found.run
    layers, pieces = layers_work(run), run.microbatches * run.parallel.virtual_stages
    told = {"forward": 0.0, "backward": 0.0, "loss": 0.0, "between": 0.0, "data": 0.0}
    for row in found.traffic:
        told[_place(row.axis, row.what)] += row.exposed
    ticks = max(1, found.schedule.ticks)
    return Costs(
        forward=layers.forward.seconds / run.parallel.virtual_stages,
        forward_exposed=told["forward"] / pieces,
        backward=layers.backward.seconds / run.parallel.virtual_stages,
        backward_exposed=told["backward"] / pieces,
        loss=head_seconds(run),
        loss_exposed=told["loss"] / run.microbatches,
        between=told["between"] / ticks,
        data=told["data"],
        optimizer=found.optimizer_seconds,
    )


def _place(axis: str, what: str) -> str:
    if axis == "data":
        return "forward" if what.endswith("forward") else "backward" if "layer" in what else "data"
    if axis == "pipeline" and not what.startswith("sums"):
        return "between"
    if what.startswith(("embeddings", "sums")):
        return "loss"
    return "forward" if what.endswith("forward") else "backward"


def timeline(found: Estimate) -> Timeline:
    """Of a step by formula."""
    run = found.run
    stages, chunks, microbatches = run.parallel.pipeline, run.parallel.virtual_stages, run.microbatches
    each = costs(found)
    if stages == 1:
        drawn = min(microbatches, 4)
        made = Timeline(1, ["a device"])
        now = 0.0
        for place in range(drawn):
            if drawn < microbatches and place == drawn - 1:
                made.breaks = (now, f"{microbatches - drawn:,} more microbatches")
            now = _tick(made, now, each, {0: 0}, {0: 0}, loss=True)
    else:
        most = max(1, MOST_CELLS // (2 * stages * stages * chunks))
        drawn = min(microbatches, stages * min(most, 3)) if chunks > 1 else min(microbatches, stages * min(most, 4))
        made = Timeline(stages, [f"stage {stage}" for stage in range(stages)])
        now = _table(made, found, each, drawn)
    for row in range(made.rows):
        made.add("exposed", row, now, each.data)
        made.add("optimizer", row, now + each.data, each.optimizer)
    made.end = now + each.data + each.optimizer
    return made


def _table(made: Timeline, found: Estimate, each: Costs, drawn: int) -> float:
    """Ticks of the schedule with so many microbatches; gives when it ends."""
    parallel = found.run.parallel
    name = parallel.schedule if parallel.virtual_stages == 1 else "interleaved"
    table = build(
        name if name == "gpipe" else "interleaved" if parallel.virtual_stages > 1 else "1f1b",
        stages=parallel.pipeline,
        microbatches=drawn,
        chunks=parallel.virtual_stages,
        loss_wait=parallel.loss_wait,
    )
    middle, now = table.ticks // 2, 0.0
    for tick in range(table.ticks):
        if tick == middle and drawn < found.run.microbatches:
            made.breaks = (now, f"{found.run.microbatches - drawn:,} more microbatches")
        works = []
        for work in (table.forward, table.input_gradient):
            micro, chunk = work.microbatch[tick].tolist(), work.chunk[tick].tolist()
            works.append({stage: chunk[stage] for stage in range(table.stages) if micro[stage] >= 0})
        now = _tick(made, now, each, works[0], works[1], loss=bool(table.head[tick] >= 0))
    return now


def _tick(
    made: Timeline, now: float, each: Costs, forward: dict[int, int], backward: dict[int, int], *, loss: bool
) -> float:
    """One tick of all stages: stage -> chunk of its forward and of its backward; gives when it ends."""
    kinds = (
        ("forward", forward, each.forward, each.forward_exposed),
        ("loss", dict.fromkeys(range(made.rows), 0) if loss else {}, each.loss, each.loss_exposed),
        ("backward", backward, each.backward, each.backward_exposed),
    )
    for kind, rows, seconds, exposed in kinds:
        if not rows:
            continue
        for row, chunk in rows.items():
            made.add(f"{kind}{'' if kind == 'loss' else chunk % SHADES}", row, now, seconds)
            made.add("exposed", row, now + seconds, exposed)
        now += seconds + exposed
    if each.between and made.rows > 1:
        for row in range(made.rows):
            made.add("exposed", row, now, each.between)
        now += each.between
    return now


LEFT, TOP, HEIGHT, GAP, BOTTOM = 74, 26, 22, 4, 30


def draw(made: Timeline, width: int = 1180) -> str:
    """An <svg>; colours are classes of the page's style."""
    row = HEIGHT + GAP if made.rows <= 24 else 14
    high = made.rows * row
    unit = (width - LEFT - 12) / made.end
    parts = [
        f'<svg viewBox="0 0 {width} {TOP + high + BOTTOM}" role="img" aria-label="timeline of a step">',
        f'<rect class="idle" x="{LEFT}" y="{TOP}" width="{made.end * unit:.1f}" height="{high}"/>',
    ]
    for stage, name in enumerate(made.names):
        if made.rows <= 24 or stage % 4 == 0:
            parts.append(f'<text class="tick" x="{LEFT - 8}" y="{TOP + stage * row + row * 0.62:.1f}" '
                         f'text-anchor="end">{escape(name)}</text>')  # fmt: skip
    for kind, cells in made.cells.items():
        path = "".join(
            f"M{LEFT + start * unit:.2f} {TOP + stage * row + 1}h{length * unit:.2f}v{row - 2}h{-length * unit:.2f}z"
            for start, stage, length in cells
        )
        name = kind.rstrip("0123456789")
        parts.append(f'<path class="{kind}" d="{path}"><title>{escape(KINDS[name])}</title></path>')
    parts += _axis(made, unit, high)
    if made.breaks:
        x, text = LEFT + made.breaks[0] * unit, escape(made.breaks[1])
        parts.append(f'<line class="break" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{TOP + high + 4}"/>')
        parts.append(f'<text class="tick strong" x="{x:.1f}" y="{TOP - 10}" text-anchor="middle">… {text} …</text>')
    return "".join([*parts, "</svg>"])


def _axis(made: Timeline, unit: float, high: float) -> Iterator[str]:
    step = next(
        (base * 10.0**power for power in range(-5, 5) for base in (1, 2, 5) if base * 10.0**power * 12 >= made.end), 1.0
    )
    place = 0
    while place * step <= made.end:
        x = LEFT + place * step * unit
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + high}" y2="{TOP + high + 5}"/>'
        seconds = place * step
        text = f"{seconds * 1000:g} ms" if made.end < 2 else duration(seconds) if seconds >= 60 else f"{seconds:g} s"
        yield f'<text class="tick" x="{x:.1f}" y="{TOP + high + 19}" text-anchor="middle">{text}</text>'
        place += 1
