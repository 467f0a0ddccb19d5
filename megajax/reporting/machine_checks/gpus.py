"""Checks of NVIDIA GPUs: the installation, and the driver's state from NVML.

As a program, prints that state. It runs in a separate process because a broken driver may hang.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from megajax.display.text import byte_size
from megajax.faults.gpu_health import NOT_INSTALLED, SLOWDOWNS
from megajax.mesh.processes.installation import find_installation
from megajax.reporting.machine_checks.machine import Check, Finding, Machine, fail, ok, warn

NVML_SECONDS = 20.0
"""Time limit of the query: without persistence mode, the driver must initialize first."""

BUSY_SHARE = 0.02
"""A GPU with a larger share of its memory in use is busy."""


def driver(machine: Machine) -> Mapping[str, Any]:
    """The output of `main`, queried once; without an answer, no GPUs and the reason as `why`."""
    return machine.cached("nvml", _query_driver)


def _query_driver(machine: Machine) -> Mapping[str, Any]:
    output = machine.run(sys.executable, "-m", "megajax.reporting.machine_checks.gpus", seconds=NVML_SECONDS)
    if output.code == 0:
        return json.loads(output.out.splitlines()[-1])
    missing = "No module named 'pynvml'" in output.err
    return {"gpus": [], "why": NOT_INSTALLED if missing else f"the driver does not answer: {output.reason}"}


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
    gpus = driver(machine)["gpus"]
    problems = [
        (status, f"GPU {i} {text}", advice) for i, g in enumerate(gpus) for status, text, advice in _problems(g)
    ]
    if not problems:
        return ok("free, no memory errors, no slowdown") if gpus else None
    advice = "; ".join(dict.fromkeys(advice for _, _, advice in problems))
    verdict = fail if any(status == "fail" for status, _, _ in problems) else warn
    return verdict("; ".join(text for _, text, _ in problems), advice)


def _problems(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Status, text and advice of each problem."""
    replace = "drain the machine, and have the GPU reset or replaced"
    if gpu["uncorrected_errors"]:
        yield "fail", f"has {gpu['uncorrected_errors']} uncorrected memory errors", replace
    if gpu["remap_failed"]:
        yield "fail", "has no spare memory rows to replace broken ones", replace
    if gpu["remap_pending"]:
        yield "warn", "needs a reset to replace a broken memory row", "nvidia-smi -r"
    if gpu["slowdowns"]:
        text = f"has {gpu['temperature']} °C, slowdowns: {', '.join(gpu['slowdowns'])}"
        yield "warn", text, "check cooling and power supply: one slow GPU slows the whole run"
    if gpu["memory_used"] > BUSY_SHARE * gpu["memory_total"]:
        yield "warn", f"has {gpu['memory_used'] / 2**20:,.0f} MiB in use", "stop other programs there (see nvidia-smi)"


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
    import pynvml as nvml

    def query(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except nvml.NVMLError:
            return None

    def gpu(handle: Any) -> dict[str, Any]:
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        remapped = query(nvml.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
        reasons = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return {
            "name": query(nvml.nvmlDeviceGetName, handle),
            "capability": ".".join(map(str, query(nvml.nvmlDeviceGetCudaComputeCapability, handle) or "?")),
            "memory_total": memory.total if memory else 0,
            "memory_used": memory.used if memory else 0,
            "uncorrected_errors": query(nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            "remap_pending": remapped[2],
            "remap_failed": remapped[3],
            "temperature": query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "slowdowns": [name for name in SLOWDOWNS if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}")],
        }

    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    without_nvlink = [
        f"{a}-{b}"
        for a, b in combinations(range(len(handles)), 2)
        if query(nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        != nvml.NVML_P2P_STATUS_OK
    ]
    print(json.dumps({"gpus": [*map(gpu, handles)], "without_nvlink": without_nvlink}))


if __name__ == "__main__":
    main()
