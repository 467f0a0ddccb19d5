"""The result of a search: the best layouts in order, well-known layouts beside them, and a config file of the best."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megajax.charts import Segment
from megajax.config.errors import UserError
from megajax.config.files import SHIPPED, find, split_source
from megajax.metrics.text import duration
from megajax.planning.cost.estimate import Estimate, speed
from megajax.planning.program.devices import GIB
from megajax.planning.search.candidates import Choice
from megajax.planning.search.compile_worker import Prediction
from megajax.planning.search.search import Entry, Group, Place, Tally, Task, explore, merged, rank, rounded
from megajax.planning.show import BY_FORMULA, Report, Table, plan_report

SHOWN = 5
"""Layouts in the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A layout in the table."""

    entry: Entry
    estimate: Estimate
    """By formula."""
    prediction: Prediction
    """Of its compiled program, if it was compiled; else by formula."""
    compiled: bool

    @property
    def exposed(self) -> float:
        """Fraction of the step in which communication is not hidden."""
        return self.prediction.exposed_seconds / self.prediction.step_seconds

    @property
    def bubble(self) -> float:
        """Fraction of the step in which stages idle."""
        return self.prediction.bubble_seconds / self.prediction.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Everything that a search has found."""

    task: Task
    rows: tuple[Row, ...]
    """The best: compiled ones first, by their own times."""
    rejected: tuple[tuple[Choice, Prediction], ...]
    """Promising by formula, but the compiled program does not fit or there is none."""
    well_known: tuple[tuple[str, str], ...]
    """Name and verdict of layouts that a reader will ask about."""
    tally: Tally
    seconds: float
    compile_seconds: float

    @property
    def best(self) -> Row:
        return self.rows[0]

    def slower(self, row: Row) -> float:
        """Step time over that of the best, less 1."""
        return row.prediction.step_seconds / self.best.prediction.step_seconds - 1

    def to_dict(self, settings: list[str]) -> dict[str, Any]:
        """For JSON. settings: those that the best lays over the config."""
        task, tally = self.task, self.tally
        return {
            "device": task.device.name,
            "devices": task.space.devices,
            "gpus_per_node": task.space.per_node,
            "fixed": dict(task.space.fixed),
            "settings": settings,
            "tried": tally.total,
            "refused": tally.refused,
            "too_large": tally.too_large,
            "estimated": tally.estimated,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "best": [
                {
                    **row.entry.choice.plain(),
                    "compiled": row.compiled,
                    "usable_gib": task.device.usable_gib,
                    "formula_peak_gib": row.estimate.memory.peak_gib,
                    **speed(row.estimate),
                    "formula_step_seconds": row.estimate.step_seconds,
                    "peak_gib": row.prediction.peak_gib,
                    "step_seconds": row.prediction.step_seconds,
                    "tokens_per_second_per_device": row.prediction.tokens_per_second_per_device,
                    "mfu_causal": row.prediction.mfu_causal,
                    "exposed_share": row.exposed,
                    "bubble_share": row.bubble,
                    "slower": self.slower(row),
                }
                for row in self.rows
            ],
            "rejected_by_compiler": [
                {**choice.plain(), "peak_gib": one.peak_gib, "error": one.error} for choice, one in self.rejected
            ],
            "well_known": [{"choice": name, "verdict": verdict} for name, verdict in self.well_known],
        }


def result(
    task: Task,
    groups: Mapping[Place, Group],
    compiled: Mapping[Choice, Prediction],
    *,
    seconds: float,
    compile_seconds: float,
) -> Result:
    """Rank what a search has found. Raises UserError if nothing fits."""
    entries, tally = merged(groups)
    rows = rows_of(task, entries, compiled)
    if not rows:
        raise UserError(_nothing_fits(task, groups))
    return Result(
        task=task,
        rows=tuple(rows),
        rejected=tuple((choice, one) for choice, one in compiled.items() if not one.fits),
        well_known=tuple(_well_known(task, groups, rows[0].entry.choice)),
        tally=tally,
        seconds=seconds,
        compile_seconds=compile_seconds,
    )


def rows_of(task: Task, entries: list[Entry], compiled: Mapping[Choice, Prediction]) -> list[Row]:
    """The best SHOWN layouts. Compiled ones rank by their programs, ahead of all others."""
    fitting = [entry for entry in entries if entry.choice not in compiled or compiled[entry.choice].fits]
    rows = []
    for entry in fitting[: SHOWN + len(compiled)]:
        estimate = task.estimated(entry.choice)
        prediction = compiled.get(entry.choice) or Prediction.of(estimate, estimate.memory.peak_gib)
        in_program = entry.choice in compiled
        rows.append(Row(entry=entry, estimate=estimate, prediction=prediction, compiled=in_program))

    def key(row: Row) -> tuple:
        prediction = row.prediction
        return not row.compiled, rounded(prediction.step_seconds), rank(row.entry)[1], prediction.peak_gib

    return sorted(rows, key=key)[:SHOWN]


def _well_known(task: Task, groups: Mapping[Place, Group], best: Choice) -> Iterator[tuple[str, str]]:
    """Pure FSDP, tensor parallelism without a pipeline, and the config as given: name and verdict."""
    space, fsdp = task.space, (1, 1, task.space.devices)
    group = None
    if fsdp in groups and space.fixed.get("data_sharding", "fsdp") == "fsdp":
        sharded = replace(space, fixed={**space.fixed, "data_sharding": "fsdp"})
        group = explore(replace(task, space=sharded), fsdp)
    yield "pure FSDP", _verdict_of_group(task, group, best)
    tensor = max((place[0] for place in groups if place[1] == 1 and place[0] <= space.per_node), default=space.per_node)
    group = groups.get((tensor, 1, space.devices // tensor))
    yield f"tensor {tensor} without a pipeline", _verdict_of_group(task, group, best)
    given = space.given()
    yield f"the config as given ({given.layout})", _verdict(task, given, best)


def _verdict_of_group(task: Task, group: Group | None, best: Choice) -> str:
    if group is None:
        return f"not tried: {task.fixed()} is given" if task.space.fixed else "not tried: does not match these devices"
    if group.best:
        return _verdict(task, group.best[0].choice, best)
    if group.smallest is not None:
        return _verdict(task, group.smallest.choice, best)
    return f"refused: {_most_common(group.refusals)[0]}" if group.refusals else "not tried"


def _verdict(task: Task, choice: Choice, best: Choice) -> str:
    if choice == best:
        return "is the best"
    refusal = task.refusal(choice)
    if refusal:
        return f"refused: {refusal}"
    this = task.estimated(choice)
    if this.memory.peak > task.limit:
        return f"does not fit: {this.memory.peak_gib:.1f} of {task.limit / GIB:.1f} GiB ({choice.details})"
    slower = this.step_seconds / task.estimated(best).step_seconds - 1
    return f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster by formula'} ({choice.details})"


def _most_common(refusals: Mapping[str, int]) -> list[str]:
    return sorted(refusals, key=lambda text: -refusals[text])


def _nothing_fits(task: Task, groups: Mapping[Place, Group]) -> str:
    """The error message where no layout fits."""
    given = f" with {task.fixed()}" if task.space.fixed else ""
    fewer = ", or fix fewer settings" if task.space.fixed else ""
    where = f"{task.space.devices} x {task.device.name}{given}"
    smallest = [group.smallest for group in groups.values() if group.smallest is not None]
    if smallest:
        least = min(smallest, key=lambda entry: entry.peak)
        return (
            f"nothing fits on {where}: the smallest layout ({least.choice.layout}, {least.choice.details}) takes "
            f"{least.peak / GIB:.1f} GiB, and {task.limit / GIB:.1f} may be taken.\n"
            f"Give more devices or larger ones{fewer}."
        )
    refusals: dict[str, int] = {}
    for group in groups.values():
        for text, number in group.refusals.items():
            refusals[text] = refusals.get(text, 0) + number
    reasons = "\n".join(f"  {text}" for text in _most_common(refusals)[:3])
    return f"no layout of {where} passes the config's rules:\n{reasons}\nChange what they name{fewer}."


SEARCH_COLUMNS = (
    *("", "layout", "data sharding", "sequence", "micro", "recompute", "step, s", "slower", "tokens/s/GPU"),
    *("MFU", "peak GiB", "bubble", "exposed", "by"),
)
LEFT_OUT = "context and expert parallelism, which the config's rules refuse in this version"


def search_report(result: Result, commands: Sequence[str], name: str) -> Report:
    """The best layouts, the well-known ones beside them, and how to use the best."""
    task, tally, best, prediction = result.task, result.tally, result.best, result.best.prediction
    compiled = sum(row.compiled for row in result.rows) + len(result.rejected)
    searched = [
        (
            "layouts",
            f"{tally.total:,} in {result.seconds:.1f} s: {tally.refused:,} against the config's rules, "
            f"{tally.too_large:,} too large, {tally.estimated:,} estimated",
        ),
        ("compiled", f"{compiled} in {duration(result.compile_seconds)}" if compiled else "none"),
        *([("fixed", task.fixed())] if task.space.fixed else []),
        ("left out", LEFT_OUT),
    ]
    usable = task.device.usable_gib
    rejected = [
        (f"{choice.layout}, {choice.details}", one.error or f"compiled: {one.peak_gib:.1f} of {usable:.1f} GiB")
        for choice, one in result.rejected
    ]
    whole = [Segment("by the compiler", prediction.peak_gib, f"{prediction.peak_gib:.1f}", "activations")]
    page = plan_report(best.estimate, name, memory=whole if best.compiled else ())
    rows = [_search_row(place, row, result) for place, row in enumerate(result.rows, 1)]
    return replace(
        page,
        title=f"search for {task.space.devices} x {task.device.name}",
        blocks=[
            ("searched", searched),
            Table("best layouts", SEARCH_COLUMNS, rows, (1, 2, 3, 5, 13)),
            Table("not chosen", ("layout", "verdict"), [*result.well_known, *rejected], (0, 1)),
            ("to use the best", [("", line) for line in commands]),
        ],
        figures=[
            ("step", f"{prediction.step_seconds:.3g} s", "of the compiled program" if best.compiled else "by formula"),
            ("tokens/s", f"{prediction.tokens_per_second_per_device:,.0f}", "per GPU"),
            ("MFU", f"{prediction.mfu_causal:.1%}", "causal attention"),
            *page.figures[3:4],
            ("bubble", f"{best.bubble:.1%}", "of the step"),
            ("exposed", f"{best.exposed:.1%}", "communication that is not hidden"),
        ],
        page_title=f"{page.page_title}: {best.entry.choice.layout}",
        remark=BY_FORMULA if not best.compiled else "The best layout, compiled; the timeline by formulas.",
    )


def _search_row(place: int, row: Row, result: Result) -> list[str]:
    choice, prediction = row.entry.choice, row.prediction
    step = prediction.step_seconds
    offload = f", {choice.offload:.0%} of moments in host memory" if choice.offload else ""
    return [
        str(place),
        choice.layout,
        choice.data_sharding + offload,
        "yes" if choice.sequence else "no",
        str(choice.micro_size),
        choice.recomputing,
        f"{step:.{2 if step >= 10 else 3 if step >= 1 else 4}f}",
        "" if row is result.best else f"{round(result.slower(row), 3) + 0.0:+.1%}",  # never -0.0%
        f"{prediction.tokens_per_second_per_device:,.0f}",
        f"{prediction.mfu_causal:.1%}",
        f"{prediction.peak_gib:.1f}",
        f"{row.bubble:.1%}",
        f"{row.exposed:.1%}",
        "compiler" if row.compiled else "formula",
    ]


def check_config_path(path: Path, source: str) -> None:
    """Raises UserError for a file that `write_config` could not write, before the search starts."""
    if path.suffix != ".py":
        raise UserError(f"--out={path} must end in .py: it is a config file of a few lines.")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out={path} can't be written: there is no folder {path.parent}.")
    if find(split_source(source)[0]) == path.resolve():
        raise UserError(f"--out={path} is the config itself.\nGive another file: it will load this one.")


def write_config(path: Path, source: str, settings: list[str], title: str) -> None:
    """Write a config file that loads `source` with settings over it. Raises UserError if it can't be written."""
    name, function = split_source(source)
    base, suffix = find(name), f":{function}" if function else ""
    if base.parent == SHIPPED:
        loaded, imports = json.dumps(base.name + suffix), ""
    else:
        relative = json.dumps(os.path.relpath(base, path.resolve().parent))
        loaded = f"str(Path(__file__).parent / {relative})" + (f" + {json.dumps(suffix)}" if suffix else "")
        imports = "from pathlib import Path\n\n"
    lines = "".join(f"        {json.dumps(one)},\n" for one in settings)
    text = (
        f'"""{title}\n\nTrain:    python -m megajax.train --config={path}\n"""\n\n{imports}'
        "from megajax.config import load\nfrom megajax.training.run_config import RunConfig\n\n\n"
        'def config() -> RunConfig:\n    """The config that was searched for, in another layout."""\n'
        f"    return load(\n        {loaded},\n{lines}    )\n"
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error
