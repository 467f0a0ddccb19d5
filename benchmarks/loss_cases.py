"""The cases of `loss.py`: the chunked and the plain cross-entropy, at the sizes of models."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from roofline import Roof, roof_of
from stopwatch import readings_in

from megajax.kernels.cross_entropy import CROSS_ENTROPY
from megajax.layers.embedding import vocabulary_loss
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.rules import Plan

SIZES = {True: ((8192, 4096, 128256), (16384, 2048, 50304)), False: ((96, 32, 512),)}
"""On a GPU or not: tokens, hidden size, vocabulary."""
CHUNKS = {True: (512, 1024, 2048, 4096, 8192), False: (16, 96)}
TOLERANCE = 2e-2
"""Relative error of loss and gradients, bfloat16 against float32."""


def plain_loss(x: Array, table: Array, labels: Array, weights: Array) -> Array:
    """x [1, T, D], table [V, D], labels and weights [1, T] -> the weighted sum of losses; holds all logits."""
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    label_logits = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    return -jnp.sum(weights * label_logits)


def chunked_loss(layout: Layout, vocabulary: int, chunk: int, *arrays: Array) -> Array:
    """The same of x, table, labels and weights as training has it."""
    return vocabulary_loss(layout, vocabulary, chunk, CROSS_ENTROPY, *arrays).minimised


def table(roof: Roof, *, on_gpu: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for the plain loss and for each chunk size, for each size of model, as they come."""
    for size in SIZES[on_gpu]:
        yield from rows(size, CHUNKS[on_gpu], roof, seconds)


def measure_here(*, seconds: float, peak_tflops: float | None, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """`table` for the devices jax finds; `show` gets the text of each row. UserError if the GPU's peak is unknown."""
    device = jax.devices()[0]
    roof = roof_of(device.device_kind, device.platform, peak_tflops=peak_tflops)
    records = []
    for row in table(roof, on_gpu=device.platform == "gpu", seconds=seconds):
        records.append(row)
        show(line(row))
    return records


def rows(size: tuple[int, int, int], chunks: tuple[int, ...], roof: Roof, seconds: float) -> Iterator[dict[str, Any]]:
    """Times, temporary memory and errors at one size, on a mesh whose `tensor` axis is all devices."""
    tokens, hidden, vocabulary = size
    devices = jax.devices()
    cfg = ParallelConfig(tensor=len(devices))
    mesh, layout = build_mesh(cfg, devices), Layout(Plan.of(cfg))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("tensor", None)), NamedSharding(mesh, PartitionSpec())
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.device_put(jax.random.normal(keys[0], (1, tokens, hidden), jnp.bfloat16), replicated)
    matrix = jax.device_put(0.02 * jax.random.normal(keys[1], (vocabulary, hidden), jnp.bfloat16), sharded)
    labels = jax.device_put(jax.random.randint(keys[2], (1, tokens), 0, vocabulary), replicated)
    weights = jax.device_put(jnp.ones((1, tokens)), replicated)
    arguments = (x, matrix, labels, weights)
    calls = {NAME.format("plain"): plain_loss}
    calls |= {chunked(chunk): partial(chunked_loss, layout, vocabulary, chunk) for chunk in chunks}
    flops, moved = costs(size, len(devices))
    with jax.set_mesh(mesh):
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(jax.value_and_grad(plain_loss, (0, 1)))(
                x.astype(jnp.float32), matrix.astype(jnp.float32), labels, weights
            )
        for name, call in calls.items():
            compiled = jax.jit(jax.value_and_grad(call, (0, 1))).lower(*arguments).compile()
            errors = [
                relative(*pair)
                for pair in zip(jax.tree.leaves(compiled(*arguments)), jax.tree.leaves(expected), strict=True)
            ]
            statistics = readings_in(partial(compiled, *arguments), jax.block_until_ready, seconds=seconds)
            floor = roof.floor_seconds(flops=flops, moved=moved)
            yield {
                "name": name,
                "sizes": sizes(size, len(devices)),
                "seconds": statistics.to_dict(),
                "tflops": flops / statistics.median / 1e12,
                "share_of_floor": None if floor is None else floor / statistics.median,
                "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "errors": errors,
                "right": all(error <= TOLERANCE for error in errors),
            }


NAME = "loss, {}"


def chunked(chunk: int) -> str:
    """Name of the row of a chunk size."""
    return NAME.format(f"chunks of {chunk}")


def sizes(size: tuple[int, int, int], devices: int) -> dict[str, int]:
    """What a row says of its size."""
    return dict(zip(("tokens", "hidden", "vocabulary", "devices"), (*size, devices), strict=True))


def costs(size: tuple[int, int, int], devices: int) -> tuple[float, float]:
    """Operations, and bytes of memory moved at least, of one device for loss and gradients."""
    tokens, hidden, vocabulary = size
    return 6 * tokens * hidden * vocabulary / devices, 2 * 2 * (tokens + vocabulary / devices) * hidden


def relative(actual: Array, expected: Array) -> float:
    """|found - expected| / |expected| by Euclidean norms; nan stays nan."""
    gap = actual.astype(jnp.float32) - expected
    return float(jnp.linalg.norm(gap.ravel()) / jnp.linalg.norm(expected.ravel()))


def line(record: dict[str, Any]) -> str:
    """One row as a line."""
    sizes = " ".join(f"{name}={size}" for name, size in record["sizes"].items())
    share = "" if record["share_of_floor"] is None else f" {record['share_of_floor']:.0%} of the roof"
    error = f"error {max(record['errors']):.1e}" + ("" if record["right"] else " WRONG")
    temporary = f"{record['temporary_bytes'] / 2**20:.1f} MiB"
    speed = f"{1e3 * record['seconds']['median']:.3f} ms {record['tflops']:.3g} TFLOP/s{share}"
    return f"{record['name']:<40} {sizes:<58} {speed}; temporary {temporary}; {error}"
