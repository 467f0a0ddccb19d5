"""GPUs to plan for, as data: what the compiler wants to know of each, and how much of its memory a program may have.

Numbers are of NVIDIA's data sheets and architecture white papers (A100: DS-10031, "NVIDIA A100 Tensor Core GPU
Architecture"; H100 and H200 SXM: "NVIDIA H100 Tensor Core GPU Architecture" and the H200 data sheet; B200 and GB200:
"NVIDIA Blackwell Architecture Technical Brief", the DGX B200 and the GB200 NVL72 data sheets) and, for what is common
to a compute capability, of the table in the CUDA C++ Programming Guide.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.config.errors import Problem
from megajax.config.nearest import did_you_mean

GIB = 2**30
MIB = 2**20
KIB = 2**10

CONTEXT_GIB = 1.0
"""CUDA context, kernels' code, handles and workspaces of cuBLAS and cuDNN."""
NCCL_GIB = 2.0
"""Channel buffers of NCCL's communicators; they lie outside the memory pool."""
CUDNN = (9, 10, 0)
"""Version of cuDNN that is taken to be there."""
MOST_DEVICES = 16_384
"""Largest cluster that is planned for."""
LOST_SHARE = 0.04
"""Share of the data sheet's memory that the driver keeps (about 1 %) or that fragments of the pool make useless."""


def usable_gib(memory_gib: float) -> float:
    """What is left of a GPU's memory for a program's arrays."""
    return memory_gib * (1 - LOST_SHARE) - CONTEXT_GIB - NCCL_GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One model of GPU."""

    description: str
    """As the driver calls it."""
    memory_gib: float
    """Of the data sheet."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """float32 units per multiprocessor."""
    capability: tuple[int, int]
    """Compute capability."""
    shared_kib: int
    """Shared memory per multiprocessor; a block may have all but 1 KiB of it."""
    l2_mib: float
    """Level-2 cache."""
    clock_ghz: float
    """Boost clock."""
    links: int
    """NVLink connections."""
    per_node: int = 8
    """GPUs that NVLink connects, unless said otherwise."""

    @property
    def usable_gib(self) -> float:
        """What is left for a program's arrays after CONTEXT_GIB, NCCL_GIB and LOST_SHARE."""
        return usable_gib(self.memory_gib)

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text: what `get_topology_desc(target_config=...)` takes."""
        major, minor = self.capability
        cuda = (12, 9, 0)
        # Kernels with "accelerated" instructions (wgmma, tcgen05) run on this very architecture alone, from Hopper on.
        extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        device = {
            **_COMMON,
            "shared_memory_per_core": self.shared_kib * KIB,
            "shared_memory_per_block_optin": (self.shared_kib - 1) * KIB,
            "core_count": self.cores,
            "fpus_per_core": self.lanes,
            "memory_bandwidth": round(self.bandwidth),
            "l2_cache_size": round(self.l2_mib * MIB),
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": round(self.memory_gib * GIB),
            "cuda_compute_capability": {"major": major, "minor": minor, "feature_extension": _Word(extension)},
            "name": self.description,
            "device_interconnect_info": {"active_links": self.links},
            **{f"{part}_version": _dotted(cuda) for part in ("driver", "runtime", "compile_time_toolkit")},
            "dnn_version": _dotted(CUDNN),
        }
        names = ("major", "minor", "patch")
        return _proto(
            {
                "gpu_device_info": device,
                "platform_name": "CUDA",
                "dnn_version_info": dict(zip(names, CUDNN, strict=True)),
                "device_description_str": self.description,
            }
        )


class _Word(str):
    """A value of an enumeration: text without quotes."""


_COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 48 * KIB,
    "registers_per_core_limit": 64 * KIB,
    "registers_per_block_limit": 64 * KIB,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "device_address_bits": 64,
    "collective_memory_granularity": 2 * MIB,
    "device_vendor": "NVIDIA Corporation",
}
"""The same from compute capability 8.0 to 10.0 (CUDA C++ Programming Guide, "Technical Specifications")."""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _proto(fields: dict, indent: str = "") -> str:
    """Protocol-buffer text of nested dicts."""
    lines = []
    for name, value in fields.items():
        match value:
            case dict():
                lines += [f"{indent}{name} {{", _proto(value, indent + "  ").rstrip("\n"), f"{indent}}}"]
            case str() if not isinstance(value, _Word):
                lines.append(f'{indent}{name}: "{value}"')
            case _:
                lines.append(f"{indent}{name}: {value}")
    return "\n".join(lines) + "\n"


_A100: dict[str, Any] = {
    "cores": 108,
    "lanes": 64,
    "capability": (8, 0),
    "shared_kib": 164,
    "l2_mib": 40,
    "clock_ghz": 1.41,
    "links": 12,
}
_HOPPER: dict[str, Any] = {
    "cores": 132,
    "lanes": 128,
    "capability": (9, 0),
    "shared_kib": 228,
    "l2_mib": 50,
    "clock_ghz": 1.98,
    "links": 18,
}
_BLACKWELL: dict[str, Any] = {
    "cores": 148,
    "lanes": 128,
    "capability": (10, 0),
    "shared_kib": 228,
    "l2_mib": 126,
    "clock_ghz": 1.965,
    "links": 18,
}

GPUS = {
    "a100-40gb": GPU(description="NVIDIA A100-SXM4-40GB", memory_gib=40, bandwidth=1.555e12, **_A100),
    "a100-80gb": GPU(description="NVIDIA A100-SXM4-80GB", memory_gib=80, bandwidth=2.039e12, **_A100),
    "h100": GPU(description="NVIDIA H100 80GB HBM3", memory_gib=80, bandwidth=3.35e12, **_HOPPER),
    "h200": GPU(description="NVIDIA H200", memory_gib=141, bandwidth=4.8e12, **_HOPPER),
    "b200": GPU(description="NVIDIA B200", memory_gib=180, bandwidth=8e12, **_BLACKWELL),
    "gb200": GPU(description="NVIDIA GB200", memory_gib=186, bandwidth=8e12, per_node=72, **_BLACKWELL),
}
OTHER_NAMES = {"a100": "a100-80gb"}
OTHERS = "any other one: --formula --device-file=FILE, YAML with name, memory_gib, bandwidth, peak, nvlink, network"
NO_OTHERS: Mapping[str, int] = MappingProxyType({})


class Cluster(NamedTuple):
    """How many of which GPU, in nodes."""

    name: str
    """Key of GPUS."""
    devices: int
    per_node: int

    @property
    def gpu(self) -> GPU:
        return GPUS[self.name]

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)

    def topology(self) -> str:
        """As `get_topology_desc` wants it: NVLink domains, each a node, x hosts in one x GPUs of a host."""
        return f"{self.nodes}x1x{min(self.devices, self.per_node)}"


def read_cluster(
    text: str | None, per_node: int | None = None, described: Mapping[str, int] = NO_OTHERS
) -> tuple[Cluster | None, list[Problem]]:
    """ "h100:128" -> 128 GPUs in nodes of `per_node`; "h100" is one node. None with problems where it can't be read.

    per_node: None for as many as the GPU's own; described: other devices by name, with theirs.
    """
    nodes = {name: gpu.per_node for name, gpu in GPUS.items()} | dict(described)
    known = ", ".join([*OTHER_NAMES, *nodes])
    if text is None:
        return None, [Problem("--devices", "must be given", f"GPU:N, e.g. h100:128; known: {known}")]
    if per_node is not None and per_node < 1:
        return None, [Problem("--gpus-per-node", f"must be at least 1, got {per_node}")]
    written, colon, count = text.partition(":")
    name = written.lower()
    name = OTHER_NAMES.get(name, name)
    if name not in nodes:
        near = did_you_mean(name, nodes)
        hint = f"{near + '; ' if near else ''}known: {known}; {OTHERS}"
        return None, [Problem("--devices", f"unknown device {written!r}", hint)]
    if colon and not re.fullmatch(r"[1-9]\d{0,5}", count):
        return None, [Problem("--devices", f"expected GPU:N with N from 1 to 999999, got {text!r}")]
    per_node = per_node or nodes[name]
    devices = int(count) if colon else per_node
    if devices > MOST_DEVICES:
        what = f"{devices:,} devices asked for, plans are made for at most {MOST_DEVICES:,}"
        return None, [Problem("--devices", what, "more data parallelism hardly changes what a device holds and does")]
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        what = f"{devices} GPUs don't fill nodes of {per_node}"
        return None, [Problem("--devices", what, f"give {below} or {below + per_node}, or another --gpus-per-node")]
    return Cluster(name, devices, per_node), []
