"""Run all checks and print their results."""

import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megajax.reporting.machine_checks import device_checks, gpus, host
from megajax.reporting.machine_checks.machine import Check, Machine, run_checks

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
CHECKS = (*gpus.CHECKS, *host.CHECKS, *device_checks.CHECKS)


def examine(
    run_dir: Path | None, *, as_json: bool, checks: Sequence[Check] = CHECKS, joint: Sequence[Check] = ()
) -> int:
    """Check this machine and print the results. -> 1 if any check failed, else 0.

    joint: checks that run on all processes together, after those of each machine.
    """
    start, results = time.monotonic(), []
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), quiet=as_json)
    console.print(Text(f"{platform.node()}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S UTC}", style="bold"))
    for name, finding, seconds in run_checks((*checks, *joint), Machine(run_dir)):
        results.append({"name": name, **finding._asdict(), "seconds": round(seconds, 3)})
        color = COLORS[finding.status]
        status, label = (f"{finding.status:<5}", f"bold {color}"), (f"{name:<20}", "dim")
        console.print(Text.assemble(status, label, finding.state))
        if finding.advice:
            console.print(Text(f"{'':<25}→ {finding.advice}", style=color))
    passes, warnings, failures = (sum(result["status"] == status for result in results) for status in COLORS)
    total = round(time.monotonic() - start, 3)
    console.print(f"{passes} ok, {warnings} warnings, {failures} failed; {total:.0f} s")
    if as_json:
        values = {"host": platform.node(), "time": time.time(), "seconds": total, "exit_code": int(failures > 0)}
        print(json.dumps(values | {"checks": results}, indent=1))
    return int(failures > 0)
