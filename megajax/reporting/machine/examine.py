"""All checks, one after the other, shown as they come."""

import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megajax.reporting.machine import environment, gpus, software, storage, system, tried
from megajax.reporting.machine.check import Check, Result, exit_code, run_checks
from megajax.reporting.machine.machine import Machine

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
WIDTH = 20
"""Characters of a check's name."""


def table() -> tuple[Check, ...]:
    """In the order they are shown: those that wait for the devices last."""
    return (
        *software.CHECKS,
        *gpus.CHECKS,
        *environment.CHECKS,
        *system.CHECKS,
        *storage.CHECKS,
        *software.CHECKS_OF_IMPORTS,
        *tried.CHECKS,
    )


def examine(run_dir: Path | None, *, as_json: bool, checks: Sequence[Check] | None = None) -> int:
    """Look at this machine and print what is found. -> 1 if any check failed, else 0."""
    machine = Machine(run_dir)
    try:
        if checks is None:
            machine.start_looking()
        return _show_all(run_checks(table() if checks is None else checks, machine), as_json=as_json)
    finally:
        machine.close()


def _show_all(found: Iterable[Result], *, as_json: bool) -> int:
    begun = time.monotonic()
    if as_json:
        results = list(found)
        print(json.dumps(as_values(results, time.monotonic() - begun), indent=1))
        return exit_code(results)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(Text(f"{platform.node()}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S UTC}", style="bold"))
    results = list(show(found, console))
    counts = {status: sum(r.status == status for r in results) for status in COLORS}
    text = Text(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
    console.print(text.append(f"; {time.monotonic() - begun:.0f} s", style="dim"))
    return exit_code(results)


def show(results: Iterable[Result], console: Console) -> Iterable[Result]:
    """Print each as it comes, with what to do below it."""
    for result in results:
        color = COLORS[result.status]
        line = Text.assemble((f"{result.status:<5}", f"bold {color}"), (f"{result.name:<{WIDTH}}", "dim"), result.found)
        console.print(line)
        if result.advice:
            console.print(Text(f"{'':<{5 + WIDTH}}→ {result.advice}", style=color))
        yield result


def as_values(results: Sequence[Result], seconds: float) -> dict[str, object]:
    """For programs."""
    return {
        "host": platform.node(),
        "time": time.time(),
        "seconds": round(seconds, 3),
        "exit_code": exit_code(results),
        "checks": [asdict(result) for result in results],
    }
