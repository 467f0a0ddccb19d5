"""The functions that an engine's programs are compiled from: a step of the model, and the tokens that the device keeps.

A step may be dispatched before the host knows the tokens that the previous one chose. The device keeps the last chosen
token of each slot, and puts it in the place of `AWAITED`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from megajax.inference.images import IMAGES, with_images
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.step_arrays import AWAITED, Bucket, StepArrays
from megajax.kernels.paged.capability import PagedKernel
from megajax.layers.cache_spec import CacheLeaf
from megajax.layers.context import Context
from megajax.layers.decoding import Cache, StepRows, write
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import LogicalAxes
from megajax.models.protocol import GeneratingModel

STATES = ("batch", None, None)
"""Logical axes of the outputs of a stack [T, 1, D]."""
TOKENS = CacheLeaf("tokens", (), (), dtype="int32")
"""Token ids in the cache, so that penalties need no other state for rows that share blocks or are recomputed. Rows with
penalties read all of them, see `Sequence.keeps_blocks`."""
OTHERS = frozenset((TOKENS.name, IMAGES))
"""Names of the cache leaves that no layer declares."""


class StepOutput(NamedTuple):
    """Output of the model in a step; arrays of all replicas, concatenated."""

    logits: Array
    """float32 [choices, V], of the tokens that follow; laid out (batch, vocab), with columns for padding."""
    tokens: Array
    """int32 [rows, L]: the tokens of each row from the cache; undefined past the row's end."""
    prompts: Array
    """[chunk, 1, D]: output of the stack for the prompts' tokens; empty in steps without a prompt."""
    states: Array | None = None
    """[T, 1, D]: output of the stack for all tokens, if heads draft."""


def step_rows(
    arrays: StepArrays, groups: tuple[tuple[int, int], ...], kernel: PagedKernel, loaded: LoadedModel
) -> StepRows:
    """The rows of a step."""
    return StepRows(
        groups=groups,
        kernel=kernel,
        slots=arrays.slots,
        tables=arrays.tables,
        counts=arrays.counts,
        states=arrays.states,
        layer=jnp.int32(0),
        loop=loaded.loop,
        columns=None if loaded.adapters is None else loaded.adapters.columns(arrays.adapters),
    )


def step_context(positions: Array, rows: StepRows) -> Context:
    """The context of a step. positions: int32 [T, 1]."""
    return Context(positions, jnp.zeros(1, jnp.int32), rows=rows)


def copied_states(
    layout: Layout, leaves: Cache, axes: Mapping[str, LogicalAxes], sources: Array, targets: Array
) -> Cache:
    """Leaves of rows [layers, slots, ...] with copies of slots in others, int32 [replicas * n]; past the last: none.

    axes: logical axes of each leaf in one row.
    """

    def local(leaves: Cache, sources: Array, targets: Array) -> Cache:
        return {
            name: leaf.at[:, targets].set(leaf.at[:, sources].get(mode="clip"), mode="drop", unique_indices=True)
            for name, leaf in leaves.items()
        }

    pools = {name: (None, "batch", *axes[name]) for name in leaves}
    return layout.island(local, (pools, ("batch",), ("batch",)), pools)(leaves, sources, targets)


def step_output(
    model: GeneratingModel,
    layout: Layout,
    cache: Mapping[str, Array],
    arrays: StepArrays,
    rows: StepRows,
    *,
    states: bool = False,
) -> tuple[StepOutput, Cache]:
    """The output of a step, with `StepOutput.states` on request, and the cache with its tokens."""
    ids, tokens = _row_tokens(layout, cache[TOKENS.name], arrays.tokens, rows)
    ctx = with_images(layout, step_context(arrays.positions, rows), cache, arrays.images, arrays.rotary)
    others = {name: cache[name] for name in OTHERS & cache.keys()}
    x, cache = model.step(arrays.tokens, of_layers(cache), ctx)

    def parts(x: Array, last: Array) -> tuple[Array, Array]:
        return x[last], x[rows.parts()[1]] if len(rows.groups) > 1 else x[:0]

    decoded, prompts = layout.island(parts, (STATES, ("batch",)), (STATES, STATES))(x, arrays.last)
    out = StepOutput(model.next_logits(decoded)[:, 0], tokens, prompts, x if states else None)
    return out, {**cache, **others, TOKENS.name: ids}


def known_tokens(layout: Layout, arrays: StepArrays, latest: Array, bucket: Bucket) -> Array:
    """`StepArrays.tokens` with those that the host does not know. latest: as in `Programs`."""

    def local(tokens: Array, latest: Array, slots: Array) -> Array:
        chosen = latest.at[jnp.repeat(slots, bucket.width)].get(mode="clip")[:, None]
        decoding = tokens[: bucket.choices]
        return tokens.at[: bucket.choices].set(jnp.where(decoding == AWAITED, chosen, decoding))

    column = ("batch", None)
    return layout.island(local, (column, ("batch",), ("batch",)), column)(arrays.tokens, latest, arrays.states[0])


def with_chosen(layout: Layout, latest: Array, slots: Array, token: Array, bucket: Bucket) -> Array:
    """`Programs.latest` after a choice. slots: int32 [rows]; token: int32 [choices]."""

    def local(latest: Array, slots: Array, token: Array) -> Array:
        return latest.at[slots].set(token[:: bucket.width], mode="drop")

    row = ("batch",)
    return layout.island(local, (row, row, row), row)(latest, slots, token)


def of_layers(cache: Cache) -> Cache:
    """The cache leaves of layers."""
    return {name: leaf for name, leaf in cache.items() if name not in OTHERS}


def _row_tokens(layout: Layout, leaf: Array, new: Array, rows: StepRows) -> tuple[Array, Array]:
    """The leaf `TOKENS` with those of the step [T, 1], and the tokens of the first group's rows, int32 [rows, L]."""

    def local(leaf: Array, new: Array, rows: StepRows) -> tuple[Array, Array]:
        leaf = write(leaf, new[:, 0], rows)
        blocks = leaf[0][rows.tables[0]]
        return leaf, blocks.reshape(blocks.shape[0], -1)

    pool, row = (None, "batch", None), ("batch", None)
    return layout.island(local, (pool, row, rows.axes()), (pool, row))(leaf, new, rows)


class Chooser(Protocol):
    """A way to choose the next tokens; hashable."""

    def like(self, choices: int) -> Any:
        """A pytree of its input arrays [choices, ...], as jax.ShapeDtypeStruct; choices: of a replica."""
        ...

    def __call__(self, layout: Layout, logits: Array, tokens: Array, inputs: Any) -> Any:
        """Arrays as in `StepOutput`, and those inputs -> a pytree of arrays, with the chosen tokens as `token`."""
        ...


class StateScorer(Protocol):
    """A use of the states of prompts' tokens; hashable."""

    def __call__(self, layout: Layout, model: GeneratingModel, states: Array, targets: Array) -> Any:
        """States of `StepOutput.prompts` and int32 [chunk] targets -> a pytree of arrays.

        model: a `megajax.models.protocol.GeneratingModel`.
        """
        ...
