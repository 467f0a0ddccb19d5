"""The rows of a decoding step, and recurrences over them.

A step is flat: T tokens, each a row of the batch with one position, [T, 1]. Embedding, norms, projections and
feed-forwards need no other information. Mixers read from `StepRows` which tokens belong to the same row.

A step consists of groups of rows with equal numbers of tokens: decoding rows have one token, prompts have several.
Cache leaves are stacked over layers: [layers, blocks, block, ...] for tokens and [layers, slots, ...] for rows. With
several replicas along the mesh axes of `batch`, every array concatenates them, and token, block and slot numbers are
local to a replica.

R rows per group, W tokens per row, M blocks per table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from megajax.kernels.paged.capability import PagedKernel
from megajax.layers.cache_spec import LATEST, POSITION
from megajax.layers.context import Context
from megajax.mesh.layout import AxesTree, Layout
from megajax.mesh.sharding_rules import LogicalAxes

type Cache = Mapping[str, Array]
"""Leaves by name, as the layer's config declares them (`CacheLeaf`), each with a leading dimension of layers."""

type Advance = Callable[[Any, Any, Cache, Array], tuple[Array, Cache]]
"""(inputs [R, W, ...], weights, leaves of the rows before their first tokens [R, ...], counts int32 [R]) -> outputs
[R, W, ...] and the leaves after the last tokens. Only the first `counts` tokens of a row change its leaves."""


type LayerLoop = Callable[[int, Callable[[Any, Any], Any], Any], Any]
"""(count, body, carry) -> the carry after body(number, carry) for the numbers from 0 to count."""


def rolled[T](count: int, body: Callable[[Array | int, T], T], carry: T) -> T:
    """A `LayerLoop` that is compiled as a loop: one body for all layers, which reads its rows of stacked weights."""
    return jax.lax.fori_loop(0, count, body, carry)


def unrolled[T](count: int, body: Callable[[Array | int, T], T], carry: T) -> T:
    """A `LayerLoop` without a loop: a body for each layer, for weights that are arrays of their own."""
    for number in range(count):
        carry = body(number, carry)
    return carry


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "tables", "counts", "states", "layer", "columns"],
    meta_fields=["groups", "kernel", "loop"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows, cache blocks and slots of the tokens of a step. A pytree; shapes are those of one replica."""

    groups: tuple[tuple[int, int], ...]
    """(rows, tokens per row) of each group. The tokens of the groups are concatenated."""
    kernel: PagedKernel
    slots: Array
    """int32 [T]: block * block size + offset, where a token's keys are written; past the pool for padding."""
    tables: tuple[Array, ...]
    """For each group int32 [R, M]: the row's blocks."""
    counts: tuple[Array, ...]
    """For each group int32 [R]: tokens of the row in this step, at most W; 0 for a padding row."""
    states: tuple[Array, ...]
    """For each group int32 [R]: the row's slot in the leaves of rows; past the last slot for a padding row."""
    layer: Array
    """int32 []: index of the layer along the leading dimension of the cache."""
    loop: LayerLoop = rolled
    """The loop over layers."""
    columns: Array | None = None
    """bool [T, R]: the columns of adapters that each token uses; None: all tokens use all columns."""

    def parts(self) -> list[slice]:
        """The slice of the tokens of each group."""
        parts, first = [], 0
        for rows, width in self.groups:
            parts.append(slice(first, first + rows * width))
            first += rows * width
        return parts

    def real(self) -> Array:
        """bool [T]: the tokens that are not padding."""
        groups = zip(self.groups, self.counts, strict=True)
        return jnp.concatenate(
            [(jnp.arange(width)[None] < counts[:, None]).reshape(-1) for (_, width), counts in groups]
        )

    def axes(self) -> Any:
        """This pytree with the logical axes of each array in its place."""
        row, count = (("batch", None),) * len(self.groups), (("batch",),) * len(self.groups)
        axes: dict[str, Any] = {"slots": ("batch",), "tables": row, "counts": count, "states": count, "layer": ()}
        axes["columns"] = None if self.columns is None else ("batch", None)
        return StepRows(groups=self.groups, kernel=self.kernel, loop=self.loop, **axes)


def rows_of(ctx: Context) -> StepRows:
    """The rows of the current step. Raises ValueError outside a step."""
    if ctx.rows is None:
        raise ValueError("ctx.rows is None: `step` of a layer runs inside the step of its model")
    return ctx.rows


def in_layer(ctx: Context, number: Array | int) -> Context:
    """The context of a layer. number: its index along the leading dimension of the cache."""
    return ctx._replace(rows=replace(rows_of(ctx), layer=jnp.int32(number)))


def write(leaf: Array, x: Array, step: StepRows) -> Array:
    """Writes x [T, ...] to a leaf [layers, blocks, block, ...] at the step's slots; in place if the leaf is donated."""
    size = leaf.shape[2]
    at = leaf.at[step.layer, step.slots // size, step.slots % size]
    return at.set(x.astype(leaf.dtype), mode="drop", unique_indices=True)


def advance_rows(
    layout: Layout,
    advance: Advance,
    inputs: tuple[Any, AxesTree],
    weights: tuple[Any, AxesTree],
    cache: tuple[Cache, Mapping[str, LogicalAxes]],
    out: LogicalAxes,
    ctx: Context,
) -> tuple[Array, Cache]:
    """A recurrence over the tokens of each row, from the row's leaves on: an island.

    inputs, weights, cache: arrays [T, 1, ...], weights and leaves of rows, each with their logical axes; those of a
    leaf are its axes in one row. out: axes of the outputs [T, 1, ...]. A row that begins at position 0 starts with
    zeros in its leaves, because its slot may have belonged to another row. If the cache has `latest_leaves`, those of
    all inputs, the leaves of a decoding row (first group) stay before its latest tokens, see `_of_drafts`.
    """

    def local(inputs: Any, weights: Any, cache: Cache, step: StepRows, positions: Array) -> tuple[Array, Cache]:
        slots, outputs, after = jnp.concatenate(step.states), [], []
        row_leaves = {name: leaf.at[step.layer, slots].get(mode="clip") for name, leaf in cache.items()}
        first, kinds = 0, (_of_drafts if POSITION in cache else _of_tokens, _of_tokens)
        for (rows, width), part, count, kind in zip(step.groups, step.parts(), step.counts, kinds, strict=False):

            def of_rows(x: Array, part: slice = part, shape: tuple[int, int] = (rows, width)) -> Array:
                return x[part].reshape(*shape, *x.shape[2:])

            starts = of_rows(positions)[:, 0] == 0
            group_leaves = {name: leaf[first : first + rows] for name, leaf in row_leaves.items()}
            before = {
                name: jnp.where(starts.reshape(rows, *[1] * (x.ndim - 1)), 0, x) for name, x in group_leaves.items()
            }
            y, leaves = kind(advance, jax.tree.map(of_rows, inputs), weights, before, count, of_rows(positions))
            outputs.append(y.reshape(rows * width, 1, *y.shape[2:]))
            after.append(leaves)
            first += rows
        # One scatter for all groups: XLA turns the scatter of a single row into a dynamic-update-slice, which may copy.
        joined = {name: jnp.concatenate([leaves[name] for leaves in after]) for name in cache}
        new_cache = {
            name: leaf.at[step.layer, slots].set(joined[name].astype(leaf.dtype), mode="drop", unique_indices=True)
            for name, leaf in cache.items()
        }
        return jnp.concatenate(outputs), new_cache

    pools = {name: (None, "batch", *cache[1][name]) for name in cache[0]}
    step = rows_of(ctx)
    ins = (inputs[1], weights[1], pools, step.axes(), ("batch", None))
    return layout.island(local, ins, (out, pools))(inputs[0], weights[0], cache[0], step, ctx.positions)


NEVER = 2**30
"""A position after all others."""


def _of_tokens(
    advance: Advance, inputs: Any, weights: Any, before: Cache, counts: Array, positions: Array
) -> tuple[Array, Cache]:
    """`advance` over tokens that are part of their rows."""
    del positions
    latest = {name: leaf for name, leaf in before.items() if name.startswith(LATEST)}
    never = {POSITION: jnp.full_like(latest[POSITION], NEVER)} if latest else {}
    y, leaves = advance(inputs, weights, {name: x for name, x in before.items() if name not in latest}, counts)
    return y, {**leaves, **latest, **never}


def _of_drafts(
    advance: Advance, inputs: Mapping[str, Array], weights: Any, before: Cache, counts: Array, positions: Array
) -> tuple[Array, Cache]:
    """`advance` over decoding rows whose tokens, and those of the step before, may be wrong drafts.

    First over the latest tokens that are part of the row, those before the row's first position [R, W]: the leaves that
    stay. Then from these over the tokens of the step, which become the latest. A step reads and writes the state once,
    where the states after each token would be 1 + drafts times as large.
    """
    longest = before[POSITION].shape[1]
    count = jnp.sum(before[POSITION] < positions[:, :1], axis=1, dtype=jnp.int32)
    latest = {name: before[LATEST + name].astype(x.dtype) for name, x in inputs.items()}
    states = {name: leaf for name, leaf in before.items() if not name.startswith(LATEST)}
    _, states = advance(latest, weights, states, count)
    y, _ = advance(inputs, weights, states, counts)
    present = jnp.arange(positions.shape[1])[None] < counts[:, None]

    def padded(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, ((0, 0), (0, longest - x.shape[1]), *[(0, 0)] * (x.ndim - 2)), constant_values=value)

    following = {LATEST + name: padded(x) for name, x in inputs.items()}
    return y, {**states, **following, POSITION: padded(jnp.where(present, positions, NEVER), NEVER)}


def last_inputs(x: Array, before: Array, counts: Array) -> Array:
    """The last K - 1 inputs of a convolution, in before's dtype, [R, K - 1, ...].

    x [R, W, ...]: only the first `counts` int32 [R] inputs of each row are real; before [R, K - 1, ...]: the inputs
    before x.
    """
    every = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
    at = counts[:, None] + jnp.arange(before.shape[1])[None]
    return jnp.take_along_axis(every, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)
