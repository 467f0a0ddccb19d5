"""Tests of the devices: a check for each stage of devices.py, which runs in a separate process."""

import contextlib
import json
import sys
from collections.abc import Mapping
from functools import partial

from megajax.mesh.processes.gpus import set_nccl_variables
from megajax.reporting.machine_checks.machine import Check, Finding, Machine, fail, warn

STAGES = ("devices", "matmul", "attention", "grouped matmul", "all-reduce")
STAGE_SECONDS = 90.0
"""Time limit of each stage: initializing eight GPUs may take a minute."""

FIRST_AID = "stop other programs on the devices; check the driver and dmesg; try CUDA_VISIBLE_DEVICES=N one by one"


def run_trial(machine: Machine) -> tuple[Mapping[str, Finding], str, str]:
    """Test the devices -> findings of the stages that ended; the last stage; the reason if it hung or crashed.

    The process ends itself when a stage takes too long. The limit here applies if a driver keeps it from doing so.
    """
    command = (sys.executable, "-u", "-m", "megajax.reporting.machine_checks.device_trial", str(STAGE_SECONDS))
    # As in a run of one process that drives all of them.
    environment = dict(machine.environment)
    set_nccl_variables(len(machine.visible_gpus), processes=1, environment=environment)
    nccl = {name: value for name, value in environment.items() if name not in machine.environment}
    output = machine.run(*command, seconds=STAGE_SECONDS * (len(STAGES) + 1), **nccl)
    findings, stage = {}, "import"
    for line in output.out.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # jax may print other lines
            report = json.loads(line)
            stage = report["stage"]
            findings[stage] = Finding(*report["finding"])
    hangs = f"gave no answer within {STAGE_SECONDS:g} s" if "Timeout (" in output.err else ""
    return findings, stage, hangs or output.reason


def check_stage(stage: str, machine: Machine) -> Finding:
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


CHECKS: tuple[Check, ...] = tuple((stage, partial(check_stage, stage)) for stage in STAGES)
