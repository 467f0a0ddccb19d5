"""The report of a run without its curves: verdict, headline figures and tables, for page and terminal."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megajax.display.text import byte_size, count, duration, moment, skipped_rows
from megajax.reporting.attempts import STOP, PastAttempt, attempts
from megajax.reporting.history import LARGEST_EXPONENT, ROUTINE, STATUS, Event, History
from megajax.reporting.wall_time import RunTimeline, TimeShare, data_wait, goodput, time_by_cause, timeline

TIME = "Where the time went"
"""Title of the table of wall time by cause."""

RECENT = 20
"""Number of last steps in the mean loss."""

EVALUATIONS = 12
"""Number of last evaluations in the list of each split."""


@dataclass(frozen=True, slots=True)
class SummaryTable:
    """Rows of text."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    """Columns that are flush right."""
    note: str = ""
    row_status: Sequence[str] = ()
    """"good", "warning", "bad" or "plain" for each row; empty: all are plain."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A report without its curves."""

    name: str
    verdict: str
    """The state of the run in one line."""
    status: str
    """"good", "warning" or "bad"."""
    figures: Sequence[tuple[str, str, str]]
    """Name, value and remark of the headline numbers."""
    shares: Sequence[TimeShare]
    attempts: Sequence[PastAttempt]
    timeline: RunTimeline | None
    tables: Sequence[SummaryTable]
    """Tables with rows; the first is the time by cause, if `shares` are known."""
    faults: Sequence[str]
    """Missing or damaged files of the folder."""


def summarize(history: History, *, routine: int) -> RunSummary:
    """Summarise a run. routine: maximum number of routine events in the list of events."""
    runs = attempts(history)
    shares = time_by_cause(history, runs)
    verdict, status = _verdict(history, runs)
    differences = [(name, value, default) for name, default, value in history.differences]
    tables = [
        _time(history, shares),
        _attempts(runs),
        _evaluations(history),
        SummaryTable("Tasks", ("task", "after step", "figure", "value"), list(_tasks(history)), frozenset({1, 3})),
        _memory(runs),
        _events(runs, routine),
        SummaryTable("The run", (), list(_facts(history, runs))),
        SummaryTable("Config: differences from the defaults", ("setting", "value", "default"), differences),
    ]
    return RunSummary(
        name=history.name,
        verdict=verdict,
        status=status,
        figures=list(_figures(history, runs)),
        shares=shares,
        attempts=runs,
        timeline=timeline(runs),
        tables=[table for table in tables if table.rows],
        faults=(*history.faults, *_lost_metrics(history, runs)),
    )


def _verdict(history: History, runs: Sequence[PastAttempt]) -> tuple[str, str]:
    # Events may be later than the last line of metrics.jsonl.
    last_step = max([0, *history.steps.step[-1:].tolist(), *(run.last_step for run in runs[-1:])])
    total = history.config.get("steps")
    at = f"step {last_step:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    if not runs:
        return f"{at}; events.jsonl has no attempt", "warning"
    last, *refused = _verdict_of(runs)
    note = f". A later start was rejected: {refused[-1].outcome.text}" if refused else ""
    if (stop := next((e for e in reversed(last.events) if e.name == STOP), None)) is not None:
        code, why = stop.integer("code"), stop.text("why") or "not restarted"
        if code != last.exit_code:
            return f"{at}: {why}{'' if code is None else f'; exit code {code}'}. Last: {last.outcome.text}", "bad"
    if last.exit_code is None:
        status = "warning" if last.outcome.failure is None else "bad"
        return f"{at}: {last.ending}; last event or step at {moment(last.end)}{note}", status
    status = "bad" if last.exit_code else "good" if last.ending in ("done", "nothing to train") else "warning"
    ending = re.sub(r"^step \d+: ", "", last.ending)
    return f"{at}: {ending}; exit code {last.exit_code}{note}", status


def _verdict_of(runs: Sequence[PastAttempt]) -> Sequence[PastAttempt]:
    """The attempt that determines the verdict, and later attempts that were rejected for their settings."""
    trained = [index for index, run in enumerate(runs) if run.ready is not None or run.exit_code != 2]
    return runs[trained[-1] :] if trained else runs[-1:]


def _lost_metrics(history: History, runs: Sequence[PastAttempt]) -> Iterator[str]:
    exists = (history.folder / "metrics.jsonl").exists()  # history.faults names a missing file
    if exists and not len(history.steps) and any(run.last_step > run.first_step for run in runs):
        yield f"metrics.jsonl has no steps, but events.jsonl reaches step {runs[-1].last_step:,}: metrics are lost"


def _figures(history: History, runs: Sequence[PastAttempt]) -> Iterator[tuple[str, str, str]]:
    steps = history.steps
    if not len(steps):
        return
    last_step, total = int(steps.step[-1]), history.config.get("steps")
    yield "steps", f"{last_step:,}", f"{last_step / total:.0%} of {total:,}" if isinstance(total, int) and total else ""
    loss = steps.column("loss")
    last = loss[-RECENT:]
    mean = f"mean of the last {len(last)}: {number(np.nanmean(last))}" if np.isfinite(last).any() else ""
    yield "train loss", number(loss[-1]) if np.isfinite(loss[-1]) else steps.nonfinite.get(last_step, "?"), mean
    for split, (at, losses) in history.evaluations.items():
        yield f"{split} loss", number(losses[-1]), f"after step {int(at[-1]):,}"
    if np.isfinite(tokens := steps.column("consumed_tokens")[-1]):
        yield "tokens", count(tokens), ""
    if (speed := steps.median("tokens_per_second")) is not None:
        yield "tokens/s", count(speed), f"median; {count(steps.median('tokens_per_second_per_device') or 0)} per device"
    if (mfu := steps.median("mfu_causal")) is not None:
        yield "MFU", f"{mfu:.1%}", f"median; {steps.median('mfu_full') or 0:.1%} full (no mask)"
    elif history.shows_flops and (rate := steps.median("tflops_per_device_causal")) is not None:
        full = steps.median("tflops_per_device_full") or 0
        yield "TFLOP/s per device", f"{rate:.3g}", f"median; {full:.3g} full (no mask)"
    if (run_goodput := goodput(history, runs)) is not None:
        yield "wall time", duration(run_goodput.elapsed), f"in {len(runs)} attempt{'s' * (len(runs) != 1)}"
        yield "goodput", f"{run_goodput.share:.1%}", "of the wall time in steps whose result was kept"


def _facts(history: History, runs: Sequence[PastAttempt]) -> Iterator[tuple[str, str]]:
    steps, checkpoints = history.steps, history.checkpoints
    yield "folder", str(history.folder.resolve())
    if runs:
        yield "started", moment(runs[0].begin)
        yield "last event or step", moment(runs[-1].end)
        starts = [run.start for run in runs if run.start]
        devices, processes, kinds = (
            " and ".join(sorted({str(start[name]) for start in starts if name in start}))
            for name in ("devices", "processes", "device_kind")
        )
        kind = f" x {kinds}" if kinds else ""
        yield "devices", f"{devices or '?'}{kind}, in {processes or '?'} process{'es' * (processes != '1')}"
    if len(steps):
        yield "skipped updates", f"{int(steps.total('skipped')):,}"
        first = ", ".join(f"step {step:,} ({kind})" for step, kind in list(steps.nonfinite.items())[:5])
        more = ", …" * (len(steps.nonfinite) > 5)
        yield "non-finite losses", f"{len(steps.nonfinite):,}: {first}{more}" if first else "none"
    reports = [event.fields.get("splits") for event in history.events if event.name == "rows_skipped"]
    if reports and isinstance(reports[-1], dict):
        yield "rows skipped", skipped_rows(reports[-1])
    listed = ", ".join(f"{step:,}" for step in checkpoints[-8:])
    yield "checkpoints kept", f"{listed}{' (newest)' * (len(checkpoints) > 8)}" or "none"
    versions = ", ".join(f"{name} {version}" for name, version in history.versions.items())
    yield "versions", f"{versions} (at the newest checkpoint)" if versions else "unknown: stored in checkpoints only"


def _time(history: History, shares: Sequence[TimeShare]) -> SummaryTable:
    rows = [(share.cause, duration(share.seconds), f"{share.part:.1%}", share.note) for share in shares]
    wait = data_wait(history)
    note = "" if wait is None else f"Process 0 waited {duration(wait)} for data, while devices may have been busy."
    return SummaryTable(TIME, (), rows, frozenset({1, 2}), note)


def _attempts(runs: Sequence[PastAttempt]) -> SummaryTable:
    rows = [
        (
            str(run.number),
            moment(run.begin),
            duration(run.seconds),
            f"{run.first_step:,}",
            f"{run.last_step:,}",
            f"{run.rerun_steps:,}" if run.rerun_steps else "",
            str(run.start.get("devices", "")),
            "" if run.exit_code is None else str(run.exit_code),
            run.ending + _cascade(run),
        )
        for run in runs
    ]
    headings = ("attempt", "started", "duration", "from step", "to step", "run again", "devices", "exit code", "end")
    return SummaryTable("Attempts", headings, rows, frozenset({2, 3, 4, 5, 6, 7}))


def _cascade(run: PastAttempt) -> str:
    """The number of processes that failed after the first one, as text."""
    processes = {event.integer("process") for event in run.outcome.cascade if event.name != "signal"}
    processes -= {run.outcome.failure.integer("process")} if run.outcome.failure is not None else set()
    count = len(processes)
    return f"; then {count} other process{'es' * (count != 1)} failed" if count else ""


def _evaluations(history: History) -> SummaryTable:
    rows, omitted = [], 0
    for split, (steps, losses) in history.evaluations.items():
        best = int(np.nanargmin(losses)) if np.isfinite(losses).any() else -1
        listed = sorted({best, *range(max(len(steps) - EVALUATIONS, 0), len(steps))} - {-1})
        omitted += len(steps) - len(listed)
        for index in listed:
            loss = float(losses[index])
            perplexity = "?" if loss != loss else f"{np.exp(loss):,.2f}" if loss < LARGEST_EXPONENT else "inf"
            perplexity = "" if split in history.other_losses else perplexity
            lowest = "lowest" if index == best and len(steps) > 1 else ""
            rows.append((split, f"{int(steps[index]):,}", number(loss), perplexity, lowest))
    note = f"{omitted:,} earlier evaluations omitted." if omitted else ""
    return SummaryTable(
        "Evaluations", ("split", "after step", "loss", "perplexity", ""), rows, frozenset({1, 2, 3}), note
    )


def _tasks(history: History) -> Iterator[tuple[str, str, str, str]]:
    for task, (step, figures) in history.tasks.items():
        for name, value in figures.items():
            yield task, f"{step:,}", name.replace("_", " "), number(value)


def _memory(runs: Sequence[PastAttempt]) -> SummaryTable:
    rows = []
    for run in runs:
        for event in run.events:
            if event.name == "compiled":
                parts = [event.fields.get(name) for name in ("arguments", "temporary", "outputs", "program")]
                total = sum(part for part in parts if isinstance(part, int | float))
                sizes = [byte_size(part) if isinstance(part, int | float) else "?" for part in parts]
                rows.append((str(run.number), byte_size(total), *sizes))
    headings = ("attempt", "total", "state and batch", "temporaries", "outputs", "program")
    return SummaryTable("Memory of the compiled step, per device", headings, rows, frozenset(range(1, 6)))


def _events(runs: Sequence[PastAttempt], routine: int) -> SummaryTable:
    events = [event for run in runs for event in _in_order(run)]
    usual = [index for index, event in enumerate(events) if event.name in ROUTINE]
    dropped = set(usual[: max(len(usual) - routine, 0)])
    listed = [event for index, event in enumerate(events) if index not in dropped]
    steps = ["" if event.step is None else f"{event.step:,}" for event in listed]
    cascade = {id(event) for run in runs for event in run.outcome.cascade}
    names = [event.name.replace("_", " ") + " (cascade)" * (id(event) in cascade) for event in listed]
    rows = [(moment(e.time), at, name, details(e)) for e, at, name in zip(listed, steps, names, strict=True)]
    note = f"{len(dropped):,} earlier saves, evaluations and other routine events omitted." if dropped else ""
    headings = ("time", "step", "event", "details")
    row_status = ["plain" if id(event) in cascade else STATUS.get(event.name, "plain") for event in listed]
    return SummaryTable("Events", headings, rows, frozenset({1}), note, row_status)


def _in_order(run: PastAttempt) -> list[Event]:
    """The events of an attempt by time, its first failure before the failures that it caused."""
    failure, cascade = run.outcome.failure, {id(event) for event in run.outcome.cascade}

    def key(event: Event) -> tuple[float, bool]:
        follows = id(event) in cascade and failure is not None
        return max(event.at, failure.at) if follows else event.at, follows

    return sorted(run.events, key=key)


def details(event: Event) -> str:
    """The fields of an event as text."""
    fields = {name: value for name, value in event.fields.items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in fields.items())


def _plain(value: object) -> str:
    match value:
        case dict():
            return "(" + ", ".join(f"{name.replace('_', ' ')} {_plain(item)}" for name, item in value.items()) + ")"
        case float():
            return f"{value:.6g}"
        case int() if value >= 10_000:
            return f"{value:,}"
    return "none" if value is None else str(value)


def number(value: float) -> str:
    """A loss or a norm with four decimals; very small and large values in scientific notation."""
    if not np.isfinite(value):
        return str(float(value))
    return f"{value:.4f}" if 0.01 <= abs(value) < 10_000 or value == 0 else f"{value:.3e}"
