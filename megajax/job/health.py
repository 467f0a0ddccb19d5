"""Health of the GPUs during a run: events and lines when something changes."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import jax
from jax.sharding import Mesh

from megajax.metrics.event_log import append_event
from megajax.resilience.gpu_health import GpuHealth, HealthThread, Symptom, gpu_numbers, load_nvml
from megajax.resilience.integrity_config import HealthConfig


def watch_gpus(
    cfg: HealthConfig, mesh: Mesh, stack: ExitStack, say: Callable[[str], None], events_file: Path
) -> str | None:
    """Start to watch the GPUs of this process -> a line for people; None where there are none, or none is wanted."""
    devices = mesh.local_devices
    if cfg.every_seconds is None or devices[0].platform != "gpu":
        return None
    nvml, why = load_nvml()
    if nvml is None:
        return f"health of GPUs: not watched, {why} (pip install 'megajax[monitor]')"
    process, several = jax.process_index(), jax.process_count() > 1

    def tell(symptom: Symptom) -> None:
        line = f"{f'process {process}, ' * several}{sentence(symptom)}"
        # The console is that of process 0; what others print is collected by the launcher.
        print(f"megajax: {line}", file=sys.stderr, flush=True) if process else say(line)
        with suppress(OSError):
            append_event(events_file, "health", process=process, **symptom._asdict())

    health = GpuHealth(nvml, gpu_numbers((device.local_hardware_id for device in devices), os.environ))
    stack.enter_context(HealthThread(health.poll, cfg.every_seconds, tell))
    return f"health of GPUs: asked for every {cfg.every_seconds:g} s"


def sentence(symptom: Symptom) -> str:
    """What has changed, in words."""
    words = {
        "uncorrected_errors": "uncorrected memory errors",
        "retired_pages": "memory rows replaced because of uncorrectable errors",
        "remap_pending": "a memory row to be replaced at the next reset",
        "remap_failed": "no spare memory rows left",
        "slowdowns": "clocks slowed down",
        "temperature": "too hot",
        "power_limit": "power limited",
        "xid": "Xid error",
    }
    what = words.get(symptom.what, symptom.what)
    if not symptom.value:
        return f"GPU {symptom.gpu}: no longer {what}"
    return f"GPU {symptom.gpu}: {what}" + ("" if symptom.value is True else f": {symptom.value}")
