"""The chunked form of Mamba-2's recurrence against the recurrence position by position, and compiled for a GPU.

Run:  python benchmarks/ssd.py [--quick]        (the second half needs the extra aot; no GPU. About two minutes)

On this machine: alternating forward and backward passes of both on one row of 2048 positions in float32. For a virtual
H100: the chunked form of Mamba-2 2.7B's layer (80 heads of 64, states of 128) on 8192 positions in bfloat16 with
several chunk sizes: temporary memory, and the compiler's operation count over the minimum. --quick: fewer positions and
one chunk size. The part `state_space` of benchmarks/kernels.py measures times on a GPU. Writes
benchmarks/results/ssd.json; docs/mamba.md shows it.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import outcome
from jax import Array
from jax.sharding import SingleDeviceSharding
from stopwatch import timed

from megajax.command_line.parser import front_door
from megajax.kernels.ssm.ssd import Scan, ssd, ssd_reference
from megajax.mesh.xla import DEVICELESS, GPU, compiler_options
from megajax.planning import virtual_devices as devices
from megajax.planning.virtual_devices import GPUS, MIB, Cluster

HERE = {"length": 2048, "heads": 4, "size": 64, "groups": 1, "states": 128}
LAYER = {"length": 8192, "heads": 80, "size": 64, "groups": 1, "states": 128}
ROUNDS = 5


def shapes(length: int, heads: int, size: int, groups: int, states: int) -> dict[str, tuple[int, ...]]:
    """Of the inputs of one row."""
    return {
        "x": (1, length, heads, size),
        "dt": (1, length, heads),
        "b": (1, length, groups, states),
        "c": (1, length, groups, states),
    }


def gradients(method: Callable[[Scan], tuple[Array, Array]]) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """Of the sum of squares of the outputs, with respect to the inputs."""

    def loss(inputs: dict[str, Array]) -> Array:
        heads = inputs["x"].shape[2]
        scan = Scan(**inputs, a=-jnp.linspace(1, 16, heads), skip=jnp.ones(heads))
        return jnp.sum(jnp.square(method(scan)[0].astype(jnp.float32)))

    return jax.grad(loss)


def measure_here(length: int) -> dict[str, Any]:
    """Seconds of both, their ratio, and how far their gradients are apart."""
    sizes, rng = HERE | {"length": length}, np.random.default_rng(0)
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes(**sizes).items()}
    inputs["dt"] = np.exp(rng.uniform(-7, -2, inputs["dt"].shape)).astype(np.float32)
    methods = {"recurrence": ssd_reference, **{f"chunks of {n}": partial(ssd, chunk=n) for n in (64, 128)}}
    calls = {name: jax.jit(gradients(method)).lower(inputs).compile() for name, method in methods.items()}
    results = {name: call(inputs) for name, call in calls.items()}
    seconds = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            seconds[name].append(timed(partial(call, inputs), 1, jax.block_until_ready))
    slow, medians = results["recurrence"], {name: float(np.median(samples)) for name, samples in seconds.items()}
    apart = {
        name: max(float(jnp.abs(result[part] - slow[part]).max() / jnp.abs(slow[part]).max()) for part in slow)
        for name, result in results.items()
    }
    rows = {
        name: {
            "seconds": medians[name],
            "times_faster": medians["recurrence"] / medians[name],
            "gradients_apart": apart[name],
            "temporary_mib": round(calls[name].memory_analysis().temp_size_in_bytes / MIB, 1),
        }
        for name in calls
    }
    return {"sizes": sizes, "methods": rows}


def needed(sizes: dict[str, int], chunk: int) -> float:
    """Operations of forward and backward pass: in a chunk all pairs of positions, between chunks the states."""
    inner = sizes["heads"] * sizes["size"]
    pairs = chunk * (sizes["groups"] * sizes["states"] + inner)
    return 3 * 2 * sizes["length"] * (pairs + 2 * inner * sizes["states"])


def compiled(chunk: int, gpu: str = "h100") -> dict[str, Any]:
    """Of a layer's recurrence on a virtual GPU."""
    sharding = SingleDeviceSharding(devices.virtual_devices(Cluster(GPUS[gpu], 1, 1))[0])
    like = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "dt" else jnp.bfloat16, sharding=sharding)
        for name, shape in shapes(**LAYER).items()
    }
    step = jax.jit(gradients(partial(ssd, chunk=chunk)))
    program = step.lower(like).compile(compiler_options=compiler_options(*GPU, *DEVICELESS))
    # A compiler without its device tells no costs. Matmuls are the same on CPU.
    plain = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in like.items()}
    operations = step.lower(plain).compile().cost_analysis()["flops"]
    return {
        "chunk": chunk,
        "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / MIB, 1),
        "teraoperations": round(operations / 1e12, 3),
        "over_needed": round(operations / needed(LAYER, chunk), 3),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer positions and one size of chunks; nothing written")
    quick = parser.parse_args(argv).quick
    devices.prepare()
    figures: dict[str, Any] = {"here": measure_here(256 if quick else HERE["length"])}
    print(figures["here"], flush=True)
    figures |= {"gpu": "h100", "layer": LAYER, "compiled": []}
    for chunk in (128,) if quick else (64, 128, 256):
        figures["compiled"].append(compiled(chunk))
        print(figures["compiled"][-1], flush=True)
    if not quick:
        outcome.write("ssd", figures)


if __name__ == "__main__":
    front_door(main)
