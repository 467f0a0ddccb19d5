"""Facts of GPUs and links: for the compiler, for the memory of a plan, and the constants of the cost model.

Sources of the numbers: NVIDIA's data sheets and architecture white papers (A100: DS-10031, "NVIDIA A100 Tensor Core GPU
Architecture"; H100 and H200 SXM: "NVIDIA H100 Tensor Core GPU Architecture" and the H200 data sheet; B200 and GB200:
"NVIDIA Blackwell Architecture Technical Brief", the DGX B200 and the GB200 NVL72 data sheets; B300 and GB300: the HGX
B300 and the GB300 NVL72 data sheets, ConnectX-8 at 800 Gbit/s; H20: its data sheet) and, for what is common
to a compute capability, the table in the CUDA C++ Programming Guide. Rates of NVLink and ConnectX are of one direction.

The shares of these rates that programs achieve come from the measurements named beside them, or are fitted to published
runs: benchmarks/planning/held_out.py says which, and to which runs nothing was fitted. `python -m benchmarks calibrate`
measures them on hardware at hand; `read_device` reads its file.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megajax.config.bounds import Count, Positive
from megajax.config.class_references import resolve
from megajax.config.compose import assemble
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.hints import did_you_mean
from megajax.config.optional_packages import install
from megajax.config.yaml_and_json import parse

GIB, MIB, KIB = 2**30, 2**20, 2**10

DRIVER_SHARE = 0.01
"""Fraction of the data sheet's memory that CUDA does not report: 139.8 of 141 GiB are there on an H200."""
CUDNN = (9, 28, 0)
"""Version of cuDNN that virtual devices have."""
OVERHEAD = 1.1
"""Factor on the time of matmuls and of memory-bound kernels of our programs: between that of MaxText, 1.0, and that of
other programs outside of NVIDIA's tuned stack, 1.23 (benchmarks/planning/systems.py); assumed, because no step has been
timed."""
MOST_DEVICES = 16_384
"""Largest cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU and its links, as the cost model sees them. Rates in operations or bytes per second."""

    name: str
    memory_gib: Positive
    """Memory by the data sheet."""
    bandwidth: Positive
    """Bandwidth of device memory."""
    peak: Positive
    """Rate of dense bfloat16 or float16 matmuls."""
    nvlink: Positive
    """Bandwidth to other devices of the node, one direction."""
    network: Positive
    """Bandwidth to other nodes, one direction, each device's share."""
    peak_fp8: Positive | None = None
    """Rate of dense fp8 matmuls; None: not supported."""
    peak_fp4: Positive | None = None
    """Rate of dense matmuls in NVFP4; None: no matmuls of numbers in blocks, which are then multiplied in bfloat16."""
    peak_float32: Positive | None = None
    """Rate of float32 matmuls without TF32; None: a thirtieth of `peak`."""
    per_node: Count = 8
    """Devices that NVLink connects, unless said otherwise."""
    matmul: Positive = 0.75
    """Share of `peak` that large matmuls reach."""
    matmul_fp8: Positive = 0.70
    """Share of `peak_fp8` that large matmuls reach, without the casts."""
    matmul_fp4: Positive = 0.50
    """Share of `peak_fp4` that large matmuls reach, without the casts."""
    matmul_codes: Positive = 0.37
    """The same of megajax's kernels of codes, of their format's peak. Assumed, because no run has timed them: cells of
    128 x 128 read a byte from the L2 cache for each 128 operations, and that of an H100 gives about 6 TB/s."""
    matmul_half: Positive = 64.0
    """Size of a dimension at which a matmul has half the rate of a large one; see `matmul_share`."""
    scan: Positive = 0.15
    """Share of the rates of matmuls and memory that the scans of state spaces reach, in several kernels a layer."""
    attention_forward: Positive = 0.60
    """Share of `peak` that a fused causal attention reaches, operations on masked scores not counted."""
    attention_backward: Positive = 0.50
    """Share of `peak` that its backward pass reaches, which has five matmuls instead of two."""
    stream: Positive = 0.80
    """Share of `bandwidth` that norms, activations and the optimizer reach."""
    nvlink_share: Positive = 0.75
    """Share of `nvlink` that a ring reaches."""
    network_share: Positive = 0.85
    """Share of `network` that a ring reaches."""
    nvlink_latency: Positive = 4e-6
    """Seconds of one hop within a node, a collective's start included."""
    network_latency: Positive = 12e-6
    """Seconds of one hop between nodes."""
    launch: Positive = 12e-6
    """Seconds that any collective takes at least."""
    contention: Positive = 0.12
    """Share of the time of hidden collectives by which the kernels beside them are slower: NCCL takes multiprocessors
    and bandwidth. Published scaling series have 0.10 to 0.15."""
    straggling: Positive = 0.0075
    """Share of a step that waiting for the slowest device adds, for each doubling of the nodes: the median of published
    scaling series."""
    power: Positive = 1.0
    """Power limit over that of the data sheet. Matmuls are limited by it, at the same energy per operation."""
    host: Positive = 50e9
    """To or from host memory, bytes/s that large copies reach: PCIe 5.0 x16 unless given (64 GB/s by its standard)."""

    def usable_gib(self, memory_fraction: float) -> float:
        """Memory that a run reserves for arrays. memory_fraction: as `xla.memory_fraction`."""
        return self.memory_gib * (1 - DRIVER_SHARE) * memory_fraction

    def peak_of(self, compute: str) -> float:
        """Operations per second of matmuls in bfloat16, float16, float32 or a recipe's format, by the data sheet.

        Raises UserError where it has no fp8 matmuls. Numbers in blocks are multiplied in bfloat16 where it has none.
        """
        if compute == "fp8" and self.peak_fp8 is None:
            raise UserError(f"{self.name} has no fp8 matmuls.\nPlan for bfloat16, or for another device.")
        peaks = {"fp8": self.peak_fp8, "fp4": self.peak_fp4, "float32": self.peak_float32 or self.peak / 30}
        return peaks.get(self.multiplied(compute)) or self.peak

    def multiplied(self, compute: str) -> str:
        """What the tensor cores multiply: fp8 and fp4 for mxfp8 and nvfp4, or bfloat16 without matmuls of blocks.

        fp8_blocks are fp8 wherever there is fp8: Hopper has a kernel of their codes.
        """
        if compute == "fp8_blocks":
            return "bfloat16" if self.peak_fp8 is None else "fp8"
        in_blocks = {"mxfp8": "fp8", "nvfp4": "fp4"}.get(compute)
        return compute if in_blocks is None else in_blocks if self.peak_fp4 is not None else "bfloat16"

    def matmul_rate(self, compute: str, *, codes: bool = False) -> float:
        """Operations per second of large matmuls; codes: of a kernel of codes."""
        shares = {"fp8": self.matmul_fp8, "fp4": self.matmul_fp4}
        share = self.matmul_codes if codes else shares.get(self.multiplied(compute), self.matmul)
        return self.peak_of(compute) * share * self.power

    @property
    def memory_rate(self) -> float:
        """Bytes per second that memory-bound kernels reach."""
        return self.bandwidth * self.stream

    def attention_rate(self, backward: bool) -> float:
        """Operations per second of a fused attention's forward or backward pass."""
        return self.peak * (self.attention_backward if backward else self.attention_forward)

    def matmul_seconds(
        self, compute: str, sizes: tuple[float, float, float], matmuls: float = 1, *, codes: bool = False
    ) -> float:
        """Seconds of the operations of matmuls of these sizes: rows, contracted, columns."""
        return 2 * matmuls * prod(sizes) / (self.matmul_rate(compute, codes=codes) * self.matmul_share(*sizes))

    def matmul_share(self, *sizes: float) -> float:
        """Rate of a matmul of these sizes (rows, contracted, columns) over that of a large one.

        n / (n + matmul_half) for each dimension: the costs of partial tiles, and of filling and draining pipelines,
        do not depend on the size.
        """
        return prod(size / (size + self.matmul_half) for size in sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU(Device):
    """One model of GPU, as the compiler knows it too."""

    description: str
    """Name as the driver reports it."""
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """float32 units per multiprocessor."""
    capability: tuple[int, int]
    shared_kib: int
    """Shared memory per multiprocessor; a block may use all but 1 KiB of it."""
    l2_mib: float
    clock_ghz: float
    links: int
    """NVLink connections."""
    watts: int
    """Power limit by the data sheet."""

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text, for `get_topology_desc(target_config=...)`.

        What is common to compute capabilities 8.0 to 10.0 is from the CUDA C++ Programming Guide, "Technical
        Specifications".
        """
        # From Hopper on, kernels use "accelerated" instructions (wgmma, tcgen05), which run on one architecture only.
        extension = "ACCELERATED_FEATURES" if self.capability[0] >= 9 else "NONE"
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {self.shared_kib * KIB}
  shared_memory_per_block_optin: {(self.shared_kib - 1) * KIB}
  registers_per_core_limit: {64 * KIB}
  registers_per_block_limit: {64 * KIB}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  collective_memory_granularity: {2 * MIB}
  device_vendor: "NVIDIA Corporation"
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  memory_bandwidth: {round(self.bandwidth)}
  l2_cache_size: {round(self.l2_mib * MIB)}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {round(self.memory_gib * GIB)}
  cuda_compute_capability {{
    major: {self.capability[0]}
    minor: {self.capability[1]}
    feature_extension: {extension}
  }}
  name: "{self.description}"
  device_interconnect_info {{
    active_links: {self.links}
  }}
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "{".".join(map(str, CUDNN))}"
}}
platform_name: "CUDA"
dnn_version_info {{
  major: {CUDNN[0]}
  minor: {CUDNN[1]}
  patch: {CUDNN[2]}
}}
device_description_str: "{self.description}"
"""


_AMPERE: dict[str, Any] = {
    "cores": 108, "lanes": 64, "capability": (8, 0), "shared_kib": 164, "l2_mib": 40, "clock_ghz": 1.41, "links": 12,
    "peak": 312e12, "peak_float32": 19.5e12, "nvlink": 300e9, "network": 25e9, "watts": 400,
    # Power does not limit it as it does later generations: cuBLAS on large matmuls, about 260 of 312 TFLOP/s.
    "matmul": 0.83,
    # FlashAttention-2 (Dao 2023, figures 4 to 6): 190 to 200 TFLOP/s forward, 170 to 180 both.
    "attention_forward": 0.60, "attention_backward": 0.52,
    "host": 25e9,  # PCIe 4.0 x16: 32 GB/s by its standard
}  # fmt: skip
_HOPPER: dict[str, Any] = {
    "cores": 132, "lanes": 128, "capability": (9, 0), "shared_kib": 228, "l2_mib": 50, "clock_ghz": 1.98, "links": 18,
    "peak": 989.4e12, "peak_fp8": 1978.9e12, "peak_float32": 67e12, "nvlink": 450e9, "network": 50e9, "watts": 700,
    "matmul": 0.677, "matmul_fp8": 0.645,  # fitted
    # cuDNN on an H100, 2 rows of 4096 tokens, 32 heads of 128, forward: 0.453 ms (AXLearn's benchmark), 0.61 of the
    # peak; FlashAttention-3 (Shah et al. 2024, figure 6), backward: 450 to 560 TFLOP/s.
    "attention_forward": 0.60, "attention_backward": 0.50,
}  # fmt: skip
_BLACKWELL: dict[str, Any] = {
    "cores": 148, "lanes": 128, "capability": (10, 0), "shared_kib": 228, "l2_mib": 126, "clock_ghz": 1.965,
    "links": 18, "peak_float32": 75e12, "nvlink": 900e9,
    # At its power limit: published runs in bfloat16 and of long rows.
    "matmul": 0.54, "attention_forward": 0.52, "attention_backward": 0.39,
    "matmul_fp8": 0.559,  # fitted
}  # fmt: skip
# Twice the exponentials of Blackwell: attention reaches Hopper's shares.
_ULTRA: dict[str, Any] = _BLACKWELL | {
    "capability": (10, 3), "attention_forward": 0.60, "attention_backward": 0.50,
    "matmul_fp8": 0.70,  # fitted; above Blackwell's as the power limits are, 1400 W to 1000 W
}  # fmt: skip
# A Hopper with fewer and slower tensor cores.
_H20: dict[str, Any] = _HOPPER | {
    "cores": 78, "l2_mib": 60, "peak": 148e12, "peak_fp8": 296e12, "peak_float32": 44e12, "watts": 400,
    # Assumed, because no measurement is published: power does not limit its tensor cores.
    "matmul": 0.90, "matmul_fp8": 0.80, "attention_forward": 0.80, "attention_backward": 0.67,
}  # fmt: skip

GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(name="a100-40gb", description="NVIDIA A100-SXM4-40GB", memory_gib=40, bandwidth=1.555e12, **_AMPERE),
        GPU(name="a100-80gb", description="NVIDIA A100-SXM4-80GB", memory_gib=80, bandwidth=2.039e12, **_AMPERE),
        GPU(name="h100", description="NVIDIA H100 80GB HBM3", memory_gib=80, bandwidth=3.35e12, **_HOPPER),
        GPU(name="h200", description="NVIDIA H200", memory_gib=141, bandwidth=4.8e12, **_HOPPER),
        GPU(name="b200", description="NVIDIA B200", memory_gib=180, bandwidth=8e12, peak=2250e12, peak_fp8=4500e12,
            peak_fp4=9000e12, network=50e9, watts=1000, **_BLACKWELL),
        # The same chip with a higher power limit; NVLink-C2C to the host: 900 GB/s of two GPUs, both directions.
        GPU(name="gb200", description="NVIDIA GB200", memory_gib=186, bandwidth=8e12, peak=2450e12, peak_fp8=4900e12,
            peak_fp4=9800e12, network=50e9, watts=1200, host=200e9, per_node=72, **_BLACKWELL),
        # Blackwell Ultra: more memory, the same rates of bfloat16 and fp8, a higher one of fp4, ConnectX-8.
        GPU(name="b300", description="NVIDIA B300 SXM6 AC", memory_gib=270, bandwidth=7.7e12, peak=2250e12,
            peak_fp8=4500e12, peak_fp4=13_500e12, network=100e9, watts=1100, **_ULTRA),
        GPU(name="gb300", description="NVIDIA GB300", memory_gib=279, bandwidth=8e12, peak=2500e12, peak_fp8=5000e12,
            peak_fp4=15_000e12, network=100e9, watts=1400, host=200e9, per_node=72, **_ULTRA),
        GPU(name="h20", description="NVIDIA H20", memory_gib=96, bandwidth=4e12, **_H20),
    )
}  # fmt: skip


def gpu_of(kind: str) -> GPU:
    """The GPU of a jax device's `device_kind`; an H100 for unknown ones, because ratios of times differ little."""
    known = [name for name in GPUS if all(word in kind.lower() for word in name.split("-"))]
    return GPUS[max(known, key=len, default="h100")]


OTHER_NAMES = {"a100": "a100-80gb"}

REQUIRED = ("name", "memory_gib", "bandwidth", "peak", "nvlink", "network")
"""Keys of a YAML file that describes a device, in GiB, bytes/s and operations/s."""


def read_device(path: Path, base: Device | None = None) -> Device:
    """The device that a YAML file describes; over `base`, the constants that `python -m benchmarks calibrate` measured.

    Raises UserError with everything that is missing or wrong, and for constants of another device than `base`.
    """
    try:
        tree = parse(path, str(path))
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    tree = tree.get("figures", tree).get("constants", tree)  # of a calibration
    if base is not None and (name := tree.get("name", base.name)) != base.name:
        raise UserError(
            f"{path} was measured on {name}, the plan is for {base.name}.\n"
            f"Plan for {name}, or give a file measured on {base.name}."
        )
    device, problems = assemble(type(base) if base else Device, base, tree)
    if problems:
        keys = f"A device needs {', '.join(REQUIRED)}, in GiB, bytes/s and operations/s: see docs/planning.md"
        raise UserError(f"{ConfigError(problems, str(path))}\n{keys}")
    return device


class Cluster(NamedTuple):
    """A number of GPUs of one kind, in nodes."""

    device: Device
    devices: int
    per_node: int

    @property
    def gpu(self) -> GPU:
        """The compiler's description of the device. Raises UserError for a device from --device-file."""
        if self.device.name not in GPUS:
            raise UserError(
                f"{self.device.name} is described in --device-file, which the compiler can't use: give --formula"
            )
        return GPUS[self.device.name]

    def topology(self) -> str:
        """For `get_topology_desc`: NVLink domains (nodes) x hosts of a domain x GPUs of a host."""
        return f"{-(-self.devices // self.per_node)}x1x{min(self.devices, self.per_node)}"


def read_cluster(
    text: str | None, per_node: int | None = None, described: Device | None = None
) -> tuple[Cluster | None, list[Problem]]:
    """ "h100:128" -> 128 GPUs in nodes of `per_node`; "h100" is one node. None and a problem for other text.

    per_node: None for the GPU's default; described: a further device.
    """
    gpus = GPUS | ({} if described is None else {described.name.lower(): described})
    names = ", ".join([*OTHER_NAMES, *gpus])

    def problem(message: str, hint: str = "") -> tuple[None, list[Problem]]:
        return None, [Problem("--devices", message, hint)]

    if text is None:
        return problem("must be given", f"GPU:N, e.g. h100:128; known: {names}")
    device_name, colon, count = text.partition(":")
    name = OTHER_NAMES.get(device_name.lower(), device_name.lower())
    if name not in gpus:
        suggestion = _meant(text.lower(), [*gpus, *OTHER_NAMES]) or did_you_mean(name, gpus)
        hint = f"any other one: --formula --device-file=FILE, YAML with {', '.join(REQUIRED)}"
        hints = [suggestion] * bool(suggestion) + [f"known: {names}", hint]
        return problem(f"unknown device {device_name!r}", "; ".join(hints))
    if colon and not re.fullmatch(r"[1-9]\d{0,5}", count):
        return problem(f"expected GPU:N with N from 1 to 999999, got {text!r}")
    per_node = per_node or gpus[name].per_node
    devices = int(count) if colon else per_node
    if devices > MOST_DEVICES:
        return problem(
            f"{devices:,} devices asked for, plans are made for at most {MOST_DEVICES:,}",
            "more data parallelism hardly changes what a device holds and does",
        )
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        hint = f"give {below} or {below + per_node}, or another --gpus-per-node"
        return problem(f"{devices} GPUs don't fill nodes of {per_node}", hint)
    return Cluster(gpus[name], devices, per_node), []


def _meant(text: str, names: Iterable[str]) -> str:
    """A hint for GPUs in another order or with another separator, such as 8xh100; "" if the text names none."""
    name = max((name for name in names if name in text), key=len, default="")
    numbers = re.findall(r"(?<![a-z0-9])(?:x?)([1-9]\d*)(?![a-z0-9]*b)", text.replace(name, " ")) if name else []
    if len(numbers) == 1:
        return f"did you mean {name}:{numbers[0]}?"
    count = re.fullmatch(r"(?:(?:gpus?|cuda)[:x]?)?(\d*)", text)
    return "" if count is None else f"which GPUs? For example h100:{count[1] or 8}"


def missing_packages() -> list[str]:
    """Packages that deviceless compilation needs and that are not installed: the compiler for GPUs, cuDNN."""

    def installed(module: str) -> bool:
        with contextlib.suppress(ModuleNotFoundError):  # of the parent package
            return find_spec(module) is not None
        return False

    plugin = installed("jax_cuda12_plugin") or installed("jax_cuda13_plugin")
    return ["the CUDA plugin of jax"] * (not plugin) + ["cuDNN"] * (not installed("nvidia.cudnn"))


def prepare() -> None:
    """Set what jax reads at import for deviceless compilation. Raises UserError if the extra aot is not installed."""
    if missing := missing_packages():
        raise UserError(
            f"compiling for virtual GPU devices needs {' and '.join(missing)}. Install the extra aot: {install('aot')}"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"  # otherwise jax prints a long report that it finds no GPU
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def virtual_devices(cluster: Cluster) -> list[Any]:
    """jax devices of a cluster that programs can be compiled for, node by node. Call `prepare` before importing jax."""
    topology = resolve("jax.experimental.topologies:get_topology_desc")(
        topology_name=cluster.gpu.name,
        platform="cuda",
        target_config=cluster.gpu.target_config(),
        topology=cluster.topology(),
    )
    return list(topology.devices[: cluster.devices])
