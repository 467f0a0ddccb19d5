"""The devices and processes of a command, set up before jax is imported."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.config.errors import Problem
from megajax.processes.gpus import installed_gpus
from megajax.processes.world import COORDINATOR, COUNT, INDEX, RANKS, StartError, find_world
from megajax.processes.xla_options import FREED_MEMORY, keep_freed_memory


def use_devices(devices: str | None) -> None:
    """Set jax's devices before its import: cpu:8 is eight CPU devices, gpu requires GPUs, None is jax's default.

    A process that runs on CPUs keeps freed memory.
    """
    gpus, count = installed_gpus(Path("/dev")), None if devices is None else _cpu_count(devices)
    if not gpus:
        # Without a GPU, the CUDA plugin of the extra aot would print pages of errors on missing libraries.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if devices is not None:
        os.environ["JAX_PLATFORMS"] = "cuda" if count is None else "cpu"
    if count is not None:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    os.environ.pop(FREED_MEMORY, None)  # of a parent process, which may run on other devices
    if (os.environ.get("JAX_PLATFORMS") or ("" if gpus else "cpu")) == "cpu":
        keep_freed_memory()


def device_problems(devices: str | None) -> list[Problem]:
    """Problems of --devices."""
    if devices is None or devices in ("gpu", "cuda"):
        return []
    count = _cpu_count(devices)
    if count is None:
        hint = "without it, jax uses all GPUs, or one CPU device; cpu:8 is eight CPU devices"
        if re.fullmatch(r"(gpus?|cuda)?:?[\d,]*", devices):
            hint = (
                "without it, jax uses all GPUs; CUDA_VISIBLE_DEVICES=0,1 chooses among them; cpu:8 is eight CPU devices"
            )
        elif number := re.fullmatch(r"cpu\D?([1-9]\d*)|([1-9]\d*)\D?cpus?", devices):
            hint = f"did you mean cpu:{number[1] or number[2]}?"
        elif re.search(r"[a-z]+\d{2,}", devices, re.IGNORECASE):
            hint = f"virtual GPUs are for python -m megajax.plan; {hint}"
        return [Problem("--devices", f"expected cpu:N (N from 1 to 9999), cpu or gpu, got {devices!r}", hint)]
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_num_cpu_devices != count:
        return [Problem("--devices", "jax is already imported, too late to choose devices", "start a new process")]
    return []


def all_devices(devices: str | None) -> int | None:
    """Number of devices of all processes, if both counts are known."""
    per_process, processes = _cpu_count(devices or ""), count_processes()
    return per_process * processes if per_process and processes else None


def use_processes(answers: Mapping[str, Any]) -> None:
    """Put the flags into environment variables, where `find_world` reads them. Raises StartError."""
    names = {"coordinator": COORDINATOR, "num_processes": COUNT, "process_id": INDEX}
    if names.keys() <= answers.keys():
        os.environ.update({name: str(answers[flag]) for flag, name in names.items() if answers[flag] is not None})
        find_world()


def count_processes() -> int | None:
    """Number of processes of this run; None: a launcher gives this process's number but not the count."""
    try:
        world = find_world()
    except StartError:
        return None
    if world is None:
        launched = any(os.environ.get(name) for name in RANKS) and not _is_single_process()
        return None if launched else 1
    return world.count


def _is_single_process() -> bool:
    return "1" in (
        os.environ.get(COUNT),
        os.environ.get("SLURM_STEP_NUM_TASKS"),
        os.environ.get("OMPI_COMM_WORLD_SIZE"),
    )


def _cpu_count(devices: str) -> int | None:
    match = re.fullmatch(r"cpu(?::([1-9]\d{0,3}))?", devices)
    return int(match[1] or 1) if match else None
