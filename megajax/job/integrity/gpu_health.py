"""Health of the GPUs during a run: logs and prints each change."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import jax
from jax.sharding import Mesh

from megajax.faults.gpu_health import GpuHealth, HealthThread, Symptom, gpu_numbers, load_nvml
from megajax.faults.integrity_config import HealthConfig
from megajax.metrics.event_log import append_event


def watch_gpus(
    cfg: HealthConfig, mesh: Mesh, stack: ExitStack, say: Callable[[str], None], events_file: Path
) -> str | None:
    """Start to watch the GPUs of this process -> a line for the banner; None without GPUs, or if the watch is off."""
    devices = mesh.local_devices
    if cfg.every_seconds is None or devices[0].platform != "gpu":
        return None
    nvml, why = load_nvml()
    if nvml is None:
        return f"health of GPUs: not watched, {why} (pip install 'megajax[monitor]')"
    process, several = jax.process_index(), jax.process_count() > 1

    def report(symptom: Symptom) -> None:
        line = f"{f'process {process}, ' * several}{message(symptom)}"
        # Process 0 has the console; the launcher collects the output of the others.
        print(f"megajax: {line}", file=sys.stderr, flush=True) if process else say(line)
        with suppress(OSError):
            append_event(events_file, "health", process=process, **symptom._asdict())

    health = GpuHealth(nvml, gpu_numbers((device.local_hardware_id for device in devices), os.environ))
    stack.enter_context(HealthThread(health.poll, cfg.every_seconds, report))
    return f"health of GPUs: checked every {cfg.every_seconds:g} s"


def message(symptom: Symptom) -> str:
    """A change of a GPU's health as a line."""
    names = {
        "uncorrected_errors": "uncorrected memory errors",
        "retired_pages": "memory rows replaced because of uncorrectable errors",
        "remap_pending": "a memory row that the next reset replaces",
        "remap_failed": "no spare memory rows left",
        "slowdowns": "clocks slowed down",
        "temperature": "too hot",
        "power_limit": "power limited",
        "xid": "Xid error",
    }
    name = names.get(symptom.what, symptom.what)
    if not symptom.value:
        return f"GPU {symptom.gpu}: no longer {name}"
    return f"GPU {symptom.gpu}: {name}" + ("" if symptom.value is True else f": {symptom.value}")
