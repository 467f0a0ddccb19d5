"""Ask the NVIDIA driver about its GPUs. Prints JSON; runs in a process of its own, as a broken driver may hang."""

import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pynvml as nvml

SLOWDOWNS = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer; None where the driver or the GPU does not support the question."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def gpu(handle: Any) -> dict[str, Any]:
    """What the checks need of one GPU; sizes in bytes."""
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    links = [ask(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {
        "name": ask(nvml.nvmlDeviceGetName, handle),
        "capability": ".".join(map(str, ask(nvml.nvmlDeviceGetCudaComputeCapability, handle) or "?")),
        "memory_total": memory.total if memory else 0,
        "memory_used": memory.used if memory else 0,
        "ecc": (ask(nvml.nvmlDeviceGetEccMode, handle) or (None,))[0],
        "uncorrected_errors": ask(nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
        "remap_pending": remapped[2],
        "remap_failed": remapped[3],
        "temperature": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "slowdowns": [name for name in SLOWDOWNS if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}")],
        "pcie_width": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_width_max": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "persistence": ask(nvml.nvmlDeviceGetPersistenceMode, handle),
        "mig": (ask(nvml.nvmlDeviceGetMigMode, handle) or (None,))[0],
        "nvlinks": links.count(nvml.NVML_FEATURE_ENABLED),
    }


def main() -> None:
    """Print the fields of gpus.Driver."""
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    without_nvlink = [
        f"{a}-{b}"
        for a, b in combinations(range(len(handles)), 2)
        if ask(nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        != nvml.NVML_P2P_STATUS_OK
    ]
    version = ask(nvml.nvmlSystemGetDriverVersion)
    print(json.dumps({"version": version, "gpus": [*map(gpu, handles)], "without_nvlink": without_nvlink}))


if __name__ == "__main__":
    main()
