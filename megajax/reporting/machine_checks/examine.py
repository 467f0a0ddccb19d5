"""Runs all checks, of this machine and of all processes of a run together, and prints their results."""

import faulthandler
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.mesh.processes.identity import find_identity
from megajax.reporting.machine_checks import device_checks, gpus, host
from megajax.reporting.machine_checks.machine import Check, Finding, Machine, fail, run_checks

JOINT_SECONDS = 180.0
"""Total time limit of all joint tests."""

ADVICE = {
    "matmul": "take the device out of service: its results can't be trusted",
    "all-reduce": "set NCCL_DEBUG=WARN for details; test one machine after the other to find the one at fault",
    "host to device": "compare PCIe generation and width: nvidia-smi -q -d PCI",
    "clocks": "run an NTP client: logs of processes can't be compared",
    "GPU health": "drain the machine, and have the GPU reset or replaced",
    "disk": "free some space: not even a small checkpoint fits",
}
"""Name of a test in `job.preflight`, in order -> what to do if it fails."""


def joint_checks(patience: float) -> tuple[Check, ...]:
    """Checks for `examine`. patience: seconds within which all processes must start."""
    return tuple((f"all: {name}", partial(joint_check, name, patience)) for name in ADVICE)


def joint_check(name: str, patience: float, machine: Machine) -> Finding | None:
    """The finding of one test; the first call runs all tests. jax is imported only then, after the other checks."""

    def run(machine: Machine) -> Mapping[str, Finding]:
        start: Callable = resolve("megajax.mesh.processes.agreement:start")
        try:
            start(patience=patience, identity=partial(find_identity, None, {"doctor": True}))
        except UserError as error:
            # One line is enough: the other tests did not run.
            return {next(iter(ADVICE)): fail(str(error), "see the output of the missing processes")}
        # Works even while a collective waits for a lost process.
        faulthandler.dump_traceback_later(JOINT_SECONDS, exit=True)
        peers = resolve("megajax.mesh.processes.peers:Peers")("doctor")
        results = resolve("megajax.job.start.preflight:tests")(machine.run_dir, peers)
        findings = {result.name: Finding(result.status, result.state) for result in results}
        resolve("megajax.mesh.processes.agreement:finish")()
        faulthandler.cancel_dump_traceback_later()
        return findings

    finding = machine.cached("together", run).get(name)
    if finding is None or finding.status == "ok":
        return finding
    return finding._replace(advice=finding.advice or ADVICE[name])


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
