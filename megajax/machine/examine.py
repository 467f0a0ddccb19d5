"""Runs all checks, of this machine and of all processes of a run together, and prints their results.

The tests of the devices run in a process of their own, which may hang or crash.
"""

import contextlib
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
from megajax.machine import gpu_checks, host_checks, known_faults
from megajax.machine.check import FIRST_AID, STAGES, TESTS, Check, Finding, Machine, fail, run_checks, warn
from megajax.processes.gpus import set_nccl_variables
from megajax.processes.identity import find_identity
from megajax.processes.xla_options import add_flags

JOINT_SECONDS = 180.0
"""Total time limit of all joint tests."""

STAGE_SECONDS = 90.0
"""Time limit of each stage: initializing eight GPUs may take a minute."""


def run_trial(machine: Machine) -> tuple[Mapping[str, Finding], str, str]:
    """Test the devices -> findings of the stages that ended; the last stage; the reason if it hung or crashed.

    The process ends itself when a stage takes too long. The limit here applies if a driver keeps it from doing so.
    """
    command = (sys.executable, "-u", "-m", "megajax.machine.device_trial", str(STAGE_SECONDS))
    # As in a run of one process that drives all of them.
    environment = dict(machine.environment)
    set_nccl_variables(len(machine.visible_gpus), processes=1, environment=environment)
    if machine.gpu_files:
        add_flags(known_faults.options(known_faults.of_machine(machine)), environment)
    changed = {name: value for name, value in environment.items() if value != machine.environment.get(name)}
    output = machine.run(*command, seconds=STAGE_SECONDS * (len(STAGES) + 1), **changed)
    findings, stage = {}, "import"
    for line in output.out.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # jax may print other lines
            report = json.loads(line)
            stage = report["stage"]
            findings[stage] = report["finding"] and Finding(*report["finding"])
    hangs = f"gave no answer within {STAGE_SECONDS:g} s" if "Timeout (" in output.err else ""
    return findings, stage, hangs or output.reason


def check_stage(stage: str, machine: Machine) -> Finding | None:
    """The finding of a stage, with the cures of known faults that show in it; None if it does not apply here."""
    finding = stage_finding(stage, machine)
    if finding is None or finding.status != "fail":
        return finding
    cures = [fault.cure for fault in known_faults.KNOWN_FAULTS if fault.shows(finding.state)]
    return finding._replace(advice="; ".join([*cures, finding.advice]))


def stage_finding(stage: str, machine: Machine) -> Finding | None:
    """The finding of a stage. Only the stage that hung or crashed fails; later ones warn that they did not run."""
    findings, stopped_in, why = machine.cached("trial", run_trial)
    if stage in findings:
        return findings[stage]
    if stopped_in == "import" and stage == STAGES[0]:
        return fail(f"jax can't be imported: it {why}", "reinstall it: uv sync")
    if stopped_in == stage:
        return fail(f"{stage} {why}", FIRST_AID)
    reason = "no devices" if stopped_in in findings else f"{stopped_in} {why}"
    return warn(f"not run: {reason}", "see the check that failed")


def joint_checks(patience: float) -> tuple[Check, ...]:
    """Checks for `examine`. patience: seconds within which all processes must start."""
    return tuple((f"all: {name}", partial(joint_check, name, patience)) for name in TESTS)


def joint_check(name: str, patience: float, machine: Machine) -> Finding | None:
    """The finding of one test; the first call runs all tests. jax is imported only then, after the other checks."""

    def run(machine: Machine) -> Mapping[str, Finding]:
        start: Callable = resolve("megajax.processes.start:start")
        try:
            start(patience=patience, identity=partial(find_identity, None, {"doctor": True}))
        except UserError as error:
            # One line is enough: the other tests did not run.
            return {TESTS[0]: fail(str(error), "see the output of the missing processes")}
        # Works even while a collective waits for a lost process.
        faulthandler.dump_traceback_later(JOINT_SECONDS, exit=True)
        peers = resolve("megajax.processes.peers:Peers")("doctor")
        findings = dict(resolve("megajax.machine.before_run:tests")(machine.run_dir, peers))
        resolve("megajax.processes.start:finish")()
        faulthandler.cancel_dump_traceback_later()
        return findings

    return machine.cached("together", run).get(name)


COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
CHECKS: tuple[Check, ...] = (
    *gpu_checks.CHECKS,
    *known_faults.CHECKS,
    *host_checks.CHECKS,
    *((stage, partial(check_stage, stage)) for stage in STAGES),
)


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
