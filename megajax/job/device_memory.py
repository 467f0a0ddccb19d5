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
    """Without those that reuse the memory of arguments."""
    temporary: int
    """Activations, gradients and workspaces of kernels."""
    program: int
    """Code and constants."""

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporary + self.program

    def sentence(self) -> str:
        """One line of text."""
        parts = f"state and batch {size(self.arguments)}, activations and other temporaries {size(self.temporary)}"
        rest = self.outputs + self.program
        return f"memory of the compiled step: {size(self.total)} a device ({parts}, the rest {size(rest)})"


def size(number: float) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def compiled_memory(devices: Iterable[jax.Device], name: str = "train_step") -> StepMemory | None:
    """Memory of the largest loaded program called `name`; None if the runtime does not know.

    Asks the runtime for its loaded programs: compiling again to learn it would take as long as the first time.
    """
    clients: dict[int, Any] = {id(device.client): device.client for device in devices}
    known = []
    for client in clients.values():
        for program in getattr(client, "live_executables", list)():
            try:
                if any(module.name == f"jit_{name}" for module in program.hlo_modules()):
                    known.append(program.get_compiled_memory_stats())
            except jax.errors.JaxRuntimeError:
                continue  # a plugin that does not support it
    sizes = [
        StepMemory(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
            temporary=stats.temp_size_in_bytes,
            program=stats.generated_code_size_in_bytes,
        )
        for stats in known
    ]
    return max(sizes, key=lambda memory: memory.total, default=None)


def peak_memory() -> tuple[int, int] | None:
    """(peak bytes in use, bytes available) of the local device with the highest peak; None if not counted."""
    return max(((stats["peak_bytes_in_use"], stats.get("bytes_limit", 0)) for stats in _counted()), default=None)


def memory_in_use() -> dict[str, int]:
    """Bytes in use, as far as they are counted: `device` and `device_peak`, the largest over local devices, and `host`,
    the resident memory of this process."""
    sizes = {}
    if counted := _counted():
        sizes["device"] = max(stats["bytes_in_use"] for stats in counted)
        sizes["device_peak"] = max(stats["peak_bytes_in_use"] for stats in counted)
    if _PAGES.exists():
        sizes["host"] = int(_PAGES.read_text().split()[1]) * resource.getpagesize()
    return sizes


def _counted() -> list[dict[str, int]]:
    """Memory statistics of the local devices that count: CPUs do not, nor GPUs with some allocators."""
    counted = [device.memory_stats() or {} for device in jax.local_devices()]
    return [stats for stats in counted if {"bytes_in_use", "peak_bytes_in_use"} <= stats.keys()]
