"""The chunked cross-entropy, with a vocabulary sharded over all devices, against whole logits.

Both compute the loss and the gradients of hidden states and table. The shipped loss computes the float32 logits of one
chunk of tokens at a time, and their gradient in the same pass. The plain one computes all logits and uses autodiff.
Operations are 6 x tokens x hidden x vocabulary, divided by the number of devices.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.kernels.measure import TOLERANCE, error_text, errors_of, head_text, share_text
from benchmarks.roofline import Roof
from benchmarks.stopwatch import readings_in
from megajax.kernels.cross_entropy import CROSS_ENTROPY
from megajax.layers.embedding import vocabulary_loss
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan

type Size = tuple[int, int, int]
"""Tokens, hidden size, vocabulary."""
SIZES: dict[bool, tuple[Size, ...]] = {True: ((8192, 4096, 128256), (16384, 2048, 50304)), False: ((96, 32, 512),)}
"""By whether there is a GPU."""
CHUNKS = {True: (512, 1024, 2048, 4096, 8192), False: (16, 96)}


def plain_loss(x: Array, table: Array, labels: Array, weights: Array) -> Array:
    """x [1, T, D], table [V, D], labels and weights [1, T] -> the weighted sum of losses, from all logits at once."""
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    label_logits = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    return -jnp.sum(weights * label_logits)


def chunked_loss(layout: Layout, vocabulary: int, chunk: int, *arrays: Array) -> Array:
    """The same, as in training."""
    return vocabulary_loss(layout, vocabulary, chunk, CROSS_ENTROPY, *arrays).minimised


def names(chunks: tuple[int, ...]) -> list[str]:
    """Names of the rows of one size: the plain loss, then each chunk size."""
    return ["loss, plain", *(f"loss, chunks of {chunk}" for chunk in chunks)]


def table(roof: Roof, *, on_gpu: bool, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, row) of the plain loss and of each chunk size, for each size of model."""
    for size in SIZES[on_gpu]:
        for row in rows(size, CHUNKS[on_gpu], roof, seconds):
            yield line(row), row


def rows(size: Size, chunks: tuple[int, ...], roof: Roof, seconds: float) -> Iterator[dict[str, Any]]:
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
    calls: list[Callable[..., Array]] = [plain_loss]
    calls += [partial(chunked_loss, layout, vocabulary, chunk) for chunk in chunks]
    flops, moved = costs(size, len(devices))
    floor = roof.floor_seconds(flops=flops, moved=moved)
    with jax.set_mesh(mesh):
        with jax.default_matmul_precision("highest"):
            wide = x.astype(jnp.float32), matrix.astype(jnp.float32), labels, weights
            expected = jax.jit(jax.value_and_grad(plain_loss, (0, 1)))(*wide)
        for name, call in zip(names(chunks), calls, strict=True):
            compiled = jax.jit(jax.value_and_grad(call, (0, 1))).lower(*arguments).compile()
            errors = errors_of(compiled(*arguments), expected)
            statistics = readings_in(partial(compiled, *arguments), jax.block_until_ready, seconds=seconds)
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


def sizes(size: Size, devices: int) -> dict[str, int]:
    """The sizes of a row by name."""
    return dict(zip(("tokens", "hidden", "vocabulary", "devices"), (*size, devices), strict=True))


def costs(size: Size, devices: int) -> tuple[float, float]:
    """Operations, and minimum bytes of memory, of one device for loss and gradients."""
    tokens, hidden, vocabulary = size
    return 6 * tokens * hidden * vocabulary / devices, 2 * 2 * (tokens + vocabulary / devices) * hidden


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    speed = f"{1e3 * row['seconds']['median']:.3f} ms {row['tflops']:.3g} TFLOP/s{share_text(row)}"
    temporary = f"{row['temporary_bytes'] / 2**20:.1f} MiB"
    return f"{head_text(row)} {speed}; temporary {temporary}; {error_text(row)}"
