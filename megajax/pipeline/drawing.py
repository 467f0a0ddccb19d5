"""A pipeline schedule as text for the terminal and as a picture."""

from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.config.missing import require
from megajax.pipeline.check import measure
from megajax.pipeline.schedule import Phase, Schedule, Work

LABEL = 6
"""Columns of the names of rows, for stages of one digit."""
END = " |"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PICTURE_CELLS = 50_000
"""Pieces of work beyond which a picture shows nothing and takes minutes."""
NUMBERED_CELLS = 3_000
"""Up to here each piece of work in a picture carries its number."""


def table(schedule: Schedule, width: int | None = None) -> str:
    """The table as text: a column per tick, a row per stage and kind of work, an entry per microbatch.

    With several chunks a letter says which chunk. F forward, B backward, and I and W where input and weight
    gradients have ticks of their own. Ticks that don't fit into `width` columns follow below; None: one long line.
    """
    cell = 1 + max(2, len(str(schedule.ticks - 1)), len(_entry(schedule, schedule.microbatches - 1, 0)))
    label = LABEL + len(str(schedule.stages - 1)) - 1
    fit = schedule.ticks if width is None else max(1, (width - label - len(END)) // cell)
    spans = [range(at, min(at + fit, schedule.ticks)) for at in range(0, schedule.ticks, fit)]
    blocks = [_block(schedule, span, label, cell) for span in spans]
    return "\n\n".join(blocks)


def summary(schedule: Schedule) -> str:
    """Ticks, phases, bubble, activations in flight and ring slots, a line each."""
    figures = measure(schedule)
    phases = ", ".join(f"{phase.ticks} {phase.label}" for phase in schedule.phases)
    ring = f"{schedule.slots} per stage"
    if schedule.spare_slot:
        ring += f", and 1 for idle forwards to write to: {schedule.ring_slots}"
    unit = "microbatches" if schedule.chunks == 1 else f"chunks of 1/{schedule.chunks} stage"
    lines = {
        "ticks": f"{figures.ticks}: {phases}",
        "bubble": f"{float(figures.bubble):.2%} over ideal time ({figures.bubble}), "
        f"{float(figures.bubble_of_total):.2%} of the total",
        "in flight": f"{' '.join(map(str, figures.in_flight))} by stage, in {unit}",
        "ring slots": ring,
    }
    if schedule.output_slots:
        lines["outputs"] = f"{schedule.output_slots} wait for their loss"
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def heading(schedule: Schedule) -> str:
    """The schedule's name and sizes in a line."""
    several = f", {schedule.chunks} chunks each" if schedule.chunks > 1 else ""
    return f"{schedule.name}: {_count(schedule.stages, 'stage')}{several}, " + _count(
        schedule.microbatches, "microbatch", "es"
    )


def report(schedule: Schedule, width: int | None = None) -> str:
    """Heading, table and summary."""
    return f"{heading(schedule)}\n\n{table(schedule, width)}\n\n{summary(schedule)}"


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number} {name}{plural * (number != 1)}"


def _entry(schedule: Schedule, microbatch: int, chunk: int) -> str:
    if schedule.chunks == 1:
        return str(microbatch)
    letter = LETTERS[chunk] if schedule.chunks <= len(LETTERS) else f".{chunk:0{len(str(schedule.chunks - 1))}}"
    return f"{microbatch}{letter}"


def _block(schedule: Schedule, ticks: range, label: int, cell: int) -> str:
    lines = ["tick".ljust(label) + "".join(f"{tick:>{cell}}" for tick in ticks)]
    for letter, work in _rows(schedule):
        for stage in range(schedule.stages):
            entries = zip(work.microbatch[ticks, stage].tolist(), work.chunk[ticks, stage].tolist(), strict=True)
            cells = ["." if i < 0 else _entry(schedule, i, c) for i, c in entries]
            lines.append(f"{letter} s{stage}".ljust(label) + "".join(f"{text:>{cell}}" for text in cells))
    lines.append("phase".ljust(label) + "".join(_span(phase, ticks, cell) for phase in schedule.phases) + END)
    return "\n".join(lines)


def _rows(schedule: Schedule) -> list[tuple[str, Work]]:
    if not schedule.split_backward:
        return [("F", schedule.forward), ("B", schedule.input_gradient)]
    return [("F", schedule.forward), ("I", schedule.input_gradient), ("W", schedule.weight_gradient)]


def _span(phase: Phase, ticks: range, cell: int) -> str:
    """` |--- F ---` over the phase's ticks among these; without the name where that does not fit."""
    inside = range(max(phase.start, ticks.start), min(phase.stop, ticks.stop))
    length = cell * len(inside)
    if not length:
        return ""
    room = length - 2
    name = next((name for name in (f" {phase.label} ", phase.label) if len(name) <= room), "")
    return " |" + name.center(room, "-")


def save_picture(schedule: Schedule, path: Path) -> None:
    """Draw the schedule over time into `path`, a PNG: a row per stage, backwards twice as long as forwards.

    Raises UserError without matplotlib, for a table too large to see anything in, and where the file can't be written.
    """
    cells = sum(int((work.microbatch >= 0).sum()) for _, work in _rows(schedule))
    if cells > PICTURE_CELLS:
        raise UserError(
            f"--png={path}: {cells:,} pieces of work are more than a picture shows; at most {PICTURE_CELLS:,}.\n"
            "Draw fewer microbatches: the pattern repeats."
        )
    figures = require("matplotlib.figure", f"--png={path}", otherwise="leave out --png")
    starts, lengths = _times(schedule)
    size = (min(40.0, max(8.0, 0.16 * starts[-1])), 1.5 + 0.42 * min(schedule.stages, 64))
    # A bare Figure: pyplot would keep it, and look for a display.
    figure = figures.Figure(figsize=size, dpi=120, layout="constrained")
    _draw(figure.add_subplot(), schedule, (starts, lengths), numbered=cells <= NUMBERED_CELLS)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(
            f"--png={path} can't be written: {error.strerror}. Give a file in a folder that exists."
        ) from error


def _costs(schedule: Schedule) -> tuple[int, int, int]:
    """Time drawn for forward, input gradient and weight gradient, in forwards; a backward in one piece is the first
    gradient's."""
    return (1, 1, 1) if schedule.split_backward else (1, 2, 0)


def _times(schedule: Schedule) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Start of each tick and the end, T + 1 in all, and each kind's time within each tick, 0 if the phase has none."""
    starts, lengths = [0], []
    for phase in schedule.phases:
        each = tuple(cost * has for cost, has in zip(_costs(schedule), phase[2:], strict=True))
        lengths += [each] * phase.ticks
        starts += [starts[-1] + sum(each) * (n + 1) for n in range(phase.ticks)]
    return starts, lengths


def _draw(axes: Any, schedule: Schedule, times: tuple[list[int], list[tuple[int, int, int]]], numbered: bool) -> None:
    starts, lengths = times
    axes.broken_barh([(0, starts[-1])], (-0.5, schedule.stages), facecolor="#ececec")
    for kind, (_, work) in enumerate(_rows(schedule)):
        for stage in range(schedule.stages):
            boxes, colors = [], []
            for tick, (i, c) in enumerate(
                zip(work.microbatch[:, stage].tolist(), work.chunk[:, stage].tolist(), strict=True)
            ):
                if i < 0:
                    continue
                x, length = starts[tick] + sum(lengths[tick][:kind]), lengths[tick][kind]
                boxes.append((x, length))
                colors.append(_color(kind, c, schedule.chunks))
                if numbered:
                    style = {"ha": "center", "va": "center", "fontsize": 6, "clip_on": True}
                    axes.text(x + length / 2, stage, _entry(schedule, i, c), **style)
            axes.broken_barh(boxes, (stage - 0.45, 0.9), facecolor=colors, edgecolor="white", linewidth=0.5)
    for phase in schedule.phases[1:]:
        axes.axvline(starts[phase.start], color="black", linewidth=0.8, linestyle=":")
    figures = measure(schedule)
    axes.set_title(f"{heading(schedule)}; bubble {float(figures.bubble):.1%} over ideal time", fontsize=9)
    axes.set_xlabel("time, in forwards of a chunk" + ("" if schedule.split_backward else " (backward: 2)"))
    axes.set_ylabel("stage")
    axes.set_xlim(0, starts[-1])
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(0, schedule.stages, max(1, schedule.stages // 32)))


def _color(kind: int, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Blue forwards, orange (input) and green (weight) gradients; later chunks paler."""
    base = ((0.36, 0.60, 0.88), (0.95, 0.62, 0.30), (0.45, 0.75, 0.45))[kind]
    pale = 0.65 * chunk / max(1, chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (value + (1 - value) * pale for value in base)
    return red, green, blue
