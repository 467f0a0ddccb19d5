"""Checks of NVIDIA GPUs: the installation, and the driver's state from NVML.

As a program, prints that state. It runs in a separate process because a broken driver may hang.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megajax.display.text import byte_size
from megajax.machine.check import Check, Finding, Machine, fail, ok, warn
from megajax.machine.gpu_health import NOT_INSTALLED, GpuHealth, Symptom, load_nvml
from megajax.processes.installation import find_installation

NVML_SECONDS = 20.0
"""Time limit of the query: without persistence mode, the driver must initialize first."""

BUSY_SHARE = 0.02
"""A GPU with a larger share of its memory in use is busy."""

FATAL = ("uncorrected_errors", "remap_failed", "xid")
"""Symptoms of a GPU that no run should use."""
SLOW = "check cooling and power supply: one slow GPU slows the whole run"
REMEDIES = {
    **dict.fromkeys(FATAL, "drain the machine, and have the GPU reset or replaced"),
    "remap_pending": "nvidia-smi -r",
    "retired_pages": "nothing, unless their number grows",
    "memory_in_use": "stop other programs there (see nvidia-smi)",
}
"""Symptom -> what to do about it; SLOW for the others."""


def driver(machine: Machine) -> Mapping[str, Any]:
    """The output of `main`, queried once; without an answer, no GPUs and the reason as `why`."""
    return machine.cached("nvml", _query_driver)


def _query_driver(machine: Machine) -> Mapping[str, Any]:
    output = machine.run(sys.executable, "-m", "megajax.machine.gpu_checks", seconds=NVML_SECONDS)
    if output.code == 0 and output.out:
        return json.loads(output.out.splitlines()[-1])
    return {"gpus": [], "why": f"the driver does not answer: {output.reason}"}


def count(machine: Machine) -> Finding:
    """The driver knows all GPUs."""
    gpus, why, files = driver(machine)["gpus"], driver(machine).get("why"), machine.gpu_files
    if not gpus and not files:
        return warn("no NVIDIA GPU", "runs use the CPU: enough for small experiments")
    if why == NOT_INSTALLED:
        return warn(f"{files} device files; not checked: {why}", "pip install 'megajax[monitor]'")
    if not gpus:
        return fail(f"{files} device files; {why or 'the driver knows no GPU'}", "reload the driver, or reboot")
    if len(gpus) < files:
        text = f"the driver knows {len(gpus)} GPUs, the kernel {files}"
        return fail(text, "one has fallen off the bus, or belongs to another container: see dmesg")
    kinds = Counter(f"{g['name']} (capability {g['capability']}, {byte_size(g['memory_total'])})" for g in gpus)
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    if len(kinds) > 1:
        return warn(text, "a run on all of them has the speed and the memory of the slowest and smallest")
    return ok(text)


def installation(machine: Machine) -> Finding | None:
    """Driver, jax's CUDA plugin and NVIDIA's libraries are installed and compatible."""
    installed = find_installation()
    if not installed.gpus:
        return None
    if faults := installed.faults():
        return fail("; ".join(faults), "fix these: jax can't use the GPUs until then")
    return ok(f"driver {'.'.join(map(str, installed.driver or ()))}, plugin for CUDA {installed.cuda[0]}")


def health(machine: Machine) -> Finding | None:
    """No memory errors, no slowdowns, and no other programs on the GPUs."""
    report = driver(machine)
    if not report["gpus"]:
        return None
    in_use = [
        Symptom(number, "memory_in_use", byte_size(gpu["memory_used"]))
        for number, gpu in enumerate(report["gpus"])
        if gpu["memory_used"] > BUSY_SHARE * gpu["memory_total"]
    ]
    return health_of([*itertools.starmap(Symptom, report["symptoms"]), *in_use])


def health_of(symptoms: Iterable[Symptom]) -> Finding:
    """The finding of what the driver reports."""
    symptoms = list(symptoms)
    if not symptoms:
        return ok("no memory errors, no slowdown")
    verdict = fail if any(symptom.what in FATAL for symptom in symptoms) else warn
    advice = dict.fromkeys(REMEDIES.get(symptom.what, SLOW) for symptom in symptoms)
    text = "; ".join(f"GPU {symptom.gpu}: {symptom.what.replace('_', ' ')} {symptom.value}" for symptom in symptoms)
    return verdict(text, "; ".join(advice))


def links(machine: Machine) -> Finding | None:
    """NVLink between all GPUs."""
    number = len(driver(machine)["gpus"])
    if number < 2:
        return None
    without = driver(machine)["without_nvlink"]
    if len(without) == number * (number - 1) // 2:
        return warn("no NVLink between GPUs", "keep parallel.tensor=1: its communication would use PCIe")
    if without:
        text = f"pairs of GPUs without NVLink: {', '.join(without[:6])}"
        return warn(text, "expected for cards bridged in pairs; otherwise a link is down: nvidia-smi nvlink -s")
    return ok(f"NVLink between all {number} GPUs")


CHECKS: tuple[Check, ...] = (("GPUs", count), ("CUDA", installation), ("GPU health", health), ("GPU links", links))


def main() -> None:
    """Print the driver's state as JSON; sizes in bytes, null for queries that the driver does not support."""
    nvml, why = load_nvml()
    if nvml is None:
        print(json.dumps({"gpus": [], "why": why}))
        return

    def query(question: Callable[..., Any], *arguments: object) -> Any:
        try:
            return question(*arguments)
        except nvml.NVMLError:
            return None

    def gpu(handle: Any) -> dict[str, Any]:
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "name": query(nvml.nvmlDeviceGetName, handle),
            "capability": ".".join(map(str, query(nvml.nvmlDeviceGetCudaComputeCapability, handle) or "?")),
            "memory_total": memory.total if memory else 0,
            "memory_used": memory.used if memory else 0,
        }

    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    without_nvlink = [
        f"{a}-{b}"
        for a, b in itertools.combinations(range(len(handles)), 2)
        if query(nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        != nvml.NVML_P2P_STATUS_OK
    ]
    symptoms = GpuHealth(nvml, range(len(handles))).poll()
    print(json.dumps({"gpus": [*map(gpu, handles)], "symptoms": symptoms, "without_nvlink": without_nvlink}))


if __name__ == "__main__":
    main()
