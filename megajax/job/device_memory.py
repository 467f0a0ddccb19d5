"""What a step takes on a device: as it was compiled, now, and the most there ever was."""

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
    """Beyond those written in place of arguments."""
    temporary: int
    """Activations, gradients and what kernels need."""
    program: int
    """Code and constants."""

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporary + self.program

    def sentence(self) -> str:
        """In words."""
        parts = f"state and batch {size(self.arguments)}, activations and other temporaries {size(self.temporary)}"
        rest = self.outputs + self.program
        return f"memory of the compiled step: {size(self.total)} a device ({parts}, the rest {size(rest)})"


def size(number: float) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def compiled_memory(devices: Iterable[jax.Device], name: str = "train_step") -> StepMemory | None:
    """Of the largest program called `name` that is loaded; None where the runtime does not say.

    Asks the runtime for what it has loaded already: compiling once more to learn it would take as long again.
    """
    clients: dict[int, Any] = {id(device.client): device.client for device in devices}
    found = []
    for client in clients.values():
        for program in getattr(client, "live_executables", list)():
            try:
                if any(module.name == f"jit_{name}" for module in program.hlo_modules()):
                    found.append(program.get_compiled_memory_stats())
            except jax.errors.JaxRuntimeError:
                continue  # a plugin that does not say; a run goes on without knowing
    sizes = [
        StepMemory(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
            temporary=stats.temp_size_in_bytes,
            program=stats.generated_code_size_in_bytes,
        )
        for stats in found
    ]
    return max(sizes, key=lambda memory: memory.total, default=None)


def peak_memory() -> tuple[int, int] | None:
    """(most bytes in use at once, bytes there are) of the local device that used most; None where it is not counted."""
    return max(((stats["peak_bytes_in_use"], stats.get("bytes_limit", 0)) for stats in _counted()), default=None)


def memory_in_use() -> dict[str, int]:
    """Bytes now, what is not counted left out: `device` and `device_peak`, each of the local device with most of it,
    and `host`, what of this process is in main memory."""
    found = {}
    if counted := _counted():
        found["device"] = max(stats["bytes_in_use"] for stats in counted)
        found["device_peak"] = max(stats["peak_bytes_in_use"] for stats in counted)
    if _PAGES.exists():
        found["host"] = int(_PAGES.read_text().split()[1]) * resource.getpagesize()
    return found


def _counted() -> list[dict[str, int]]:
    """What local devices say of their memory, those that count it: not CPUs, nor GPUs with every allocator."""
    counted = [device.memory_stats() or {} for device in jax.local_devices()]
    return [stats for stats in counted if {"bytes_in_use", "peak_bytes_in_use"} <= stats.keys()]
