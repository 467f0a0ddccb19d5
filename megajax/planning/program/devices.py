"""GPUs to plan for: what the compiler needs to know of each, usable memory, and virtual devices to compile for.

Sources of the numbers: NVIDIA's data sheets and architecture white papers (A100: DS-10031, "NVIDIA A100 Tensor Core GPU
Architecture"; H100 and H200 SXM: "NVIDIA H100 Tensor Core GPU Architecture" and the H200 data sheet; B200 and GB200:
"NVIDIA Blackwell Architecture Technical Brief", the DGX B200 and the GB200 NVL72 data sheets) and, for what is common
to a compute capability, the table in the CUDA C++ Programming Guide.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.config.builds import resolve
from megajax.config.errors import Problem, UserError
from megajax.config.nearest import did_you_mean

GIB = 2**30
MIB = 2**20
KIB = 2**10

CONTEXT_GIB = 1.0
"""CUDA context, code of kernels, handles and workspaces of cuBLAS and cuDNN."""
NCCL_GIB = 2.0
"""Channel buffers of NCCL's communicators, which are outside the memory pool."""
CUDNN = (9, 10, 0)
"""Version of cuDNN that virtual devices have."""
MOST_DEVICES = 16_384
"""Largest cluster."""
LOST_SHARE = 0.04
"""Fraction of the data sheet's memory that the driver keeps (about 1 %) or that is lost to fragmentation."""


def usable_gib(memory_gib: float) -> float:
    """GiB of a GPU's memory that a program's arrays may use."""
    return memory_gib * (1 - LOST_SHARE) - CONTEXT_GIB - NCCL_GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One model of GPU."""

    description: str
    """Name as the driver reports it."""
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
    """Shared memory per multiprocessor; a block may use all but 1 KiB of it."""
    l2_mib: float
    """Level-2 cache."""
    clock_ghz: float
    """Boost clock."""
    links: int
    """NVLink connections."""
    per_node: int = 8
    """Default number of GPUs that NVLink connects."""

    @property
    def usable_gib(self) -> float:
        """GiB for a program's arrays: memory less CONTEXT_GIB, NCCL_GIB and LOST_SHARE."""
        return usable_gib(self.memory_gib)

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text, for `get_topology_desc(target_config=...)`."""
        major, minor = self.capability
        cuda = (12, 9, 0)
        # From Hopper on, kernels use "accelerated" instructions (wgmma, tcgen05), which run on one architecture only.
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
    """A value of an enumeration: written without quotes."""


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
"""Equal for compute capabilities 8.0 to 10.0 (CUDA C++ Programming Guide, "Technical Specifications")."""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _proto(fields: dict, indent: str = "") -> str:
    """Nested dicts as protocol-buffer text."""
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
    """A number of GPUs of one kind, in nodes."""

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
        """For `get_topology_desc`: NVLink domains (nodes) x hosts of a domain x GPUs of a host."""
        return f"{self.nodes}x1x{min(self.devices, self.per_node)}"


def read_cluster(
    text: str | None, per_node: int | None = None, described: Mapping[str, int] = NO_OTHERS
) -> tuple[Cluster | None, list[Problem]]:
    """ "h100:128" -> 128 GPUs in nodes of `per_node`; "h100" is one node. None and problems for other text.

    per_node: None for the GPU's default; described: further devices, name -> default.
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


PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def missing_packages() -> list[str]:
    """What deviceless compilation needs and is not installed: the compiler for GPUs, cuDNN."""
    plugin = any(_installed(name) for name in PLUGINS)
    needed = (("the CUDA plugin of jax", plugin), ("cuDNN", _installed("nvidia.cudnn")))
    return [name for name, installed in needed if not installed]


def prepare() -> None:
    """Set what jax reads at import for deviceless compilation. Raises UserError if the extra aot is not installed."""
    missing = missing_packages()
    if missing:
        raise UserError(
            f"compiling for virtual GPU devices needs {' and '.join(missing)}: install the extra aot with\n"
            "  uv sync --extra aot\nor\n  pip install 'megajax[aot]'"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"  # otherwise jax prints a long report that it finds no GPU
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def virtual_devices(cluster: Cluster) -> list[Any]:
    """jax devices of a cluster that programs can be compiled for, node by node. Call `prepare` before importing jax."""
    topology = resolve("jax.experimental.topologies:get_topology_desc")(
        topology_name=cluster.name,
        platform="cuda",
        target_config=cluster.gpu.target_config(),
        topology=cluster.topology(),
    )
    return list(topology.devices[: cluster.devices])


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False
