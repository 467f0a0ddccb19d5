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
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.progress import Progress

from megajax.config.config_files import SHIPPED, find, split_source
from megajax.config.dump import diff, to_yaml
from megajax.config.errors import UserError
from megajax.display.banner import Report, Table
from megajax.display.text import duration
from megajax.metrics.run_folder import write_output_file
from megajax.planning.choice import Choice, changes, refusal, settings
from megajax.planning.compiled.devices import GIB
from megajax.planning.cost.estimate import SPEED_AND_RANGE, Case, to_dict
from megajax.planning.search import HEADROOM, LayoutGroup, RankedLayout, Task, explore, rank, ranked, search
from megajax.planning.show import FIGURES, cells

MAX_TRIES = 3
"""Layouts that are compiled at most, as a multiple of those asked for: some turn out not to fit."""
SIMPLER = 0.03
"""A simpler layout is taken if its step is at most this share longer: less than the cost model can tell apart."""
RANKING = f"best layouts: of those within {SIMPLER:.0%} of the fastest and no slower than as given, the simplest first"
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


class CompiledFigures:
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
    entries: Sequence[RankedLayout],
    number: int,
    cache: CompiledFigures,
    compiler: Callable[[Case], Figures],
    advance: Callable[[], None] = lambda: None,
    current: Choice | None = None,
) -> None:
    """Compile layouts until `number` of them fit, at most MAX_TRIES times as many; none that is in the cache.

    The first is the fastest by formula, the second the config as given, which the others must beat; then simpler ones
    come first, without those that programs like theirs have shown to be too large.
    """
    as_given = [entry for entry in entries if entry.choice == current]
    simplest = sorted(entries, key=Standing(entries, current=current).order)
    waiting = list(dict.fromkeys([*entries[:1], *as_given, *simplest]))
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


@dataclass(frozen=True)
class Standing:
    """The order of layouts, and how far each is behind: programs are compared with programs, formulas with formulas."""

    entries: Sequence[RankedLayout]
    """That fit, as far as is known."""
    cache: CompiledFigures = field(default_factory=CompiledFigures)
    current: Choice | None = None
    """The layout of the config as given."""

    @cached_property
    def by_formula(self) -> dict[Choice, float]:
        """Seconds of a step."""
        return {entry.choice: entry.step_seconds for entry in self.entries}

    @cached_property
    def by_program(self) -> dict[Choice, float]:
        """Seconds of a step of the layouts that are compiled."""
        programs = {choice: self.cache.get(choice) for choice in self.by_formula}
        return {choice: program["step_seconds"] for choice, program in programs.items() if program is not None}

    def slowdown(self, choice: Choice, seconds: float) -> float:
        """How much longer a step takes than the fastest of its kind. seconds: by formula."""
        times = self.by_program if choice in self.by_program else self.by_formula
        return times.get(choice, seconds) / min(times.values(), default=seconds) - 1

    def order(self, entry: RankedLayout) -> tuple:
        """Sort key: compiled ones first; the config as given if none is faster; then those within SIMPLER of the
        fastest that are no slower than it, from the simplest on; then by time."""
        choice, compiled = entry.choice, entry.choice in self.by_program
        behind = self.slowdown(choice, entry.step_seconds)
        times = self.by_program if {choice, self.current} <= self.by_program.keys() else self.by_formula
        close = behind <= SIMPLER and times[choice] <= times.get(self.current, inf)
        fastest = choice == self.current and round(behind, 3) <= 0
        simplest = choice.complexity if close else ()
        return not compiled, not fastest, not close, simplest, round(behind, 3), rank(entry)[1], entry.peak


def likely(task: Task, cache: CompiledFigures, entries: Sequence[RankedLayout]) -> list[RankedLayout]:
    """Those that fit if their programs exceed the formula as much as compiled ones of their family did."""
    excess: dict[tuple[bool, ...], float] = {}
    for entry in entries:
        compiled, family = cache.get(entry.choice), entry.choice.family
        if compiled is not None and "peak_gib" in compiled:
            excess[family] = max(excess.get(family, 1.0), compiled["peak_gib"] * GIB / entry.peak)
    usable = task.case.usable_gib * GIB
    return [entry for entry in entries if entry.peak * excess.get(entry.choice.family, 1.0) <= usable]


class RankedPlan(NamedTuple):
    """A layout in the table; its figures are those of the compiled program, or by formula."""

    entry: RankedLayout
    figures: Figures
    compiled: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a search."""

    task: Task
    groups: Sequence[LayoutGroup]
    rows: Sequence[RankedPlan]
    """The best LISTED layouts."""
    standing: Standing
    rejected: Sequence[tuple[Choice, Figures]]
    """Layouts whose compiled program does not fit, or that the compiler refused."""
    seconds: float
    compile_seconds: float

    @property
    def best(self) -> Choice:
        return self.rows[0].entry.choice

    @property
    def conclusion(self) -> str:
        """Whether to keep the config as given."""
        seconds = self.standing.by_formula.get(self.task.current)
        if seconds is None:
            return "the config as given cannot be used: see below"
        if (behind := round(self.standing.slowdown(self.task.current, seconds), 3)) <= 0:
            return "as given is already the fastest"
        keep = ", and no layout that beats it is simpler: keep it" * (self.best == self.task.current)
        return f"as given is {behind:.1%} behind the fastest{keep}"

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
                    "slower": self.standing.slowdown(row.entry.choice, row.entry.step_seconds),
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
        return [
            ("pure FSDP", self._group_verdict(fsdp)),
            (f"tensor {tensor} without a pipeline", self._group_verdict(groups.get((tensor, 1)))),
            (f"the config as given ({task.current.layout})", self._verdict(task.current)),
        ]

    def _group_verdict(self, group: LayoutGroup | None) -> str:
        """The verdict on the best layout of a group, or on its smallest if none fits."""
        if group is None:
            fixed = self.task.fixed_text()
            return f"not tried: {fixed} is given" if fixed else "not tried: does not match these devices"
        if entry := next(iter(group.best), group.smallest):
            return self._verdict(entry.choice)
        return f"refused: {group.refusals.most_common(1)[0][0]}" if group.refusals else "not tried"

    def _verdict(self, choice: Choice) -> str:
        """How much slower a layout is than the fastest, or why it can't be used."""
        task, case = self.task, self.task.with_choice(choice)
        if choice == self.best:
            return "is the best" if choice != task.current else self.conclusion
        if reason := refusal(case.cfg, case.cluster.devices):
            return f"refused: {reason}"
        if (memory := case.estimate.memory).peak > task.limit:
            return f"does not fit: {memory.peak_gib:.1f} of {task.limit / GIB:.1f} GiB ({choice.details})"
        if choice not in self.standing.by_formula and self.standing.cache.get(choice) is not None:
            return f"does not fit: see below ({choice.details})"
        slowdown = self.standing.slowdown(choice, case.estimate.step_seconds)
        if slowdown < 0:
            return f"likely does not fit: programs like its own exceed the formula for memory ({choice.details})"
        by = "" if choice in self.standing.by_program else " by formula"
        return f"{slowdown:.1%} slower than the fastest{by} ({choice.details})"

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
        columns = ("", "layout", "data sharding", "sequence", "rows", "recompute", "by", "slower", *FIGURES)
        rows, task = [], self.task
        differing = [("", line) for line in diff(task.config(task.current), task.config(self.best))]
        for place, row in enumerate(self.rows, 1):
            choice, sequence = row.entry.choice, "yes" if row.entry.choice.sequence else "no"
            settings = [choice.layout, choice.sharding, sequence, choice.rows, choice.recomputing]
            behind = round(self.standing.slowdown(choice, row.entry.step_seconds), 3)
            slowdown = f"{behind:+.1%}" if behind > 0 else ""
            source = "compiler" if row.compiled else "formula"
            rows.append([str(place), *settings, source, slowdown, *cells(row.figures)])
        return Report(
            f"search for {self.task.devices} x {self.task.case.cluster.device.name}",
            [
                ("searched", searched),
                Table(RANKING, columns, rows, (1, 2, 3, 4, 5, 6)),
                ("conclusion", [("", self.conclusion)]),
                Table("not chosen", ("layout", "verdict"), verdicts, (0, 1)),
                *[("the best differs from the config as given in", differing)] * bool(differing),
                ("to use the best", [("", line) for line in commands]),
            ],
        )


def find_best(task: Task, cache: CompiledFigures, number: int, compiler: Callable[[Case], Figures]) -> Result:
    """Search, compile `number` of the best layouts, and rank them. Raises UserError if nothing fits."""
    started, console, groups = time.monotonic(), Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for group in bar.track(search(task), total=len(task.groups()), description="layouts"):
            groups.append(group)
        seconds = time.monotonic() - started
        entries = with_current(task, ranked(groups))
        if number and entries:
            progress = bar.add_task("compiled", total=number)
            # Programs for virtual GPU devices have no host memory to offload moments to.
            compilable = [entry for entry in entries if not entry.choice.offload]
            compile_best(task, compilable, number, cache, compiler, lambda: bar.advance(progress), task.current)
    rows, rejected, standing = rank_rows(task, entries, cache if number else CompiledFigures())
    if rejected and not any(row.compiled for row in rows):
        raise UserError(_no_program_fits(task, rejected))
    if not rows:
        raise UserError(_nothing_fits(task, groups))
    times = {"seconds": seconds, "compile_seconds": time.monotonic() - started - seconds}
    return Result(task=task, groups=groups, rows=rows, standing=standing, rejected=rejected, **times)


def with_current(task: Task, entries: Sequence[RankedLayout]) -> list[RankedLayout]:
    """Entries, fastest first, with that of the config as given if it fits: a search might not try its layout."""
    return sorted({*entries, *LayoutGroup((0, 0)).entries(task, task.current)}, key=rank)


def rank_rows(
    task: Task, entries: Sequence[RankedLayout], cache: CompiledFigures
) -> tuple[list[RankedPlan], list[tuple[Choice, Figures]], Standing]:
    """The best LISTED layouts; those whose program does not fit; and the standing of all others."""
    programs = {entry.choice: cache.get(entry.choice) for entry in entries}
    rejected = [(choice, program) for choice, program in programs.items() if program and not program["fits"]]
    # A program that fits does so whatever others like it take.
    fitting = {entry for entry in entries if (programs[entry.choice] or {"fits": False})["fits"]}
    fitting |= {entry for entry in likely(task, cache, entries) if programs[entry.choice] is None}
    standing = Standing([entry for entry in entries if entry in fitting], cache, task.current)
    rows = []
    for entry in sorted(fitting, key=standing.order)[:LISTED]:
        program = programs[entry.choice]
        figures = to_dict(task.with_choice(entry.choice).estimate) if program is None else program
        rows.append(RankedPlan(entry, figures, program is not None))
    return rows, rejected, standing


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


def _nothing_fits(task: Task, groups: Sequence[LayoutGroup]) -> str:
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

    def entries_with(*kind: str) -> list[RankedLayout]:
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
        slowdown = step.step_seconds / case.estimate.step_seconds - 1
        than_now = f"{abs(slowdown):.1%} {'slower' if slowdown >= 0 else 'faster'}"
        rows.append((" ".join(f"--{word}" for word in names), *figures, than_now))
    rows = rows or [("none of those tried; --search tries all layouts, more devices make room", "", "", "")]
    return Table("cheapest changes that make it fit", ("change", "peak, GiB", "step, s", "than as given"), rows)
