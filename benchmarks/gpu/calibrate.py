"""The constants of the planner's cost model, measured on the devices of this host."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.kernels.attention import AttentionCase
from benchmarks.kernels.measure import with_gradients
from benchmarks.outcome import rounded
from benchmarks.stopwatch import readings_in
from megajax.kernels.attention.attention import local_device
from megajax.kernels.attention.capability import choose
from megajax.planning.compiled.devices import GPUS
from megajax.precision.fp8 import product, quantize
from megajax.precision.matmul import terms
from megajax.processes.xla_options import FP8, GPU, compiler_options

SIZES = (
    *((rows, contracted, columns) for rows in (1024, 8192) for contracted in (1024, 8192) for columns in (1024, 8192)),
    *((8192, 512, 8192), (8192, 8192, 512), (8192, 2048, 8192), (8192, 4096, 14336)),
)
SIZES_FP8 = tuple(sizes for sizes in SIZES if min(sizes) >= 2048)
TINY = ((32, 32, 32), (64, 64, 64), (128, 64, 128), (128, 128, 128))
HALVES = tuple(range(8, 513, 8))
"""Candidates for `matmul_half`."""
PAIRS = 4
"""Products of one call, each of different operands; equal ones would be computed once."""


def calibrate(*, tiny: bool = False, seconds: float = 0.1) -> Iterator[dict[str, Any]]:
    """The constants of the planner's cost model: matmuls, memory, attention, NVLink.

    Then: python -m megajax.plan --config=FILE --devices=h100:128 --formula --calibration=FILE

    Matmuls of several sizes in bfloat16, and in fp8 if supported, give the share of the peak that large matmuls reach,
    and the size that reaches half of that share. Also measured: a stream through memory; causal attention, forward and
    backward; and with several local devices, a large and a small all-gather. Inputs are random numbers, because a GPU
    is up to 13 % faster on zeros or ones, which need less power. Each call computes several products of different
    inputs, so that launch overhead does not count as the time of a small matmul. Shares are relative to data sheets
    (planning/compiled/devices.py). For a device that is not listed there, the measured rates replace its peaks; add
    `network` to plan with it by --device-file. --seconds: duration of the timed calls for each figure. --tiny: sizes
    for a CPU, for a quick test.
    """
    for figures in measure(tiny=tiny, seconds=seconds):
        yield figures
    for name, value in figures["constants"].items():
        print(f"{name:20} {value}")


def seconds_of(call: Callable[[], Any], seconds: float) -> float:
    """Median seconds of a call that returns arrays, after a first call that compiles."""
    jax.block_until_ready(call())
    return readings_in(call, jax.block_until_ready, seconds=seconds).median


def random(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Normally distributed numbers."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def fit(readings: list[tuple[tuple[int, ...], float]], halves: tuple[int, ...] = HALVES) -> tuple[float, float]:
    """(rate of large matmuls, matmul_half): the least-squares fit of (sizes, operations per second) in logarithms."""
    best = (math.inf, 0.0, 0.0)
    for half in halves:
        logs = [math.log(rate) - sum(math.log(n / (n + half)) for n in sizes) for sizes, rate in readings]
        mean = sum(logs) / len(logs)
        best = min(best, (sum((log - mean) ** 2 for log in logs), math.exp(mean), float(half)))
    return best[1], best[2]


type Readings = list[tuple[tuple[int, ...], float]]
"""(sizes, operations per second) of matmuls."""


def matmuls(sizes: tuple[tuple[int, int, int], ...], seconds: float) -> Readings:
    """In bfloat16."""
    return _matmuls(sizes, seconds, lambda x: x, jax.jit(lambda pairs: [jnp.matmul(a, b) for a, b in pairs]))


def matmuls_fp8(sizes: tuple[tuple[int, int, int], ...], seconds: float) -> Readings:
    """Of quantized operands, written as in layers, so that the compiler selects the same kernels."""

    def products(pairs: list[tuple[Any, Any]]) -> list[Any]:
        fast = jax.lax.Precision.DEFAULT
        return [product(terms("bd,df->bf"), a, b, dtype=jnp.dtype(jnp.bfloat16), precision=fast) for a, b in pairs]

    quantized = jax.jit(lambda x: quantize(x, jnp.dtype(jnp.float8_e4m3fn)))
    return _matmuls(sizes, seconds, quantized, jax.jit(products, compiler_options=compiler_options(*GPU, *FP8)))


def _matmuls(
    sizes: tuple[tuple[int, int, int], ...], seconds: float, operand: Callable, products: Callable
) -> Readings:
    samples = []
    for rows, contracted, columns in sizes:
        shapes = ((rows, contracted), (contracted, columns))
        pairs = [
            tuple(operand(random(2 * n + place, shape, jnp.bfloat16)) for place, shape in enumerate(shapes))
            for n in range(PAIRS)
        ]
        product_seconds = seconds_of(partial(products, pairs), seconds) / PAIRS
        samples.append(((rows, contracted, columns), 2 * rows * contracted * columns / product_seconds))
    return samples


def stream(size: int, seconds: float) -> float:
    """Bytes per second of an update that reads two arrays of float32 and writes one."""
    x, y = random(0, (size,), jnp.float32), random(1, (size,), jnp.float32)
    return 12 * size / seconds_of(partial(jax.jit(lambda x, y: 0.9 * x + 0.1 * y), x, y), seconds)


def attention(length: int, heads: int, seconds: float) -> tuple[float, float]:
    """Operations per second forward and backward of causal attention by the fastest kernel; masked scores excluded."""
    auto_case = AttentionCase(1, length, heads, heads, 128, kernel="auto")
    case = auto_case._replace(kernel=choose("auto", auto_case.request(), local_device()).kernel).case()
    dout, *inputs = (random(seed, (1, length, heads, 128), jnp.bfloat16) for seed in range(4))
    first = seconds_of(partial(jax.jit(case.call), *inputs), seconds)
    second = max(seconds_of(partial(jax.jit(with_gradients(case.call)), dout, *inputs), seconds) - first, 1e-9)
    return case.flops[0] / first, (case.flops[1] - case.flops[0]) / second


def all_gather(size: int, seconds: float) -> float:
    """Seconds of an all-gather of `size` bytes over all local devices."""
    mesh = jax.make_mesh((jax.local_device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("devices")), NamedSharding(mesh, PartitionSpec())
    count = max(1, size // 2 // mesh.size) * mesh.size
    x = jax.device_put(random(0, (count,), jnp.bfloat16), sharded)
    return seconds_of(partial(jax.jit(lambda x: x, out_shardings=replicated), x), seconds)


def measure(*, tiny: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """{"constants": fields of the cost model's Device, "readings": their origin}, after each kind of measurement."""
    first, count = jax.local_devices()[0], jax.local_device_count()
    device = next((gpu for gpu in GPUS.values() if gpu.description == first.device_kind), None)
    readings: dict[str, Any] = {"device": first.device_kind, "local_devices": count}
    samples = matmuls(TINY if tiny else SIZES, seconds)
    rate, half = fit(samples)
    readings["matmul"] = [{"sizes": list(sizes), "rate": speed} for sizes, speed in samples]
    # Shares of an unknown device are relative to the measured rates.
    peak, bandwidth, constants = rate, None, {"name": first.platform, "matmul_half": half, "peak": rate}
    if device is not None:
        peak, bandwidth, constants = device.peak, device.bandwidth, {"name": device.name, "matmul_half": half}
    constants["matmul"] = rate / peak
    yield {"constants": rounded(constants), "readings": readings}
    readings["stream"] = moved = stream(2**16 if tiny else 2**28, seconds)
    constants |= {"bandwidth": moved} if bandwidth is None else {}
    constants["stream"] = moved / (bandwidth or moved)
    forward, backward = attention(*((256, 1) if tiny else (8192, 16)), seconds)
    readings |= {"attention_forward": forward, "attention_backward": backward}
    constants |= {"attention_forward": forward / peak, "attention_backward": backward / peak}
    yield {"constants": rounded(constants), "readings": readings}
    eight = matmuls_fp8(TINY[:1] if tiny else SIZES_FP8, seconds) if tiny or (device and device.peak_fp8) else []
    readings["matmul_fp8"] = [{"sizes": list(sizes), "rate": speed} for sizes, speed in eight]
    if device is not None and device.peak_fp8 is not None:
        constants["matmul_fp8"] = fit(eight, (int(half),))[0] / device.peak_fp8
    if count > 1:
        size = 2**20 if tiny else 2**30
        large, small = all_gather(size, seconds), all_gather(2 * count, seconds)
        speed = size * (count - 1) / count / max(large - small, 1e-9)
        readings |= {"all_gather_bytes": size, "all_gather_seconds": large, "all_gather_smallest_seconds": small}
        constants |= {"launch": small}
        constants |= {"nvlink": speed} if device is None else {"nvlink_share": speed / device.nvlink}
    yield {"constants": rounded(constants), "readings": readings}
