"""The facts of a run in words and numbers: what both forms of the report, page and terminal, say."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megajax.metrics.text import count, duration, moment
from megajax.reporting.history import Event, History
from megajax.reporting.timeline import Attempt, Share, attempts, data_wait, time_by_cause

ROUTINE = frozenset({"save", "evaluate", "first_step", "compiled", "metrics_superseded"})
"""Events of a run in which nothing went wrong: there may be thousands."""

BAD = frozenset({"persistent_fault", "numeric_fault", "evaluation_broken_off", "hang"})
WARNING = frozenset({"transient_fault", "update_skipped", "stopped"})

RECENT = 20
"""Steps whose mean stands for the end of a run."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings; `numbers` are columns to be set flush right."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a report says that is not a curve."""

    name: str
    verdict: str
    """What became of the run, in a line."""
    mood: str
    """good, warning or bad."""
    figures: Sequence[tuple[str, str, str]]
    """Name, value and a remark: what to see first."""
    summary: Sequence[tuple[str, str]]
    shares: Sequence[Share]
    shares_note: str
    attempts: Sequence[Attempt]
    tables: Sequence[Table]
    """Attempts, evaluations, memory."""
    differences: Sequence[tuple[str, str, str]]
    versions: Mapping[str, str]
    faults: Sequence[str]


def gather(history: History) -> Facts:
    """The facts of `history`."""
    found = attempts(history)
    shares = time_by_cause(history, found)
    verdict, mood = _verdict(history, found)
    wait = data_wait(history)
    note = ""
    if wait is not None:
        note = f"Steps waited {duration(wait)} for their rows, during which devices may have been at work."
    tables = [_attempts(history, found), _evaluations(history), _memory(found)]
    return Facts(
        name=history.name,
        verdict=verdict,
        mood=mood,
        figures=list(_figures(history, found, shares)),
        summary=list(_summary(history, found)),
        shares=shares,
        shares_note=note,
        attempts=found,
        tables=[table for table in tables if table.rows],
        differences=history.differences,
        versions=history.versions,
        faults=(*history.faults, *_lost(history, found)),
    )


def _verdict(history: History, found: Sequence[Attempt]) -> tuple[str, str]:
    done = int(history.steps.step[-1]) if len(history.steps) else 0
    # Events tell of steps whose lines were lost.
    done = max(done, found[-1].last_step) if found else done
    total = history.config.get("steps")
    at = f"step {done:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    if not found:
        return f"{at}; events.jsonl tells of no attempt", "warning"
    last = found[-1]
    if last.exit_code is None:
        return f"{at}: {last.ending}; last sign of life {moment(last.end)}", "warning"
    mood = "bad" if last.exit_code else "good" if last.ending in ("done", "nothing to train") else "warning"
    ending = re.sub(r"^step \d+: ", "", last.ending)
    return f"{at}: {ending}; exit code {last.exit_code}", mood


def _lost(history: History, found: Sequence[Attempt]) -> Iterator[str]:
    last = found[-1].last_step if found else 0
    there = (history.folder / "metrics.jsonl").exists()  # otherwise it is said that it is not
    if there and not len(history.steps) and any(attempt.last_step > attempt.first_step for attempt in found):
        yield f"metrics.jsonl holds no step, events.jsonl tells of step {last:,}: what was measured is lost"


def _figures(history: History, found: Sequence[Attempt], shares: Sequence[Share]) -> Iterator[tuple[str, str, str]]:
    steps = history.steps
    if not len(steps):
        return
    done, total = int(steps.step[-1]), history.config.get("steps")
    yield "steps", f"{done:,}", f"{done / total:.0%} of {total:,}" if isinstance(total, int) and total else ""
    loss = steps.column("loss")
    yield "train loss", number(loss[-1]) if np.isfinite(loss[-1]) else steps.broken.get(done, "?"), _recent(loss)
    for split, (at, losses) in history.evaluations.items():
        yield f"{split} loss", number(losses[-1]), f"after step {int(at[-1]):,}"
    if np.isfinite(tokens := steps.column("consumed_tokens")[-1]):
        yield "tokens", count(tokens), ""
    speed = steps.column("tokens_per_second")
    if np.isfinite(speed).any():
        each = steps.column("tokens_per_second_per_device")
        yield "tokens/s", count(float(np.nanmedian(speed))), f"median; {count(float(np.nanmedian(each)))} per device"
    causal, full = (steps.column(f"mfu_{name}") for name in ("causal", "full"))
    if np.isfinite(causal).any():
        yield "MFU", f"{np.nanmedian(causal):.1%}", f"median; {np.nanmedian(full):.1%} with attention counted in full"
    if shares:
        wall = found[-1].end - found[0].begin
        useful = sum(share.part for share in shares if share.cause == "steps")
        yield "wall time", duration(wall), f"{useful:.0%} of it in steps that counted"


def _recent(loss: np.ndarray) -> str:
    last = loss[-RECENT:]
    return f"mean of the last {len(last)}: {number(np.nanmean(last))}" if np.isfinite(last).any() else ""


def _summary(history: History, found: Sequence[Attempt]) -> Iterator[tuple[str, str]]:
    steps = history.steps
    yield "folder", str(history.folder.resolve())
    if found:
        yield "begun", moment(found[0].begin)
        yield "last sign of life", moment(found[-1].end)
        yield "attempts", str(len(found))
        devices = sorted({f"{a.start.get('devices', '?')}" for a in found})
        processes = sorted({f"{a.start.get('processes', '?')}" for a in found})
        yield "devices", f"{' and '.join(devices)}, in {' and '.join(processes)} process{'es' * (processes != ['1'])}"
    if len(steps):
        yield "fastest, median, slowest step", _spread(steps.column("step_seconds"))
        skipped = int(steps.total("skipped"))
        yield "updates not made", f"{skipped:,}"
        yield "losses not finite", _broken(steps.broken)
        yield "largest gradient norm", _largest(steps.step, steps.column("grad_norm"))
        yield "loss scale", _range(steps.column("loss_scale"))
        if not np.isfinite(steps.column("mfu_causal")).any():
            yield "MFU", "unknown: the peak of these devices is not in the table"
        yield (
            "TFLOP/s per device",
            _tflops(steps.column("tflops_per_device_causal"), steps.column("tflops_per_device_full")),
        )
    kept = history.checkpoints
    yield (
        "checkpoints kept",
        ", ".join(f"{step:,}" for step in kept[-8:]) + ("" if len(kept) <= 8 else " (newest)") or "none",
    )


def _spread(seconds: np.ndarray) -> str:
    if not np.isfinite(seconds).any():
        return "unknown"
    return ", ".join(short_time(float(f(seconds))) for f in (np.nanmin, np.nanmedian, np.nanmax))


def _broken(broken: Mapping[int, str]) -> str:
    if not broken:
        return "none"
    first = ", ".join(f"step {step:,} ({kind})" for step, kind in list(broken.items())[:5])
    return f"{len(broken):,}: {first}{', …' if len(broken) > 5 else ''}"


def _largest(step: np.ndarray, norm: np.ndarray) -> str:
    if not np.isfinite(norm).any():
        return "unknown"
    place = int(np.nanargmax(norm))
    return f"{number(norm[place])} in step {int(step[place]):,}"


def _range(values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "unknown"
    low, high = float(finite.min()), float(finite.max())
    return f"{low:g} throughout" if low == high else f"{low:g} to {high:g}, {finite[-1]:g} at the end"


def _tflops(causal: np.ndarray, full: np.ndarray) -> str:
    if not np.isfinite(causal).any():
        return "unknown"
    return f"median {np.nanmedian(causal):.3g} with causal attention, {np.nanmedian(full):.3g} with full"


def _attempts(history: History, found: Sequence[Attempt]) -> Table:
    rows = [
        (
            str(a.number),
            moment(a.begin),
            duration(a.seconds),
            f"{a.first_step:,}",
            f"{a.last_step:,}",
            f"{a.again:,}" if a.again else "",
            str(a.start.get("devices", "?")),
            "" if a.exit_code is None else str(a.exit_code),
            a.ending,
        )
        for a in found
    ]
    headings = ("attempt", "begun", "lasted", "from step", "to step", "run again", "devices", "exit code", "end")
    return Table("Attempts", headings, rows, frozenset({2, 3, 4, 5, 6, 7}))


def _evaluations(history: History, most: int = 12) -> Table:
    rows, left_out = [], 0
    for split, (steps, losses) in history.evaluations.items():
        best = int(np.nanargmin(losses)) if np.isfinite(losses).any() else -1
        shown = sorted({best, *range(max(len(steps) - most, 0), len(steps))} - {-1})
        left_out += len(steps) - len(shown)
        for place in shown:
            loss = float(losses[place])
            perplexity = f"{np.exp(loss):,.2f}" if loss < 700 else "inf"
            mark = "lowest" if place == best and len(steps) > 1 else ""
            rows.append((split, f"{int(steps[place]):,}", number(loss), perplexity if loss == loss else "?", mark))
    note = f"{left_out:,} earlier ones left out." if left_out else ""
    return Table("Evaluations", ("split", "after step", "loss", "perplexity", ""), rows, frozenset({1, 2, 3}), note)


def _memory(found: Sequence[Attempt]) -> Table:
    names = ("arguments", "temporary", "outputs", "program")
    rows = []
    for a in found:
        for event in a.events:
            if event.name == "compiled":
                parts = [event.fields.get(name) for name in names]
                known = [part for part in parts if isinstance(part, int | float)]
                sizes = [size(part) if isinstance(part, int | float) else "?" for part in parts]
                rows.append((str(a.number), size(sum(known)), *sizes))
    headings = ("attempt", "whole", "state and batch", "temporaries", "outputs", "program")
    return Table("Memory of the compiled step, per device", headings, rows, frozenset(range(1, 6)))


def event_rows(found: Sequence[Attempt], *, routine: int) -> tuple[list[tuple[str, Event]], int]:
    """Events with their moods, in order, and how many are left out: of routine ones all but the last `routine`."""
    events = [event for a in found for event in a.events]
    usual = [place for place, event in enumerate(events) if event.name in ROUTINE]
    drop = set(usual[: max(len(usual) - routine, 0)])
    return [(mood_of(event), event) for place, event in enumerate(events) if place not in drop], len(drop)


def mood_of(event: Event) -> str:
    """good, warning, bad, or plain for what happens in every run."""
    if event.name in BAD:
        return "bad"
    if event.name in WARNING:
        return "warning"
    return "plain"


def details(event: Event) -> str:
    """The fields of an event as text."""
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in event.fields.items())


def _plain(value: Any) -> str:
    match value:
        case dict():
            return "(" + ", ".join(f"{name.replace('_', ' ')} {_plain(item)}" for name, item in value.items()) + ")"
        case float():
            return f"{value:.6g}"
        case None:
            return "none"
        case int() if value is not True and value is not False and value >= 10_000:
            return f"{value:,}"
    return str(value)


def number(value: float) -> str:
    """A loss or a norm: four digits after the point, or in exponents where that says nothing."""
    if not np.isfinite(value):
        return str(float(value))
    return f"{value:.4f}" if 0.01 <= abs(value) < 10_000 or value == 0 else f"{value:.3e}"


def size(number_of_bytes: float) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{number_of_bytes / 2**30:.2f} GiB" if number_of_bytes >= 2**30 else f"{number_of_bytes / 2**20:.1f} MiB"


def short_time(seconds: float) -> str:
    """As `duration`, in milliseconds below a second."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else duration(seconds)
