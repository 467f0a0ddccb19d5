"""Rank the layouts of a search, compiled ones first; judge well-known ones; and find changes that make a plan fit."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.progress import Progress

from megajax.compiled.gpus import GIB
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.config.files import SHIPPED, find, split_source
from megajax.display.banner import Report, Table
from megajax.display.text import duration
from megajax.metrics.runfolder import write_output_file
from megajax.planning.choice import Choice, changes, refusal, settings
from megajax.planning.cost.estimate import SPEED_AND_RANGE, Case, to_dict
from megajax.planning.search import HEADROOM, Entry, Group, Task, explore, rank, ranked, rounded, search
from megajax.planning.show import FIGURES, cells

MAX_TRIES = 3
"""Layouts that are compiled at most, as a multiple of those asked for: some turn out not to fit."""
SIMPLER = 0.03
"""A simpler layout is taken if its step is at most this share longer: less than the cost model can tell apart."""
LISTED = 5
"""Layouts in the table."""

type Figures = dict[str, Any]
"""Values by their names in a plan's JSON: `fits`, `peak_gib` and times; or only `fits` and the compiler's `error`."""


def compile_layout(program: Sequence[str], case: Case) -> Figures:
    """Compile the step of a config on a cluster, in a process of its own. program: the words that start a plan."""
    with tempfile.TemporaryDirectory(prefix="megajax_search_") as folder:
        config, constants, out = (Path(folder) / name for name in ("config.yaml", "device.json", "plan.json"))
        config.write_text(to_yaml(case.cfg), encoding="utf-8")
        device, devices, per_node = case.cluster
        constants.write_text(json.dumps(asdict(device)), encoding="utf-8")
        arguments = [f"--devices={device.name}:{devices}", f"--gpus-per-node={per_node}", f"--calibration={constants}"]
        command = [*program, f"--config={config}", *arguments, f"--json={out}"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            lines = [line for line in process.stderr.splitlines() if line.strip()]
            return {"fits": False, "error": lines[-1].strip() if lines else f"ended with code {process.returncode}"}
        plan = json.loads(out.read_text(encoding="utf-8"))
        return {key: plan[key] for key in ("peak_gib", "fits", *SPEED_AND_RANGE)}


class Cache:
    """Figures of compiled layouts; with a path, kept in a file from which an interrupted search goes on."""

    def __init__(self, path: Path | None = None, fingerprint: str = ""):
        """Read the file if it is of the same search; otherwise replace it."""
        self.path, self.fingerprint = path, fingerprint
        self.layouts: dict[str, Figures] = {}
        if path is None:
            return
        with contextlib.suppress(FileNotFoundError, ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.get("search") == fingerprint:
                self.layouts = content["layouts"]
        self._save()

    def get(self, choice: Choice) -> Figures | None:
        return self.layouts.get(json.dumps(asdict(choice)))

    def add(self, choice: Choice, compiled: Figures) -> None:
        self.layouts[json.dumps(asdict(choice))] = compiled
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            write_output_file(self.path, json.dumps({"search": self.fingerprint, "layouts": self.layouts}))


def compile_best(
    task: Task,
    entries: Sequence[Entry],
    number: int,
    cache: Cache,
    compiler: Callable[[Case], Figures],
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Compile layouts until `number` of them fit, at most MAX_TRIES times as many; none that is in the cache.

    The first is the fastest by formula, then simpler ones come first, without those that programs like theirs have
    shown to be too large.
    """
    waiting = list(dict.fromkeys([*entries[:1], *sorted(entries, key=order_among(entries))]))
    tried = fitting = 0
    with ThreadPoolExecutor(max(1, min(number, os.cpu_count() or 1))) as pool:
        while fitting < number and tried < MAX_TRIES * number:
            fits = {*likely(task, cache, entries)}
            batch = [entry.choice for entry in waiting if entry in fits][: number - fitting]
            if not batch:
                return
            waiting = [entry for entry in waiting if entry.choice not in batch]
            jobs = {
                pool.submit(compiler, task.with_choice(choice)): choice for choice in batch if cache.get(choice) is None
            }
            for job in as_completed(jobs):
                cache.add(jobs[job], job.result())
                advance()
            tried += len(batch)
            fitting += sum((cache.get(choice) or {"fits": False})["fits"] for choice in batch)


def order_among(entries: Sequence[Entry]) -> Callable[[Entry], tuple]:
    """Sort key: first those that are within SIMPLER of the fastest, from the simplest on; then by time."""
    least = min((entry.step_seconds for entry in entries), default=0.0)
    return lambda entry: _order(entry, entry.step_seconds, least, entry.peak)


def _order(entry: Entry, seconds: float, least: float, peak: float) -> tuple:
    close = seconds <= least * (1 + SIMPLER)
    return not close, entry.choice.complexity if close else (), rounded(seconds), rank(entry)[1], peak


def likely(task: Task, cache: Cache, entries: Sequence[Entry]) -> list[Entry]:
    """Those that fit if their programs exceed the formula as much as compiled ones of their family did."""
    excess: dict[tuple[bool, ...], float] = {}
    for entry in entries:
        compiled, family = cache.get(entry.choice), entry.choice.family
        if compiled is not None and "peak_gib" in compiled:
            excess[family] = max(excess.get(family, 1.0), compiled["peak_gib"] * GIB / entry.peak)
    usable = task.case.usable_gib * GIB
    return [entry for entry in entries if entry.peak * excess.get(entry.choice.family, 1.0) <= usable]


class Row(NamedTuple):
    """A layout in the table; its figures are those of the compiled program, or by formula."""

    entry: Entry
    figures: Figures
    compiled: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a search."""

    task: Task
    groups: Sequence[Group]
    rows: Sequence[Row]
    """The best LISTED layouts."""
    cache: Cache
    rejected: Sequence[tuple[Choice, Figures]]
    """Layouts whose compiled program does not fit, or that the compiler refused."""
    seconds: float
    compile_seconds: float

    @property
    def best(self) -> Choice:
        return self.rows[0].entry.choice

    def slowdown(self, row: Row) -> float:
        """How much longer a step takes than with the best: by their programs if both are compiled, else by formula."""
        return self._slowdown(row.entry.choice, row.entry.step_seconds)[0]

    def _slowdown(self, choice: Choice, seconds: float) -> tuple[float, bool]:
        """The same, and whether it is by programs. seconds: by formula."""
        best, programs = self.rows[0], [self.cache.get(layout) or {} for layout in (choice, self.best)]
        if all("step_seconds" in program for program in programs):
            return programs[0]["step_seconds"] / programs[1]["step_seconds"] - 1, True
        return seconds / best.entry.step_seconds - 1, False

    def tally(self) -> dict[str, int]:
        """Numbers of layouts: tried, refused by rules, too large, estimated."""
        counts = {"refused": sum(group.refusals.total() for group in self.groups)}
        counts |= {name: sum(getattr(group, name) for group in self.groups) for name in ("too_large", "estimated")}
        return {"tried": sum(counts.values()), **counts}

    def to_dict(self, settings: list[str]) -> dict[str, Any]:
        """The ranking as JSON. settings: those that the best layout changes in the config."""
        device, devices, per_node = self.task.case.cluster
        return {
            "device": device.name,
            "devices": devices,
            "gpus_per_node": per_node,
            "fixed": dict(self.task.fixed),
            "settings": settings,
            **self.tally(),
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "best": [
                {
                    **asdict(row.entry.choice),
                    **{name: row.figures[name] for name in ("peak_gib", "fits", *SPEED_AND_RANGE)},
                    "compiled": row.compiled,
                    "usable_gib": self.task.case.usable_gib,
                    "formula_peak_gib": row.entry.peak / GIB,
                    "formula_step_seconds": row.entry.step_seconds,
                    "slower": self.slowdown(row),
                }
                for row in self.rows
            ],
            "rejected_by_compiler": [{**asdict(choice), **compiled} for choice, compiled in self.rejected],
            "well_known": [{"choice": name, "verdict": verdict} for name, verdict in self.well_known],
        }

    @cached_property
    def well_known(self) -> list[tuple[str, str]]:
        """Name and verdict of pure FSDP, tensor parallelism without a pipeline, and the config as given."""
        task, groups = self.task, {group.place: group for group in self.groups}
        pure, fsdp = {"data_sharding": "fsdp", "shards": None, "expert": 1, "context": 1}, None
        if (1, 1) in groups and all(task.fixed.get(name, value) == value for name, value in pure.items()):
            fsdp = explore(replace(task, fixed={**task.fixed, **pure}), (1, 1))
        tensor = max((tensor for tensor, pipeline in groups if pipeline == 1), default=task.case.cluster.per_node)
        initial = replace(Choice.of(task.case.cfg, task.devices), **task.fixed)
        if "data" not in task.fixed and task.case.cfg.parallel.data is None:
            replica = initial.tensor * initial.pipeline * initial.expert * initial.context
            initial = replace(initial, data=max(1, task.devices // replica))
        return [
            ("pure FSDP", self._group_verdict(fsdp)),
            (f"tensor {tensor} without a pipeline", self._group_verdict(groups.get((tensor, 1)))),
            (f"the config as given ({initial.layout})", self._verdict(initial)),
        ]

    def _group_verdict(self, group: Group | None) -> str:
        """The verdict on the best layout of a group, or on its smallest if none fits."""
        if group is None:
            fixed = self.task.fixed_text()
            return f"not tried: {fixed} is given" if fixed else "not tried: does not match these devices"
        if entry := next(iter(group.best), group.smallest):
            return self._verdict(entry.choice)
        return f"refused: {group.refusals.most_common(1)[0][0]}" if group.refusals else "not tried"

    def _verdict(self, choice: Choice) -> str:
        """How much slower a layout is than the best, by formula, or why it can't be used."""
        task, case = self.task, self.task.with_choice(choice)
        if choice == self.best:
            return "is the best"
        if reason := refusal(case):
            return f"refused: {reason}"
        if (memory := case.estimate.memory).peak > task.limit:
            return f"does not fit: {memory.peak_gib:.1f} of {task.limit / GIB:.1f} GiB ({choice.details})"
        if (compiled := self.cache.get(choice)) is not None and not compiled["fits"]:
            return f"does not fit: see below ({choice.details})"
        slowdown, by_programs = self._slowdown(choice, case.estimate.step_seconds)
        by = "" if by_programs else " by formula"
        return f"{abs(slowdown):.1%} {'slower' if slowdown >= 0 else 'faster'}{by} ({choice.details})"

    def report(self, commands: Sequence[str]) -> Report:
        """The best layouts, the well-known and the rejected ones, and how to use the best."""
        compiled = sum(row.compiled for row in self.rows) + len(self.rejected)
        counts = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in self.tally().items())
        searched = [
            ("layouts", f"{counts}, in {self.seconds:.1f} s"),
            ("compiled", f"{compiled} in {duration(self.compile_seconds)}" if compiled else "none"),
            *[("fixed", self.task.fixed_text())] * bool(self.task.fixed),
        ]
        verdicts, usable = list(self.well_known), self.task.case.usable_gib
        for choice, figures in self.rejected:
            reason = figures.get("error") or f"compiled: {figures['peak_gib']:.1f} of {usable:.1f} GiB"
            verdicts.append((f"{choice.layout}, {choice.details}", reason))
        columns = ("", "layout", "data sharding", "sequence", "micro", "recompute", "by", "slower", *FIGURES)
        rows = []
        for place, row in enumerate(self.rows, 1):
            choice, sequence = row.entry.choice, "yes" if row.entry.choice.sequence else "no"
            settings = [choice.layout, choice.sharding, sequence, str(choice.micro_size), choice.recomputing]
            slowdown = "" if place == 1 else f"{round(self.slowdown(row), 3) + 0.0:+.1%}"  # never -0.0%
            source = "compiler" if row.compiled else "formula"
            rows.append([str(place), *settings, source, slowdown, *cells(row.figures)])
        return Report(
            f"search for {self.task.devices} x {self.task.case.cluster.device.name}",
            [
                ("searched", searched),
                Table("best layouts", columns, rows, (1, 2, 3, 5, 6)),
                Table("not chosen", ("layout", "verdict"), verdicts, (0, 1)),
                ("to use the best", [("", line) for line in commands]),
            ],
        )


def find_best(task: Task, cache: Cache, number: int, compiler: Callable[[Case], Figures]) -> Result:
    """Search, compile `number` of the best layouts, and rank them. Raises UserError if nothing fits."""
    started, console, groups = time.monotonic(), Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for group in bar.track(search(task), total=len(task.groups()), description="layouts"):
            groups.append(group)
        seconds = time.monotonic() - started
        entries = ranked(groups)
        if number and entries:
            progress = bar.add_task("compiled", total=number)
            # Programs for virtual GPU devices have no host memory to offload moments to.
            compilable = [entry for entry in entries if not entry.choice.offload]
            compile_best(task, compilable, number, cache, compiler, lambda: bar.advance(progress))
    used = cache if number else Cache()
    rows, rejected = rank_rows(task, entries, used)
    if rejected and not any(row.compiled for row in rows):
        raise UserError(_no_program_fits(task, rejected))
    if not rows:
        raise UserError(_nothing_fits(task, groups))
    times = {"seconds": seconds, "compile_seconds": time.monotonic() - started - seconds}
    return Result(task=task, groups=groups, rows=rows, cache=used, rejected=rejected, **times)


def rank_rows(task: Task, entries: Sequence[Entry], cache: Cache) -> tuple[list[Row], list[tuple[Choice, Figures]]]:
    """The best LISTED layouts, compiled ones first and by their programs; and those whose program does not fit."""
    rows, rejected, by_formula, fits = [], [], 0, {*likely(task, cache, entries)}
    for entry in sorted(entries, key=order_among(entries)):
        compiled = cache.get(entry.choice)
        if compiled is not None and not compiled["fits"]:
            rejected.append((entry.choice, compiled))
        elif compiled is not None:
            rows.append(Row(entry, compiled, True))
        elif by_formula < LISTED and entry in fits:
            by_formula += 1
            rows.append(Row(entry, to_dict(task.with_choice(entry.choice).estimate), False))
    least = min((row.figures["step_seconds"] for row in rows if row.compiled), default=0.0)

    def order(row: Row) -> tuple:
        if not row.compiled:
            return True, *order_among(entries)(row.entry)
        return False, *_order(row.entry, row.figures["step_seconds"], least, row.figures["peak_gib"])

    return sorted(rows, key=order)[:LISTED], rejected


def _no_program_fits(task: Task, rejected: Sequence[tuple[Choice, Figures]]) -> str:
    """The error message where all compiled layouts turned out to be too large."""
    lines = "\n".join(
        f"  {choice.layout} ({choice.details}): {figures.get('error') or format(figures['peak_gib'], '.1f') + ' GiB'}"
        for choice, figures in rejected
    )
    return (
        f"of {len(rejected)} compiled layouts none fits the {task.case.usable_gib:.1f} GiB of "
        f"{task.case.cluster.device.name}:\n{lines}\nGive --compile={2 * len(rejected)}, or more devices."
    )


def _nothing_fits(task: Task, groups: Sequence[Group]) -> str:
    """The error message where no layout fits."""
    fixed, fewer = (f" with {task.fixed_text()}", ", or fix fewer settings") if task.fixed else ("", "")
    target = f"{task.devices} x {task.case.cluster.device.name}{fixed}"
    smallest = [group.smallest for group in groups if group.smallest is not None]
    if smallest:
        peak, choice = min(((entry.peak, entry.choice) for entry in smallest), key=itemgetter(0))
        return (
            f"nothing fits on {target}: the smallest layout ({choice.layout}, {choice.details}) takes "
            f"{peak / GIB:.1f} GiB, and {task.limit / GIB:.1f} may be taken.\n"
            f"Give more devices or larger ones{fewer}."
        )
    refusals = sum((group.refusals for group in groups), Counter[str]())
    reasons = "\n".join(f"  {text}" for text, _ in refusals.most_common(3))
    return f"no layout of {target} passes the config's rules:\n{reasons}\nChange what they name{fewer}."


def check_config_path(path: Path, source: str) -> None:
    """Raises UserError for a file that `write_config` could not write, before the search starts."""
    if path.suffix != ".yaml":
        raise UserError(f"--out={path} must end in .yaml: it is a config file of a few lines.")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out={path} can't be written: there is no folder {path.parent}.")
    if find(split_source(source)[0]) == path.resolve():
        raise UserError(f"--out={path} is the config itself.\nGive another file: it will be based on this one.")


def write_config(path: Path, source: str, changed: Mapping[str, Any], title: str) -> None:
    """Write a config file of settings over those of `source`. Raises UserError if it can't be written."""
    name, function = split_source(source)
    base = find(name)
    file = base.name if base.parent == SHIPPED else os.path.relpath(base, path.resolve().parent)
    tree: dict[str | int, Any] = {"config": f"{file}:{function}" if function else file}
    for dotted, value in changed.items():
        node, (*parents, last) = tree, [int(part) if part.isdigit() else part for part in dotted.split(".")]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    write_output_file(path, f"# {title}\n{yaml.safe_dump(tree, sort_keys=False)}")


MOST_CHANGES = 3
"""Changes that are shown."""
KINDS = (
    ("micro_size",),
    ("recompute", "recompute_layers"),
    ("data_sharding", "shards"),
    ("sequence",),
    ("virtual_stages",),
    ("tensor", "data", "sequence"),
    ("pipeline", "data"),
    ("context", "data"),
    ("offload",),
)
"""Fields of a Choice that are changed together."""


def cheapest(case: Case, limit_gib: float) -> list[Case]:
    """Changed configs with a peak of at most `limit_gib` by formula, fastest first.

    Each is the best of a search that may set fields of one kind; if these are too few, of two kinds that are not
    enough alone, or another layout of one kind.
    """
    now = asdict(Choice.of(case.cfg, case.cluster.devices))

    def entries_with(*kind: str) -> list[Entry]:
        fixed = {name: value for name, value in now.items() if name not in kind}
        return ranked(search(Task(case, fixed, limit_gib)))

    single = {kind: entries_with(*kind) for kind in KINDS}
    best = sorted((entries[0] for entries in single.values() if entries), key=rank)
    if len(best) < MOST_CHANGES:
        pairs = combinations([kind for kind, entries in single.items() if not entries], 2)
        best += sorted((entry for first, two in pairs for entry in entries_with(*first, *two)[:1]), key=rank)
        best += sorted((entry for entries in single.values() for entry in entries[1:]), key=rank)
    chosen = list({entry.choice: entry for entry in best}.values())[:MOST_CHANGES]
    return [replace(case, cfg=Task(case).config(entry.choice)) for entry in sorted(chosen, key=rank)]


def advice(case: Case, *, excess_gib: float = 0.0, margin: float = HEADROOM) -> Table:
    """The cheapest changes that make a plan fit.

    Of a compiled plan, excess_gib: by how much it is larger than the formula says, assumed to be the same for every
    change. margin: fraction of usable memory that a change must leave.
    """
    rows = []
    for change in cheapest(case, case.usable_gib * (1 - margin) - excess_gib):
        names, step = settings(changes(case.cfg, change.cfg)), change.estimate
        figures = f"{step.memory.peak_gib + excess_gib:.2f}", f"{step.step_seconds:.3f}"
        slowdown = f"{step.step_seconds / case.estimate.step_seconds - 1:+.1%}"
        rows.append((" ".join(f"--{word}" for word in names), *figures, slowdown))
    rows = rows or [("none of those tried; --search tries all layouts, more devices make room", "", "", "")]
    return Table("cheapest changes that make it fit", ("change", "peak, GiB", "step, s", "slower"), rows)
