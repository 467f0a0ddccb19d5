"""What --search does: searches, with its progress on the terminal, compiles the best, prints and writes the result."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megajax.config.errors import UserError
from megajax.config.missing import install
from megajax.planning.cost.costs import Device
from megajax.planning.program.deviceless import missing
from megajax.planning.program.devices import GPUS, Cluster
from megajax.planning.search import changes
from megajax.planning.search.candidates import Choice, Space, apply
from megajax.planning.search.ranking import Result, nothing_fits, result, to_dict
from megajax.planning.search.search import Task, groups, merged
from megajax.planning.search.search_cache import Remembered
from megajax.planning.search.search_report import show
from megajax.planning.search.verified import Compiler, compile_best
from megajax.training.run_config import RunConfig

COMPILED = 3
"""Layouts that are compiled unless --compile says otherwise, where the compiler is installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A search, as the command line has it."""

    cfg: RunConfig
    source: str
    """What --config says."""
    fixed: Mapping[str, Any]
    """Fields of a Choice that were given."""
    cluster: Cluster
    device: Device
    flags: Mapping[str, Any]


def run(asked: Asked) -> tuple[Result, list[str]]:
    """Search, print and write; gives what was found, and how to use it.

    Raises UserError where nothing can be searched, and where nothing fits.
    """
    cluster, flags = asked.cluster, asked.flags
    space = Space(cfg=asked.cfg, devices=cluster.devices, per_node=cluster.per_node, fixed=asked.fixed)
    task = Task(space=space, device=asked.device)
    wanted, out = _to_compile(asked), flags["out"]
    changes.check_out(out, asked.source)
    beside = None if out is None else out.with_suffix(".search.jsonl")
    remembered = Remembered(flags["resume"] or beside, task, insist=flags["resume"] is not None)
    try:
        found = _search(task, remembered, wanted, asked)
    finally:
        remembered.close()
    given = changes.settings(changes.base_of(asked.source), best_config(asked, found.best.entry.choice))
    lines = [changes.command("train", asked.source, given)]
    if out is not None:
        about = (
            f"{Path(asked.source).name} on {cluster.devices} x {asked.device.name}: {found.best.entry.choice.layout}."
        )
        changes.write(out, asked.source, given, about)
        lines.append(f"or --config={out}, which loads that config and sets the same")
    if remembered.path is not None:
        lines.append(f"what was found is in {remembered.path}")
    show(found, lines)
    if flags["json"] is not None:
        write_json(to_dict(found, given), flags["json"])
    return found, lines


def best_config(asked: Asked, choice: Choice) -> RunConfig:
    """The config with a choice in it; `data` is what is left, unless it was given or is in the config already."""
    cfg = apply(choice, asked.cfg)
    if "data" in asked.fixed or asked.cfg.parallel.data == choice.data:
        return cfg
    return cfg.but(parallel=replace(cfg.parallel, data=None))


def write_json(figures: Any, path: Path) -> None:
    """Raises UserError where the file can't be written."""
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def _to_compile(asked: Asked) -> int:
    wanted, known = asked.flags["compile"], asked.cluster.name in GPUS
    if wanted is not None and wanted < 0:
        raise UserError(f"--compile must be 0 or more layouts, got {wanted}")
    absent = missing() if known else [f"a device the compiler knows, which {asked.cluster.name} is not"]
    if wanted is None:
        return 0 if absent or asked.flags["formula"] else COMPILED
    if wanted and absent:
        raise UserError(
            f"--compile={wanted} needs {' and '.join(absent)}.\nInstall the extra aot ({install('aot')}), or give "
            "--compile=0: a search by formulas alone."
        )
    if wanted and asked.flags["formula"]:
        raise UserError(f"--compile={wanted} and --formula, which compiles nothing: give one of them")
    return wanted


def _search(task: Task, remembered: Remembered, wanted: int, asked: Asked) -> Result:
    started = time.monotonic()
    with _progress() as bar:
        step = bar.add_task("layouts", total=len(task.space.groups()))
        for group, new in groups(task, dict(remembered.groups)):
            if new:
                remembered.add_group(group)
            bar.advance(step)
        seconds = time.monotonic() - started
        entries, _ = merged(remembered.groups)
        if wanted and entries:
            step = bar.add_task("compiled", total=wanted)

            def tell(choice: Any, found: Any) -> None:
                remembered.add_compiled(choice, found)
                bar.advance(step)

            compiler = Compiler(cfg=asked.cfg, cluster=asked.cluster, device=asked.device)
            # A program for absent GPUs has no host memory to put moments in.
            choices = (entry.choice for entry in entries if not entry.choice.offload)
            compile_best(choices, wanted, compiler, remembered.compiled, tell)
    found = result(
        task,
        remembered.groups,
        remembered.compiled if wanted else {},
        seconds=seconds,
        compile_seconds=time.monotonic() - started - seconds,
    )
    if found is None:
        raise UserError(nothing_fits(task, remembered.groups))
    return found


def _progress() -> Progress:
    """On the terminal, gone when done; elsewhere nothing."""
    console = rich.console.Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip
