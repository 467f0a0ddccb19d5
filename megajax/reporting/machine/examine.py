"""Run all checks and print their results as they come."""

import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megajax.reporting.machine import gpus, host, trial
from megajax.reporting.machine.machine import Check, Machine, run_checks

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
CHECKS = (*gpus.CHECKS, *host.CHECKS, *trial.CHECKS)


def examine(
    run_dir: Path | None, *, as_json: bool, checks: Sequence[Check] = CHECKS, together: Sequence[Check] = ()
) -> int:
    """Check this machine and print the results. -> 1 if any check failed, else 0.

    together: checks that all processes make together, after those of each machine.
    """
    start, results = time.monotonic(), []
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), quiet=as_json)
    console.print(Text(f"{platform.node()}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S UTC}", style="bold"))
    for name, finding, took in run_checks((*checks, *together), Machine(run_dir)):
        results.append({"name": name, **finding._asdict(), "seconds": round(took, 3)})
        color = COLORS[finding.status]
        status, label = (f"{finding.status:<5}", f"bold {color}"), (f"{name:<20}", "dim")
        console.print(Text.assemble(status, label, finding.state))
        if finding.advice:
            console.print(Text(f"{'':<25}→ {finding.advice}", style=color))
    good, doubtful, bad = (sum(result["status"] == status for result in results) for status in COLORS)
    seconds = round(time.monotonic() - start, 3)
    console.print(f"{good} ok, {doubtful} warnings, {bad} failed; {seconds:.0f} s")
    if as_json:
        values = {"host": platform.node(), "time": time.time(), "seconds": seconds, "exit_code": int(bad > 0)}
        print(json.dumps(values | {"checks": results}, indent=1))
    return int(bad > 0)
