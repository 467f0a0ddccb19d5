"""What devices and links can do: the few physical constants of the cost model, each with its source.

Peaks, memory bandwidth and link rates are those of data sheets (see planning/program/devices.py; rates of NVLink and
ConnectX are of one direction). Shares of them that programs achieve come from measurements named beside each, or from
the runs named in `FITTED`, which benchmarks/planner_accuracy.py fits them to; benchmarks/calibrate.py measures them on
hardware at hand, and `calibrated` puts such a file in their place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megajax.config.coerce import Text
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.nearest import did_you_mean
from megajax.config.tree import assemble
from megajax.layers.config import above_zero
from megajax.planning.program.devices import GPUS, OTHER_NAMES, usable_gib

FITTED = (
    "NeMo, Llama-3.1 8B, 8 x H100, bf16",
    "Megatron-Bridge, Llama-3 8B, 8 x H100, fp8",
    "Megatron-Bridge, Llama-3 8B, 8 x B200, fp8",
    "Megatron-LM core r0.8, GPT 32B, 384 x H100, bf16",
)
"""Published runs that constants were fitted to, in benchmarks/planner_accuracy.py: `matmul` of Hopper, `matmul_fp8` of
Hopper, `matmul_fp8` of Blackwell, and the overhead of Megatron-LM's kernels of 2024."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU and its links, as the cost model sees them. Rates in operations or bytes per second."""

    name: str
    memory_gib: float
    """Of the data sheet."""
    bandwidth: float
    """Of its memory."""
    peak: float
    """Of dense bfloat16 or float16 matmuls."""
    nvlink: float
    """To other devices of the node, one direction."""
    network: float
    """To other nodes, one direction, each device's share."""
    peak_fp8: float | None = None
    """Of dense fp8 matmuls; None where there are none."""
    peak_float32: float | None = None
    """Of float32 matmuls without TF32; None: a thirtieth of `peak`."""
    per_node: int = 8
    """Devices that NVLink connects, unless said otherwise."""
    matmul: float = 0.75
    """Share of `peak` that large matmuls reach."""
    matmul_fp8: float = 0.70
    """Share of `peak_fp8` that large matmuls reach, without the casts."""
    matmul_half: float = 64.0
    """Size of a dimension at which a matmul has half the rate of a large one; see `matmul_share`."""
    attention_forward: float = 0.60
    """Share of `peak` that a fused causal attention reaches, operations on masked scores not counted."""
    attention_backward: float = 0.50
    """The same backward, where five matmuls stand against two forward."""
    stream: float = 0.80
    """Share of `bandwidth` that norms, activations and the optimizer reach."""
    nvlink_share: float = 0.75
    """Share of `nvlink` that a ring reaches."""
    network_share: float = 0.85
    """Share of `network` that a ring reaches."""
    nvlink_latency: float = 4e-6
    """Seconds of one hop within a node, a collective's start included."""
    network_latency: float = 12e-6
    """Seconds of one hop between nodes."""
    launch: float = 12e-6
    """Seconds that any collective takes at least."""
    host: float = 50e9
    """To or from host memory, bytes/s that large copies reach: PCIe 5.0 x16 unless given (64 GB/s by its standard)."""

    def problems(self) -> list[Problem]:
        return above_zero(**{field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"})

    @property
    def usable_gib(self) -> float:
        """What is left for a program's arrays."""
        return usable_gib(self.memory_gib)

    def peak_of(self, compute: str) -> float:
        """Operations per second of matmuls in bfloat16, float16, float32 or fp8, by the data sheet.

        Raises UserError where it has no such matmuls.
        """
        match compute:
            case "fp8":
                if self.peak_fp8 is None:
                    raise UserError(f"{self.name} has no fp8 matmuls.\nPlan for bfloat16, or for another device.")
                return self.peak_fp8
            case "float32":
                return self.peak_float32 or self.peak / 30
        return self.peak

    def matmul_rate(self, compute: str) -> float:
        """Operations per second of large matmuls."""
        return self.peak_of(compute) * (self.matmul_fp8 if compute == "fp8" else self.matmul)

    def matmul_share(self, *sizes: float) -> float:
        """Rate of a matmul of these sizes (rows, contracted, columns) over that of a large one.

        The product of n / (n + matmul_half) over the dimensions: tiles that are not full, and pipelines that fill and
        drain, cost the same whatever the size. Alike for the forward and both backward matmuls, which turn the same
        three numbers around.
        """
        share = 1.0
        for size in sizes:
            share *= size / (size + self.matmul_half)
        return share


_AMPERE = {
    "peak": 312e12,
    "peak_float32": 19.5e12,
    "nvlink": 300e9,
    "network": 25e9,
    # Power does not limit it as it does later generations: cuBLAS on large matmuls, about 260 of 312 TFLOP/s.
    "matmul": 0.83,
    # FlashAttention-2 (Dao 2023, figures 4 to 6): 190 to 200 TFLOP/s forward, 170 to 180 both.
    "attention_forward": 0.60,
    "attention_backward": 0.52,
    "host": 25e9,  # PCIe 4.0 x16: 32 GB/s by its standard
}
_HOPPER = {
    "peak": 989.4e12,
    "peak_fp8": 1978.9e12,
    "peak_float32": 67e12,
    "nvlink": 450e9,
    "network": 50e9,
    "matmul": 0.675,  # fitted
    "matmul_fp8": 0.599,  # fitted
    # cuDNN on an H100, 2 rows of 4096 tokens, 32 heads of 128, forward: 0.453 ms (AXLearn's benchmark), 0.61 of the
    # peak; FlashAttention-3 (Shah et al. 2024, figure 6), backward: 450 to 560 TFLOP/s.
    "attention_forward": 0.60,
    "attention_backward": 0.50,
}
_BLACKWELL = {
    "peak_float32": 75e12,
    "nvlink": 900e9,
    "network": 50e9,
    "matmul": 0.70,  # between Hopper and Ampere; no run in bfloat16 is published
    "matmul_fp8": 0.512,  # fitted
    "attention_forward": 0.60,
    "attention_backward": 0.45,
}


def _known(name: str, **constants: Any) -> Device:
    gpu = GPUS[name]
    return Device(name=name, memory_gib=gpu.memory_gib, bandwidth=gpu.bandwidth, per_node=gpu.per_node, **constants)


DEVICES = {
    "a100-40gb": _known("a100-40gb", **_AMPERE),
    "a100-80gb": _known("a100-80gb", **_AMPERE),
    "h100": _known("h100", **_HOPPER),
    "h200": _known("h200", **_HOPPER),
    "b200": _known("b200", peak=2250e12, peak_fp8=4500e12, **_BLACKWELL),
    # The same chip with a higher power limit; NVLink-C2C to the host: 900 GB/s of two GPUs, both directions.
    "gb200": _known("gb200", peak=2450e12, peak_fp8=4900e12, host=200e9, **_BLACKWELL),
}
"""By the names of megajax.planning.program.devices.GPUS."""

REQUIRED = ("name", "memory_gib", "bandwidth", "peak", "nvlink", "network")
HOW = (
    "describe it in a file and give that with --device-file, as YAML:\n"
    "  name: h300\n  memory_gib: 192\n  bandwidth: 6.0e12   # of its memory, bytes/s\n"
    "  peak: 1.2e15       # bfloat16 matmuls, operations/s\n"
    "  nvlink: 600e9      # within a node, bytes/s, one direction\n"
    "  network: 50e9      # between nodes, bytes/s of each device, one direction\n"
    f"and, if known: {', '.join(f.name for f in fields(Device) if f.name not in REQUIRED)}"
)
"""How to plan for a device that is not known."""


def known_device(name: str) -> Device:
    """A known device. Raises UserError for others, with the known ones and how to describe one."""
    chosen = OTHER_NAMES.get(name.lower(), name.lower())
    if chosen not in DEVICES:
        known = ", ".join([*OTHER_NAMES, *DEVICES])
        near = did_you_mean(name, DEVICES)
        raise UserError(f"unknown device {name!r}{', ' + near if near else ''}; known: {known}.\nOr {HOW}")
    return DEVICES[chosen]


def read_device(path: Path) -> Device:
    """A device described in a YAML file. Raises UserError with all that is missing or wrong."""
    return _device(path, None, _read(path))


def calibrated(base: Device, path: Path) -> Device:
    """A device with the constants that were measured, from what benchmarks/calibrate.py writes.

    Raises UserError for a file that can't be read, and for one of another device.
    """
    given = _read(path)
    measured = given.get("name", base.name)
    if measured != base.name:
        raise UserError(
            f"{path} was measured on {measured}, the plan is for {base.name}.\n"
            f"Plan for {measured}, or give a file measured on {base.name}."
        )
    return _device(path, base, given)


def _device(path: Path, base: Device | None, given: Mapping[str, Any]) -> Device:
    # YAML reads 50e9, without a point, as text.
    written = {name: Text(value) if isinstance(value, str) else value for name, value in given.items()}
    device, problems = assemble(Device, base, written)
    if problems:
        raise UserError(f"{ConfigError(problems, str(path))}\nTo plan for a device, {HOW}")
    return device


def _read(path: Path) -> Mapping[str, Any]:
    """Names and values in a YAML file; of a calibration file, its figures' constants. Raises UserError."""
    try:
        read: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    for inner in ("figures", "constants"):
        read = read.get(inner, read) if isinstance(read, Mapping) else read
    if not isinstance(read, Mapping):
        raise UserError(f"{path} must hold names and numbers.\nTo plan for a device, {HOW}")
    return read
