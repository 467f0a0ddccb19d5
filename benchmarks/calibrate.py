"""Measures the constants of the planner's cost model on the devices of this host.

Run:  python benchmarks/calibrate.py [--out=FILE] [--tiny] [--seconds=0.1] [--devices=cpu:8]
Then: python -m megajax.plan --config=FILE --devices=h100:128 --formula --calibration=FILE

Measures:
- matmuls of several sizes in bfloat16, and in fp8 if supported. They give the share of the peak that large matmuls
  reach, and the size that reaches half of that share;
- a stream through memory;
- causal attention, forward and backward;
- with several local devices, a large and a small all-gather.

Inputs are random numbers, because a GPU runs up to 13 % faster on zeros or ones, which need less power. The host waits
once per group of calls. Each call computes several products of different inputs, so that launch overhead does not count
as the time of a small matmul. Shares are relative to data sheets (planning/virtual_devices.py). For a device that is
not listed there, the measured rates replace its peaks; add `network` to plan with it by --device-file.
--seconds: duration of the timed calls for each figure. --tiny: sizes for a CPU, for a quick test. The default of --out
is benchmarks/results/calibration.json; it is written after each kind of measurement.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import outcome
from stopwatch import readings_in

from megajax.command_line.parser import use_devices
from megajax.mesh.xla import FP8, GPU, compiler_options
from megajax.planning.virtual_devices import GPUS, Device

SIZES = (
    *((rows, contracted, columns) for rows in (1024, 8192) for contracted in (1024, 8192) for columns in (1024, 8192)),
    *((8192, 512, 8192), (8192, 8192, 512), (8192, 2048, 8192), (8192, 4096, 14336)),
)
SIZES_FP8 = tuple(sizes for sizes in SIZES if min(sizes) >= 2048)
TINY = ((32, 32, 32), (64, 64, 64), (128, 64, 128), (128, 128, 128))
HALVES = tuple(range(8, 513, 8))
"""Candidates for `matmul_half`."""
PAIRS = 4
"""Products of one call, each of operands of its own: with the same ones it would be one product."""


def seconds_of(call: Callable[[], Any], seconds: float) -> float:
    """Median time of a call that returns arrays: of groups of calls enqueued one after another and waited for once."""
    import jax

    jax.block_until_ready(call())  # compiles
    return readings_in(call, jax.block_until_ready, seconds=seconds).median


def random(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Normally distributed."""
    import jax
    import jax.numpy as jnp

    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def fit(readings: list[tuple[tuple[int, ...], float]], halves: tuple[int, ...] = HALVES) -> tuple[float, float]:
    """(rate of large matmuls, matmul_half) that fit readings of (sizes, operations per second) best, in logarithms."""
    best = (math.inf, 0.0, 0.0)
    for half in halves:
        logs = [math.log(rate) - sum(math.log(n / (n + half)) for n in sizes) for sizes, rate in readings]
        mean = sum(logs) / len(logs)
        best = min(best, (sum((log - mean) ** 2 for log in logs), math.exp(mean), float(half)))
    return best[1], best[2]


def matmuls(sizes: tuple[tuple[int, int, int], ...], seconds: float) -> list[tuple[tuple[int, ...], float]]:
    """(sizes, operations per second) of each, in bfloat16."""
    import jax
    import jax.numpy as jnp

    def products(pairs: list[tuple[Any, Any]]) -> list[Any]:
        return [jnp.matmul(a, b) for a, b in pairs]

    samples = []
    for rows, contracted, columns in sizes:
        pairs = [
            (random(2 * n, (rows, contracted), jnp.bfloat16), random(2 * n + 1, (contracted, columns), jnp.bfloat16))
            for n in range(PAIRS)
        ]
        product_seconds = seconds_of(partial(jax.jit(products), pairs), seconds) / PAIRS
        samples.append(((rows, contracted, columns), 2 * rows * contracted * columns / product_seconds))
    return samples


def matmuls_fp8(sizes: tuple[tuple[int, int, int], ...], seconds: float) -> list[tuple[tuple[int, ...], float]]:
    """(sizes, operations per second) of each, of operands that are in 8 bits already: written as layers write them, so
    that the compiler takes the kernel it takes for them."""
    import jax
    import jax.numpy as jnp

    from megajax.precision.fp8 import product, quantize

    def products(pairs: list[tuple[Any, Any]]) -> list[Any]:
        return [product(("bd", "df", "bf"), a, b, dtype=jnp.dtype(jnp.bfloat16), precision=fast) for a, b in pairs]

    options, fast = compiler_options(*GPU, *FP8), jax.lax.Precision.DEFAULT
    small = jax.jit(lambda x: quantize(x, jnp.dtype(jnp.float8_e4m3fn)))
    samples = []
    for rows, contracted, columns in sizes:
        shapes = ((rows, contracted), (contracted, columns))
        pairs = [
            tuple(small(random(2 * n + place, shape, jnp.bfloat16)) for place, shape in enumerate(shapes))
            for n in range(PAIRS)
        ]
        product_seconds = seconds_of(partial(jax.jit(products, compiler_options=options), pairs), seconds) / PAIRS
        samples.append(((rows, contracted, columns), 2 * rows * contracted * columns / product_seconds))
    return samples


def stream(size: int, seconds: float) -> float:
    """Bytes per second of an update that reads two arrays of float32 and writes one."""
    import jax
    import jax.numpy as jnp

    x, y = random(0, (size,), jnp.float32), random(1, (size,), jnp.float32)
    return 12 * size / seconds_of(partial(jax.jit(lambda x, y: 0.9 * x + 0.1 * y), x, y), seconds)


def attention(length: int, heads: int, seconds: float) -> tuple[float, float]:
    """Operations per second forward and backward, of scores that a causal mask leaves: of the fastest kernel."""
    import jax
    import jax.numpy as jnp
    from kernel_cases import AttentionCase, with_gradients

    from megajax.kernels.attention.attention import local_device
    from megajax.kernels.attention.capability import choose

    auto_case = AttentionCase(1, length, heads, heads, 128, kernel="auto")
    case = auto_case._replace(kernel=choose("auto", auto_case.request(), local_device()).kernel).case()
    dout, *inputs = (random(seed, (1, length, heads, 128), jnp.bfloat16) for seed in range(4))
    first = seconds_of(partial(jax.jit(case.call), *inputs), seconds)
    second = max(seconds_of(partial(jax.jit(with_gradients(case.call)), dout, *inputs), seconds) - first, 1e-9)
    return case.flops[0] / first, (case.flops[1] - case.flops[0]) / second


def all_gather(size: int, seconds: float) -> float:
    """Seconds of one over all local devices, of `size` bytes in all."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.local_device_count(),), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("devices")), NamedSharding(mesh, PartitionSpec())
    count = max(1, size // 2 // mesh.size) * mesh.size
    x = jax.device_put(random(0, (count,), jnp.bfloat16), sharded)
    return seconds_of(partial(jax.jit(lambda x: x, out_shardings=replicated), x), seconds)


def device_of_kind(kind: str) -> Device | None:
    """The device of that `device_kind`."""
    return next((gpu for gpu in GPUS.values() if gpu.description == kind), None)


def measure(*, tiny: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """{"constants": fields of costs.Device, "readings": what they were made from}, again after each kind of figure."""
    import jax

    first, count = jax.local_devices()[0], jax.local_device_count()
    device = device_of_kind(first.device_kind)
    readings: dict[str, Any] = {"device": first.device_kind, "local_devices": count}
    samples = matmuls(TINY if tiny else SIZES, seconds)
    rate, half = fit(samples)
    readings["matmul"] = [{"sizes": list(sizes), "rate": speed} for sizes, speed in samples]
    # Shares of a device that is not known are of what was measured.
    peak, bandwidth, constants = rate, None, {"name": first.platform, "matmul_half": half, "peak": rate}
    if device is not None:
        peak, bandwidth, constants = device.peak, device.bandwidth, {"name": device.name, "matmul_half": half}
    constants["matmul"] = rate / peak
    yield as_sample(constants, readings)
    readings["stream"] = moved = stream(2**16 if tiny else 2**28, seconds)
    constants |= {"bandwidth": moved} if bandwidth is None else {}
    constants["stream"] = moved / (bandwidth or moved)
    yield as_sample(constants, readings)
    shape = (256, 1) if tiny else (8192, 16)
    forward, backward = attention(*shape, seconds)
    readings |= {"attention_forward": forward, "attention_backward": backward}
    constants |= {"attention_forward": forward / peak, "attention_backward": backward / peak}
    yield as_sample(constants, readings)
    eight = matmuls_fp8(TINY[:1] if tiny else SIZES_FP8, seconds) if tiny or (device and device.peak_fp8) else []
    readings["matmul_fp8"] = [{"sizes": list(sizes), "rate": speed} for sizes, speed in eight]
    if device is not None and device.peak_fp8 is not None:
        constants["matmul_fp8"] = fit(eight, (int(half),))[0] / device.peak_fp8
    if count > 1:
        size = 2**20 if tiny else 2**30
        large, small = all_gather(size, seconds), all_gather(2 * count, seconds)
        speed = size * (count - 1) / count / max(large - small, 1e-9)
        readings |= {"all_gather_bytes": size, "all_gather_seconds": large, "all_gather_smallest_seconds": small}
        constants |= {"launch": small} | (
            {"nvlink": speed} if device is None else {"nvlink_share": speed / device.nvlink}
        )
    yield as_sample(constants, readings)


def as_sample(constants: dict[str, Any], readings: dict[str, Any]) -> dict[str, Any]:
    """As they are written down."""
    return {"constants": {name: _rounded(value) for name, value in constants.items()}, "readings": dict(readings)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=outcome.RESULTS / "calibration.json")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--devices")
    arguments = parser.parse_args(argv)
    use_devices(arguments.devices)
    for sample in measure(tiny=arguments.tiny, seconds=arguments.seconds):
        outcome.write_to(arguments.out, sample, announce=False)
    for name, value in sample["constants"].items():
        print(f"{name:20} {value}")
    print(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
