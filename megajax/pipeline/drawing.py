"""A pipeline schedule as text and as a picture."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megajax.config.errors import ConfigError, UserError
from megajax.display.charts import Box, TimelineChart, save_png
from megajax.pipeline.check import check, measure
from megajax.pipeline.schedule import Phase, Schedule, StageWork, build, problems
from megajax.storage.write_errors import write_fault

LABEL = 6
"""Width of a row's name for stages of one digit."""
END = " |"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_ENTRIES = 1_000_000
"""Maximum number of table entries to print."""
PICTURE_CELLS = 50_000
"""Maximum number of pieces of work in a picture; more would be unreadable and take minutes."""
NUMBERED_CELLS = 3_000
"""Maximum number of pieces of work in a picture for them to be numbered."""
NAMED_CHUNKS = 4
"""Maximum number of chunks that a legend lists; of more, only the first and the last."""


def draw(flags: Mapping[str, Any]) -> None:
    """Print a schedule's table and its figures; with --png, draw it. Raises UserError for sizes with problems."""
    name = flags["schedule"]
    sizes = {"stages": flags["stages"], "microbatches": flags["microbatches"], "chunks": flags["virtual_stages"]}
    if faults := problems(name, **sizes):
        flagged = [replace(problem, setting=f"--{problem.setting.replace('_', '-')}") for problem in faults]
        raise ConfigError(flagged, "command line")
    entries = prod(sizes.values())
    if entries > MOST_ENTRIES:
        raise UserError(
            f"{sizes['stages']} stages of {sizes['chunks']} chunks and {sizes['microbatches']} microbatches make "
            f"{entries:,} entries, more than the {MOST_ENTRIES:,} that are drawn.\n"
            "Give fewer --microbatches: the pattern repeats."
        )
    schedule = build(name, **sizes, loss_wait=flags["loss_wait"])
    check(schedule)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    picture = flags["png"]
    if picture is not None:
        save_picture(schedule, picture)
    print(report(schedule, width))
    if picture is not None:
        print(f"{'picture':<11} {picture}")


def table(schedule: Schedule, width: int | None = None) -> str:
    """The table as text: a column per tick, a row per stage and kind of work, an entry per microbatch.

    With several chunks, a letter says which one. F is a forward, B a backward. Ticks that don't fit into `width`
    columns follow below; None: no limit.
    """
    cell = 1 + max(2, len(str(schedule.ticks - 1)), len(_entry(schedule, schedule.microbatches - 1, 0)))
    label = LABEL + len(str(schedule.stages - 1)) - 1
    fit = schedule.ticks if width is None else max(1, (width - label - len(END)) // cell)
    spans = [range(at, min(at + fit, schedule.ticks)) for at in range(0, schedule.ticks, fit)]
    return "\n\n".join(_block(schedule, span, label, cell) for span in spans)


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
        "bubble": f"{float(figures.pipeline_bubble):.2%} over ideal time ({figures.pipeline_bubble}), "
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
    for letter, work, _ in _rows(schedule):
        for stage in range(schedule.stages):
            entries = zip(work.microbatch[ticks, stage].tolist(), work.chunk[ticks, stage].tolist(), strict=True)
            cells = ["." if i < 0 else _entry(schedule, i, c) for i, c in entries]
            lines.append(f"{letter} s{stage}".ljust(label) + "".join(f"{text:>{cell}}" for text in cells))
    lines.append("phase".ljust(label) + "".join(_span(phase, ticks, cell) for phase in schedule.phases) + END)
    return "\n".join(lines)


def _rows(schedule: Schedule) -> list[tuple[str, StageWork, int]]:
    """Kinds of work with a letter of NAMES, and how long they take, in forwards."""
    return [("F", schedule.forward, 1), ("B", schedule.backward, 2)]


NAMES = {"F": "forward", "B": "backward"}


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

    Raises UserError without matplotlib, for a table too large to be readable, and if the file can't be written.
    """
    cells = len(_rows(schedule)) * schedule.microbatches * schedule.chunks * schedule.stages
    if cells > PICTURE_CELLS:
        raise UserError(
            f"--png={path}: {cells:,} pieces of work are more than a picture shows; at most {PICTURE_CELLS:,}.\n"
            "Draw fewer microbatches: the pattern repeats."
        )
    timeline, colors = _timeline(schedule, numbered=cells <= NUMBERED_CELLS)
    inches = (min(40.0, max(8.0, 0.16 * timeline.end)), 2.1 + 0.42 * min(schedule.stages, 64))
    save_as_asked(lambda axes: timeline.plot(axes, colors), path, inches=inches)


def save_as_asked(plot: Callable[[Any], None], path: Path, *, inches: tuple[float, float]) -> None:
    """Let `plot` fill matplotlib axes for --png. Raises UserError without matplotlib, and if it can't be written."""
    try:
        save_png(plot, path, inches=inches, dpi=120)
    except ModuleNotFoundError as error:
        raise UserError(f"--png={path}: {error}. Or leave out --png.") from error
    except OSError as error:
        raise UserError(f"--png={path} can't be written: {write_fault(error)}. Choose an existing folder.") from error


def _timeline(schedule: Schedule, *, numbered: bool) -> tuple[TimelineChart, dict[str, tuple[float, ...]]]:
    """The boxes of all stages, and the colour of each class of boxes. The unit of time is a forward of a chunk."""
    kinds = [(letter, chunk) for letter, _, _ in _rows(schedule) for chunk in range(schedule.chunks)]
    boxes: dict[str, list[Box]] = {f"{letter}{chunk}": [] for letter, chunk in kinds}
    colors = {f"{letter}{chunk}": _color(letter, chunk, schedule.chunks) for letter, chunk in kinds}
    breaks, start = [], 0
    for phase in schedule.phases:
        breaks += [(start, "next phase")] if start else []
        for tick in range(phase.start, phase.stop):
            for letter, work, length in _rows(schedule):
                for stage, i in enumerate(work.microbatch[tick].tolist()):
                    if i >= 0:
                        chunk = int(work.chunk[tick, stage])
                        text = _entry(schedule, i, chunk) if numbered else ""
                        boxes[f"{letter}{chunk}"].append(Box(stage, start, length, text))
                start += length * (letter in phase.label)
    numbers = "; numbers are microbatches" + ", letters are chunks" * (1 < schedule.chunks <= len(LETTERS))
    numbers *= numbered
    listed = range(schedule.chunks) if schedule.chunks <= NAMED_CHUNKS else (0, schedule.chunks - 1)
    chunk_names = {chunk: f", chunk {_entry(schedule, 0, chunk)[1:].lstrip('.')}" for chunk in listed}
    names = {
        f"{letter}{chunk}": NAMES[letter] + chunk_names[chunk] * (schedule.chunks > 1)
        for letter, chunk in kinds
        if chunk in listed
    }
    timeline = TimelineChart(
        rows=[str(stage) for stage in range(schedule.stages)],
        boxes=boxes,
        names=names,
        end=start,
        title=f"{heading(schedule)}; bubble {float(measure(schedule).pipeline_bubble):.1%} over ideal time",
        x_label="time, in forwards of a chunk (backward: 2)" + numbers,
        y_label="stage",
        breaks=breaks,
    )
    return timeline, colors


def _color(letter: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """Blue forwards, orange backwards; later chunks paler."""
    base = {"F": (0.36, 0.60, 0.88), "B": (0.95, 0.62, 0.30)}[letter]
    pale = 0.65 * chunk / max(1, chunks - 1)
    return tuple(value + (1 - value) * pale for value in base)
