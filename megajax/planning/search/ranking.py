"""What a search found, in order: the best layouts with their figures, and why each is where it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megajax.planning.cost.costs import Device
from megajax.planning.cost.estimate import Estimate, speed
from megajax.planning.program.devices import GIB
from megajax.planning.search.candidates import Choice
from megajax.planning.search.reasons import Verdict, difference, parts, strength, well_known
from megajax.planning.search.search import Entry, Group, Tally, Task, merged, rank, rounded
from megajax.planning.search.verified import Compiled

SHOWN = 5
"""Layouts in the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A layout in the table."""

    entry: Entry
    estimate: Estimate
    compiled: Compiled | None
    """None where only formulas were asked."""
    why: str = ""

    @property
    def step_seconds(self) -> float:
        return self.compiled.step_seconds if self.compiled else self.estimate.step_seconds

    @property
    def tokens(self) -> float:
        """Per second and device."""
        if self.compiled:
            return self.compiled.tokens_per_second_per_device
        return self.estimate.tokens_per_second_per_device

    @property
    def mfu(self) -> float:
        return self.compiled.mfu_causal if self.compiled else self.estimate.mfu_causal

    @property
    def peak_gib(self) -> float:
        return self.compiled.peak_gib if self.compiled else self.estimate.memory.peak_gib

    @property
    def exposed(self) -> float:
        """Share of the step in which collectives run alone."""
        seconds = self.compiled.exposed_seconds if self.compiled else self.estimate.exposed_seconds
        return seconds / self.step_seconds

    @property
    def bubble(self) -> float:
        """Share of the step in which stages wait."""
        seconds = self.compiled.bubble_seconds if self.compiled else self.estimate.bubble_seconds
        return seconds / self.step_seconds

    def parts(self, of_compiled: bool) -> dict[str, float]:
        """Seconds by cause."""
        if not of_compiled or self.compiled is None:
            return parts(self.estimate)
        names = {
            "compute_seconds": "computing",
            "exposed_seconds": "exposed communication",
            "bubble_seconds": "bubble",
            "optimizer_seconds": "optimizer",
        }
        return {told: getattr(self.compiled, name) for name, told in names.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All that a search has to say."""

    task: Task
    rows: tuple[Row, ...]
    """The best, those the compiler has confirmed before all others."""
    refuted: tuple[tuple[Choice, Compiled], ...]
    """Promising by formula, but not for the compiler."""
    verdicts: tuple[Verdict, ...]
    tally: Tally
    seconds: float
    compile_seconds: float

    @property
    def best(self) -> Row:
        return self.rows[0]


def rows_of(task: Task, entries: list[Entry], compiled: Mapping[Choice, Compiled]) -> list[Row]:
    """The best SHOWN. What was compiled is ranked by its program, ahead of what was not."""
    fitting = [entry for entry in entries if entry.choice not in compiled or compiled[entry.choice].fits]
    promising = fitting[: SHOWN + len(compiled)]
    rows = [
        Row(entry=entry, estimate=task.estimated(entry.choice), compiled=compiled.get(entry.choice))
        for entry in promising
    ]
    rows.sort(key=lambda row: (row.compiled is None, rounded(row.step_seconds), rank(row.entry)[1], row.peak_gib))
    return [_explained(row, rows[0], task.device) for row in rows[:SHOWN]]


def _explained(row: Row, best: Row, device: Device) -> Row:
    if row is best:
        why = strength(row.parts(True), device.usable_gib - row.peak_gib)
    else:
        both = row.compiled is not None and best.compiled is not None
        slower = row.step_seconds / best.step_seconds - 1
        told = difference(row.parts(both), best.parts(both))
        words = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}" if abs(slower) >= 5e-4 else "as fast"
        if slower < 0 and rounded(row.step_seconds) == rounded(best.step_seconds):
            words += ", no difference to the model, with a longer pipeline or more memory"
        why = words + (f": {told}" if told else "")
        if row.compiled is None and best.compiled is not None and slower < 0:
            why = f"as fast by formula, not compiled{': ' + told if told else ''}"
    return Row(entry=row.entry, estimate=row.estimate, compiled=row.compiled, why=why)


def result(
    task: Task,
    found: Mapping[tuple[int, int, int], Group],
    compiled: Mapping[Choice, Compiled],
    *,
    seconds: float,
    compile_seconds: float,
) -> Result | None:
    """None where nothing fits."""
    entries, tally = merged(found)
    rows = rows_of(task, entries, compiled)
    if not rows:
        return None
    return Result(
        task=task,
        rows=tuple(rows),
        refuted=tuple((choice, one) for choice, one in compiled.items() if not one.fits),
        verdicts=tuple(well_known(task, found, rows[0].entry)),
        tally=tally,
        seconds=seconds,
        compile_seconds=compile_seconds,
    )


def to_dict(found: Result, settings: list[str]) -> dict[str, Any]:
    """For JSON; settings: what the best lays over the config."""
    task = found.task
    return {
        "device": task.device.name,
        "devices": task.space.devices,
        "gpus_per_node": task.space.per_node,
        "fixed": dict(task.space.fixed),
        "settings": settings,
        "tried": found.tally.total,
        "refused": found.tally.refused,
        "too_large": found.tally.too_large,
        "estimated": found.tally.estimated,
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
        "best": [
            {
                **row.entry.choice.plain(),
                "compiled": row.compiled is not None,
                "peak_gib": row.peak_gib,
                "usable_gib": task.device.usable_gib,
                "formula_peak_gib": row.estimate.memory.peak_gib,
                **speed(row.estimate),
                "step_seconds": row.step_seconds,
                "formula_step_seconds": row.estimate.step_seconds,
                "tokens_per_second_per_device": row.tokens,
                "mfu_causal": row.mfu,
                "exposed_share": row.exposed,
                "bubble_share": row.bubble,
                "why": row.why,
            }
            for row in found.rows
        ],
        "rejected_by_compiler": [
            {**choice.plain(), "peak_gib": one.peak_gib, "error": one.error} for choice, one in found.refuted
        ],
        "well_known": [{"choice": verdict.name, "verdict": verdict.text} for verdict in found.verdicts],
    }


def nothing_fits(task: Task, found: Mapping[tuple[int, int, int], Group]) -> str:
    """What to tell where no layout fits."""
    fixed = ", ".join(f"{name}={value}" for name, value in task.space.fixed.items())
    given = f" with {fixed}" if fixed else ""
    where = f"{task.space.devices} x {task.device.name}"
    small = [entry for group in found.values() for entry in group.smallest.values()]
    if small:
        least = min(small, key=lambda entry: entry.peak)
        return (
            f"nothing fits on {where}{given}: the smallest layout ({least.choice.layout}, "
            f"{least.choice.details}) takes {least.peak / GIB:.1f} GiB, and {task.limit / GIB:.1f} may be taken.\n"
            f"Give more devices or larger ones{', or fix fewer settings' * bool(fixed)}."
        )
    refusals: dict[str, int] = {}
    for group in found.values():
        for text in group.refusals.values():
            refusals[text] = refusals.get(text, 0) + 1
    most = sorted(refusals, key=lambda text: -refusals[text])[:3]
    return (
        f"no layout of {where}{given} passes the config's rules:\n"
        + "\n".join(f"  {text}" for text in most)
        + f"\nChange what they name{', or fix fewer settings' * bool(fixed)}."
    )
