"""One matmul of a layer and its gradients in 8 bits and in bfloat16: time and memory in one run.

Run:  python benchmarks/fp8.py                     on a GPU
      python benchmarks/fp8.py --deviceless=h100   compiles for a virtual GPU: memory and kernels, no times

  --tokens=N     rows of the activations (default 8192)
  --shapes=LIST  in x out of the weights (default: those of an 8B model, 4096x14336,14336x4096,4096x6144,4096x4096)
  --rounds=N     timed rounds of each, in alternation (default 20)

"8 bits" includes all operations of a train step: amax, scales and casts of all three tensors, and the transposes that
the compiler adds for the tensor cores. Rates count 6 x tokens x in x out operations. Writes
benchmarks/results/fp8.json, or fp8_deviceless.json.
"""

import argparse
import re
import statistics
import time
from collections import Counter
from typing import Any

import outcome

from megajax.config.builds import resolve
from megajax.mesh.xla import DEVICELESS, FP8, GPU, compiler_options
from megajax.precision.config import Fp8Config

SHAPES = "4096x14336,14336x4096,4096x6144,4096x4096"
EQUATION = "bd,df->bf"


def main() -> None:
    """Measure or compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--deviceless")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    device = virtual_device(arguments.deviceless) if arguments.deviceless else first_gpu()
    figures = []
    for shape in arguments.shapes.split(","):
        sides = tuple(int(side) for side in shape.split("x"))
        figures.append(compared(device, arguments.tokens, sides, 0 if arguments.deviceless else arguments.rounds))
        print(figures[-1], flush=True)
    name = "fp8_deviceless" if arguments.deviceless else "fp8"
    outcome.write(name, {"device": device.device_kind, "tokens": arguments.tokens, "matmuls": figures})


def virtual_device(name: str) -> Any:
    """A GPU to compile for."""
    resolve("megajax.planning.virtual_devices:prepare")()
    cluster, problems = resolve("megajax.planning.virtual_devices:read_cluster")(f"{name}:1")
    if problems:
        raise SystemExit("\n".join(map(str, problems)))
    return resolve("megajax.planning.virtual_devices:virtual_devices")(cluster)[0]


def first_gpu() -> Any:
    """The first GPU."""
    device = resolve("jax:devices")()[0]
    if device.platform != "gpu":
        raise SystemExit("no GPU found: use --deviceless=h100 for memory and kernels without times")
    resolve("megajax.precision.fp8:refuse_old")(device)
    return device


def compared(device: Any, tokens: int, sides: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Figures of both ways for x [tokens, in], weights [in, out]; no times for rounds=0."""
    import jax
    import jax.numpy as jnp

    shapes = ((tokens, sides[0]), sides, (tokens, sides[1]))
    options = compiler_options(*GPU, *FP8, *(() if rounds else DEVICELESS))
    sharding = jax.sharding.SingleDeviceSharding(device)
    steps = {}
    for name, multiply in (("bfloat16", jnp.einsum), ("8 bits", Fp8Config().build())):

        def step(x: Any, w: Any, dy: Any, multiply: Any = multiply) -> Any:
            y, pull = jax.vjp(lambda x, w: multiply(EQUATION, x, w), x, w)
            return y, *pull(dy)

        like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
        steps[name] = jax.jit(step).lower(*like).compile(compiler_options=options)
    record: dict[str, Any] = {"in": sides[0], "out": sides[1]}
    for name, step in steps.items():
        kernels = Counter(re.findall(r'custom_call_target="([^"]+)"', step.as_text()))
        temporary = step.memory_analysis().temp_size_in_bytes
        record[name] = {"temporary_mib": round(temporary / 2**20, 1), "kernels": dict(kernels)}
    if rounds:
        keys = jax.random.split(jax.random.key(0), 3)
        arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        times = timed(steps, arrays, rounds)
        for name, seconds in times.items():
            best = statistics.median(seconds)
            rate = 6 * tokens * sides[0] * sides[1] / best / 1e12
            record[name] |= {
                "ms": round(1e3 * best, 4),
                "fastest_ms": round(1e3 * min(seconds), 4),
                "tflops": round(rate),
            }
        record["speedup"] = round(record["bfloat16"]["ms"] / record["8 bits"]["ms"], 3)
    return record


def timed(steps: dict[str, Any], arrays: list[Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, by rounds of ten; the first round of each warms up."""
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(10):
                outputs = step(*arrays)
            jax.block_until_ready(outputs)
            if number:
                seconds[name].append((time.perf_counter() - start) / 10)
    return seconds


if __name__ == "__main__":
    main()
