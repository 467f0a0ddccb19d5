"""Measures what the planner's cost model takes for known, on the devices of this host, into a file it reads.

Run:  python benchmarks/calibrate.py [--out=FILE] [--tiny] [--devices=cpu:8]
Then: python -m megajax.plan --config=FILE --devices=h100:128 --formula --calibration=FILE

Matmuls by size in bfloat16 (and fp8, where the device has it), from which come the share of the peak that large ones
reach and the size at which half of that is lost; a stream through memory; causal attention forward and backward; and,
with several local devices, an all-gather large and small. Shares are of data sheets (megajax/planning/costs.py). On a
device that is not known there, the rates measured stand for its peaks: add `network` to plan with it by --device-file.
--tiny: sizes for a CPU, to see that it runs. FILE is benchmarks/results/calibration.json unless given.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import outcome

from megajax.config.command_line import use_devices
from megajax.planning.costs import DEVICES, Device
from megajax.planning.devices import GPUS

SIZES = tuple(
    (rows, contracted, columns)
    for rows in (1024, 4096, 8192)
    for contracted in (512, 2048, 8192)
    for columns in (512, 2048, 8192)
)
TINY = ((32, 32, 32), (64, 64, 64), (128, 64, 128), (128, 128, 128))
HALVES = tuple(range(8, 513, 8))
"""Candidates for `matmul_half`."""


def seconds_of(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call that returns arrays."""
    import jax

    jax.block_until_ready(call())
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - started)
    return median(found)


def fit(readings: list[tuple[tuple[int, ...], float]], halves: tuple[int, ...] = HALVES) -> tuple[float, float]:
    """(rate of large matmuls, matmul_half) that fit readings of (sizes, operations per second) best, in logarithms."""
    best = (math.inf, 0.0, 0.0)
    for half in halves:
        logs = [math.log(rate) - sum(math.log(n / (n + half)) for n in sizes) for sizes, rate in readings]
        mean = sum(logs) / len(logs)
        best = min(best, (sum((one - mean) ** 2 for one in logs), math.exp(mean), float(half)))
    return best[1], best[2]


def matmuls(sizes: tuple[tuple[int, int, int], ...], dtype: Any, repeats: int) -> list[tuple[tuple[int, ...], float]]:
    """(sizes, operations per second) of each."""
    import jax
    import jax.numpy as jnp

    found = []
    for rows, contracted, columns in sizes:
        a, b = jnp.ones((rows, contracted), dtype), jnp.ones((contracted, columns), dtype)
        product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.bfloat16))
        seconds = seconds_of(lambda: product(a, b), repeats)  # noqa: B023
        found.append(((rows, contracted, columns), 2 * rows * contracted * columns / seconds))
    return found


def stream(size: int, repeats: int) -> float:
    """Bytes per second of an update that reads two arrays of float32 and writes one."""
    import jax
    import jax.numpy as jnp

    x, y = jnp.ones(size, jnp.float32), jnp.ones(size, jnp.float32)
    update = jax.jit(lambda x, y: 0.9 * x + 0.1 * y)
    return 12 * size / seconds_of(lambda: update(x, y), repeats)


def attention(length: int, heads: int, repeats: int, *, fused: bool) -> tuple[float, float]:
    """Operations per second forward and backward, of scores that a causal mask leaves."""
    import jax
    import jax.numpy as jnp

    size = 128
    q = jnp.ones((1, length, heads, size), jnp.bfloat16)

    def mixed(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")

    forward = jax.jit(mixed)
    both = jax.jit(jax.grad(lambda q, k, v: mixed(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    once = 2 * length * length * heads * size
    first = seconds_of(lambda: forward(q, q, q), repeats)
    second = max(seconds_of(lambda: both(q, q, q), repeats) - first, 1e-9)
    return once / first, 2.5 * once / second


def all_gather(size: int, repeats: int) -> float:
    """Seconds of one over all local devices, of `size` bytes in all."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.local_device_count(),), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, whole = NamedSharding(mesh, PartitionSpec("devices")), NamedSharding(mesh, PartitionSpec())
    count = max(1, size // 2 // mesh.size) * mesh.size
    x = jax.device_put(jnp.ones(count, jnp.bfloat16), spread)
    gather = jax.jit(lambda x: x, out_shardings=whole)
    return seconds_of(lambda: gather(x), repeats)


def known(kind: str) -> Device | None:
    """The device of that `device_kind`."""
    return next((DEVICES[name] for name, gpu in GPUS.items() if gpu.description == kind), None)


def measure(*, tiny: bool) -> dict[str, Any]:
    """{"constants": fields of costs.Device, "readings": what they were made from}."""
    import jax
    import jax.numpy as jnp

    first = jax.local_devices()[0]
    own, repeats = known(first.device_kind), 3 if tiny else 20
    readings: dict[str, Any] = {"device": first.device_kind, "local_devices": jax.local_device_count()}
    found = matmuls(TINY if tiny else SIZES, jnp.bfloat16, repeats)
    rate, half = fit(found)
    readings["matmul"] = [{"sizes": list(sizes), "rate": speed} for sizes, speed in found]
    moved = stream(2**16 if tiny else 2**28, repeats)
    fused = first.platform == "gpu"
    forward, backward = attention(256 if tiny else 8192, 1 if tiny else 16, repeats, fused=fused)
    readings |= {"stream": moved, "attention_forward": forward, "attention_backward": backward}
    constants: dict[str, Any] = {"matmul_half": half}
    if own is None:
        constants |= {"name": first.platform, "peak": rate, "matmul": 1.0, "bandwidth": moved, "stream": 1.0}
        constants |= {"attention_forward": forward / rate, "attention_backward": backward / rate}
    else:
        constants |= {"name": own.name, "matmul": rate / own.peak, "stream": moved / own.bandwidth}
        constants |= {"attention_forward": forward / own.peak, "attention_backward": backward / own.peak}
    if own is not None and own.peak_fp8 is not None:
        eight = matmuls(TINY if tiny else SIZES, jnp.float8_e4m3fn, repeats)
        constants["matmul_fp8"] = fit(eight, (int(half),))[0] / own.peak_fp8
        readings["matmul_fp8"] = [{"sizes": list(sizes), "rate": speed} for sizes, speed in eight]
    count = jax.local_device_count()
    if count > 1:
        size = 2**20 if tiny else 2**30
        large, small = all_gather(size, repeats), all_gather(2 * count, repeats)
        speed = size * (count - 1) / count / max(large - small, 1e-9)
        readings |= {"all_gather_bytes": size, "all_gather_seconds": large, "all_gather_smallest_seconds": small}
        constants |= {"launch": small} | ({"nvlink": speed} if own is None else {"nvlink_share": speed / own.nvlink})
    return {"constants": {name: _rounded(value) for name, value in constants.items()}, "readings": readings}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=outcome.RESULTS / "calibration.json")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--devices")
    given = parser.parse_args(argv)
    use_devices(given.devices)
    found = measure(tiny=given.tiny)
    outcome.write_to(given.out, found)
    for name, value in found["constants"].items():
        print(f"{name:20} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
