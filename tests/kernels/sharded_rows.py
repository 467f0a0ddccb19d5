"""Attention over rows that are sharded over fake devices, beside the reference on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiny_runs import QUICK

from megajax.kernels.attention.attention import Mask, Passes, attend, reference_attention
from megajax.kernels.attention.dropout import AttentionDropout
from megajax.kernels.context.strategy import over_context, over_devices
from megajax.mesh.zigzag_order import SequenceSharding

ROWS, LENGTH, SCALE = 2, 64, 0.25
BORDERS = [[5, 8, 9, 32, 50, 51], [40, 48]]
"""First positions of documents: across chunks of 4, 8 and 16, on their borders, and one position long."""
PADDED = [13, 0]
"""Positions of text in rows with padding after it: less than two chunks of four, and none."""


def documents(borders: Sequence[Sequence[int]] = BORDERS, length: int = LENGTH) -> np.ndarray:
    """int32 [B, T] of documents that begin at these positions and at 0."""
    return np.stack([np.searchsorted(row, np.arange(length), side="right") for row in borders]).astype(np.int32)


def texts(lengths: Sequence[int] = PADDED, length: int = LENGTH) -> np.ndarray:
    """int32 [B, T]: 1 for text, 0 for the padding after it."""
    return (np.arange(length) < np.array(lengths)[:, None]).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is computed."""

    strategy: str = "all_gather"
    context: int = 4
    tensor: int = 1
    exchanging: int = 2
    """Of ring+all_to_all."""
    rounds: int = 1
    causal: bool = True
    padded: bool = False
    window: int | None = None
    segments: Any = field(default=None, hash=False)
    sink: bool = False
    rate: float = 0.0
    heads: int = 4
    groups: int = 4
    size: int = 8
    wide: int = 8
    dtype: Any = jnp.float32
    length: int = LENGTH

    def sharding(self) -> SequenceSharding:
        exchanging = {"all_to_all": self.context, "ring+all_to_all": self.exchanging}.get(self.strategy, 1)
        return SequenceSharding(self.context, self.rounds if self.causal else 0, self.strategy, exchanging)

    def arrays(self) -> list[Array]:
        """q, k, v, the gradient of the result, in the row's order, and sinks."""
        draw = np.random.default_rng(0).standard_normal
        shapes = [(self.heads, self.size), (self.groups, self.size), (self.groups, self.wide), (self.heads, self.wide)]
        arrays = [jnp.asarray(draw((ROWS, self.length, *shape)), self.dtype) for shape in shapes]
        return [*arrays, jnp.asarray(draw(self.heads), jnp.float32)]


KEYS = np.arange(2 * ROWS, dtype=np.uint32).reshape(ROWS, 2)


def on_one_device(case: Case) -> list[np.ndarray]:
    """Result and gradients at q, k, v and sinks, in float32."""
    *qkv, dout, sinks = case.arrays()
    index = jnp.arange(case.length)
    mask = Mask(index, index, *[case.segments] * 2, case.window, case.causal, case.padded)
    dropout = AttentionDropout(case.rate, jnp.asarray(KEYS), jnp.arange(case.heads), index) if case.rate else None

    def attention(q: Array, k: Array, v: Array, sinks: Array) -> Array:
        sink = sinks if case.sink else None
        return reference_attention(q, k, v, mask, scale=SCALE, dropout=dropout, sink=sink)

    @jax.jit
    def output_and_gradients(*arrays: Array) -> tuple:
        out, pull = jax.vjp(attention, *arrays)
        return out, *pull(dout.astype(jnp.float32))

    with jax.default_matmul_precision("highest"):
        return [np.asarray(x) for x in output_and_gradients(*(x.astype(jnp.float32) for x in qkv), sinks)]


def on_devices(case: Case, kernel: str | Passes = "reference", rectangles: Passes | None = None) -> list[np.ndarray]:
    """The same for sharded rows, put back in order."""
    sharding, shape = case.sharding(), (case.context, case.tensor)
    mesh = Mesh(np.array(jax.devices()[: case.context * case.tensor]).reshape(shape), ("context", "tensor"))
    passes = over_context(sharding, kernel) if isinstance(kernel, str) else over_devices(sharding, kernel, rectangles)

    def local(q: Array, k: Array, v: Array, dout: Array, sinks: Array, segments: Array | None) -> tuple:
        index = sharding.local_index(q.shape[1])
        mask = Mask(index, index, segments, segments, case.window, case.causal, case.padded)
        names = lax.axis_index("tensor") * q.shape[2] + jnp.arange(q.shape[2])
        length = q.shape[1] * case.context
        dropout = AttentionDropout(case.rate, jnp.asarray(KEYS), names, index, length) if case.rate else None

        def attention(q: Array, k: Array, v: Array, sinks: Array) -> Array:
            return attend(passes, q, k, v, mask, scale=SCALE, dropout=dropout, sink=sinks if case.sink else None)

        out, pull = jax.vjp(attention, q, k, v, sinks)
        *grads, dsink = pull(dout)
        return out, *grads, lax.psum(dsink, "context")

    rows_spec, heads = P(None, "context", "tensor"), P("tensor")
    outs = (*[rows_spec] * 4, heads)
    ins = (*outs, P(None, "context"))
    program = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    order = sharding.places(case.length)
    *rows, sinks = case.arrays()
    segments = None if case.segments is None else jnp.asarray(case.segments[:, order])
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(program, compiler_options=dict(QUICK))
        *arrays, dsink = compiled(*(x[:, order] for x in rows), sinks, segments)
    return [*(np.asarray(x, np.float32)[:, np.argsort(order)] for x in arrays), np.asarray(dsink)]


NAMES = ("result", "dq", "dk", "dv", "dsink")


def differences(case: Case, kernel: str | Passes = "reference", rectangles: Passes | None = None) -> dict[str, float]:
    """Largest difference of the result and of each gradient, over the largest number in it."""
    pairs = zip(NAMES, on_devices(case, kernel, rectangles), on_one_device(case), strict=True)
    return {
        name: float(np.abs(value - reference).max() / np.abs(reference).max())
        for name, value, reference in pairs
        if name != "dsink" or case.sink
    }


def check(case: Case, kernel: str | Passes = "reference", rectangles: Passes | None = None, most: float = 1e-5) -> None:
    """Result and gradients equal those of one device."""
    errors = differences(case, kernel, rectangles)
    assert max(errors.values()) <= most, errors
    assert all(np.isfinite(list(errors.values()))), errors
