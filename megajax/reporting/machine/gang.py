"""Checks that all processes of a run make together: in this process, as a run would use the devices."""

import faulthandler
from collections.abc import Callable, Mapping
from functools import partial

from megajax.config.builds import resolve
from megajax.config.errors import UserError
from megajax.reporting.machine.machine import Check, Finding, Machine, fail

SECONDS = 180.0
"""Time limit of all tests together."""

ADVICE = {
    "matmul": "take the device out of service: its results can't be trusted",
    "all-reduce": "NCCL_DEBUG=WARN tells more; the processes of one machine after the other show which is at fault",
    "host to device": "compare PCIe generation and width: nvidia-smi -q -d PCI",
    "clocks": "run an NTP client: logs of processes can't be compared",
    "GPU health": "drain the machine, and have the GPU reset or replaced",
    "disk": "free some space: not even a small checkpoint fits",
}
"""Name of a test in `job.preflight`, in order -> what to do if it fails."""


def together(patience: float) -> tuple[Check, ...]:
    """Checks for `examine`. patience: seconds in which all processes must have started."""
    return tuple((f"all: {name}", partial(check, name, patience)) for name in ADVICE)


def check(name: str, patience: float, machine: Machine) -> Finding | None:
    """The finding of one test; all run at the first. jax is imported here, and not while the machine is unchecked."""

    def run(machine: Machine) -> Mapping[str, Finding]:
        start: Callable = resolve("megajax.mesh.processes:start")
        try:
            start(patience=patience, settings="doctor")
        except UserError as error:
            # The other tests were not made: one line is enough.
            return {next(iter(ADVICE)): fail(str(error), "see what the missing processes print")}
        # Works even if a collective waits for a process that is gone.
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        results = resolve("megajax.job.preflight:tests")(machine.run_dir)
        findings = {each.name: Finding(each.status, each.state) for each in results}
        resolve("megajax.mesh.processes:finish")()
        faulthandler.cancel_dump_traceback_later()
        return findings

    finding = machine.once("together", run).get(name)
    if finding is None or finding.status == "ok":
        return finding
    return finding._replace(advice=finding.advice or ADVICE[name])
