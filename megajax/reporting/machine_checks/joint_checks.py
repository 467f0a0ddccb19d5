"""Joint checks of all processes of a run, made in this process because they use the devices as a run does."""

import faulthandler
from collections.abc import Callable, Mapping
from functools import partial

from megajax.config.errors import UserError
from megajax.config.references import resolve
from megajax.mesh.processes.identity import find_identity
from megajax.reporting.machine_checks.machine import Check, Finding, Machine, fail

SECONDS = 180.0
"""Total time limit of all tests."""

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
    return tuple((f"all: {name}", partial(check, name, patience)) for name in ADVICE)


def check(name: str, patience: float, machine: Machine) -> Finding | None:
    """The finding of one test; the first call runs all tests. jax is imported only then, after the other checks."""

    def run(machine: Machine) -> Mapping[str, Finding]:
        start: Callable = resolve("megajax.mesh.processes.agreement:start")
        try:
            start(patience=patience, identity=partial(find_identity, None, {"doctor": True}))
        except UserError as error:
            # One line is enough: the other tests did not run.
            return {next(iter(ADVICE)): fail(str(error), "see the output of the missing processes")}
        # Works even while a collective waits for a lost process.
        faulthandler.dump_traceback_later(SECONDS, exit=True)
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
