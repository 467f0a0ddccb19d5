"""Device memory: of the compiled step, in use now, and at its peak."""

import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

GIB = 2**30
_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes on one device while a compiled step runs."""

    arguments: int
    """State and batch."""
    outputs: int
    """Without outputs that reuse the memory of arguments."""
    temporary: int
    """Activations, gradients and workspaces of kernels."""
    program: int
    """Code and constants."""

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporary + self.program

    def description(self) -> str:
        """A line for the console."""
        parts = f"state and batch {size(self.arguments)}, activations and other temporaries {size(self.temporary)}"
        rest = self.outputs + self.program
        return f"memory of the compiled step: {size(self.total)} a device ({parts}, the rest {size(rest)})"


def size(number: float) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def compiled_memory(devices: Iterable[jax.Device], name: str = "train_step") -> StepMemory | None:
    """Memory of the largest loaded program called `name`; None if the runtime does not report it.

    Read from the runtime's loaded programs, which saves a second compilation.
    """
    clients: dict[int, Any] = {id(device.client): device.client for device in devices}
    statistics = []
    for client in clients.values():
        for program in getattr(client, "live_executables", list)():
            try:
                if any(module.name == f"jit_{name}" for module in program.hlo_modules()):
                    statistics.append(program.get_compiled_memory_stats())
            except jax.errors.JaxRuntimeError:
                continue  # a plugin that does not support it
    sizes = [
        StepMemory(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
            temporary=stats.temp_size_in_bytes,
            program=stats.generated_code_size_in_bytes,
        )
        for stats in statistics
    ]
    return max(sizes, key=lambda memory: memory.total, default=None)


def peak_memory() -> tuple[int, int] | None:
    """(peak bytes in use, bytes available) of the local device with the highest peak; None without statistics."""
    return max(((stats["peak_bytes_in_use"], stats.get("bytes_limit", 0)) for stats in _memory_stats()), default=None)


def memory_in_use() -> dict[str, int]:
    """Bytes in use: `device` and `device_peak`, the largest over local devices, if they have statistics, and `host`,
    the resident memory of this process."""
    sizes = {}
    if statistics := _memory_stats():
        sizes["device"] = max(stats["bytes_in_use"] for stats in statistics)
        sizes["device_peak"] = max(stats["peak_bytes_in_use"] for stats in statistics)
    if _PAGES.exists():
        sizes["host"] = int(_PAGES.read_text().split()[1]) * resource.getpagesize()
    return sizes


def _memory_stats() -> list[dict[str, int]]:
    """Memory statistics of local devices; CPUs have none, nor do GPUs with some allocators."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    return [stats for stats in statistics if {"bytes_in_use", "peak_bytes_in_use"} <= stats.keys()]
