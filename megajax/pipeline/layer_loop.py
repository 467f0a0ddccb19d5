"""Loops over the layers of a chunk: the forward pass saves each layer's residuals, the backward pass adds up gradients.

Nothing differentiates through a loop. Each layer's vjp is taken where the layer runs. What it saves goes into rings at
[slot, layer]. Rings never hold weights: `jax.vjp` keeps the inputs it needs apart from what it saves, and they are put
back for the backward pass.

Weight gradients are accumulated in place. A matrix enters its layer in the dtype of its accumulator, so its gradient is
made in that dtype (see `Layout.dot`), and the compiler turns "slice, product, add, update" into one matrix product that
adds to the accumulator. It can do so only where the row is a function of the loop index: callers give a chunk's first
row as a Python integer where they can.

B rows, S positions, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.batch import Params
from megajax.mesh.layout import Layout
from megajax.mesh.observations import accumulated
from megajax.pipeline.staged import Span

RESIDUAL = ("batch", "seq_residual", "embed")

type Rings = list[list[Array]]
"""For each span: [slots, units, ...] for each array that a unit saves."""


def entry(tree: Any, index: Array) -> Any:
    """Entry `index` along the leading dimension of every array."""
    return jax.tree.map(lambda a: take(a, index), tree)


def put(array: Array, value: Array, *index: Array | int) -> Array:
    """The array with `value` at these leading indices."""
    starts = (*index, *[0] * value.ndim)
    return lax.dynamic_update_slice(array, value[(None,) * len(index)], starts, allow_negative_indices=False)


def take(array: Array, *index: Array | int) -> Array:
    """The array at these leading indices."""
    rest = array.shape[len(index) :]
    starts, sizes = (*index, *[0] * len(rest)), (*[1] * len(index), *rest)
    return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False).reshape(rest)


def add(total: Params, new: Mapping[str, Array]) -> Params:
    """`total` with `new` added to the paths it has; observations are combined by their reduction.

    Frozen weights have no total. What would be added to it is then not computed: the compiler drops it.
    """
    return {**total, **{path: accumulated(path, total[path], g) for path, g in new.items() if path in total}}


def differentiated(unit: Callable[..., Array], *inputs: Any) -> tuple[Array, Any]:
    """A unit's output and its vjp, without the inputs it keeps except x. inputs: weights, common, numbers, x, ctx."""
    y, pull = jax.vjp(unit, *inputs)
    kept = pull.args_res  # ty: ignore[missing-attribute]  # jax annotates its VJP object as a plain callable
    kept[:3], kept[4] = [None] * 3, None
    return y, pull


def _rows[T](tree: T, first: Array, count: int) -> T:
    """Row `first` of every array, or for count > 1 that many rows from there on."""
    if count == 1:
        return entry(tree, first)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, count, allow_negative_indices=False), tree)


def _put_rows(array: Array, value: Array, first: Array, count: int) -> Array:
    """The array with what `_rows` takes replaced."""
    value = value if count > 1 else value[None]
    return lax.dynamic_update_slice_in_dim(array, value, first, 0, allow_negative_indices=False)


@dataclass(frozen=True)
class LayerLoop:
    """The rows of stacked weights that a device holds, and how to go through them."""

    spans: Sequence[Span]
    """The layers of a chunk."""
    layout: Layout
    stacked: Params
    """[chunks * rows, ...], as layers use them."""
    common: Params
    """Weights that every layer uses, by their paths in the model."""
    numbers: Array | np.ndarray
    """Int32 [chunks * rows]: repeat of the stack that a row holds; -1 for a row that is no layer."""
    padded: bool
    """Whether some row is no layer."""
    made_in: Mapping[str, Any]
    """Path in `stacked` -> dtype in which a matrix's gradient is made; other gradients have their weight's dtype."""

    def forward(self, first: Array | int, x: Array, ctx: Any, rings: Rings, slot: Array | int) -> tuple[Array, Rings]:
        """(output, rings with what was saved at `slot`) of the chunk that begins at row `first`."""
        filled = []
        for (start, span), ring in zip(self.starts(first), rings, strict=True):

            def one(n: Array, carry: tuple, start: Array | int = start, span: Span = span) -> tuple[Array, list[Array]]:
                x, ring = carry
                row = start + n * span.rows_per_unit
                y, pull = self._differentiated(span, row, x, ctx)
                ring = [put(a, value, slot, n) for a, value in zip(ring, jax.tree.leaves(pull), strict=True)]
                return self._passed_by(row, y, x), ring

            x, ring = lax.fori_loop(0, span.units, one, (x, ring), unroll=span.unroll)
            filled.append(ring)
        return x, filled

    def backward(
        self, first: Array | int, dy: Array, ctx: Any, rings: Rings, slot: Array | int, totals: tuple[Params, Params]
    ) -> tuple[Array, tuple[Params, Params]]:
        """(gradient of the chunk's input, totals with the gradients added).

        totals: of the stacked and of the common weights. What is added to rows that are no layer is arbitrary: see
        `without_padding`.
        """
        for (start, span), ring in reversed([*zip(self.starts(first), rings, strict=True)]):
            one = self._pulled(span, ring, start, slot, ctx)
            dy, *totals_after = lax.fori_loop(0, span.units, one, (dy, *totals), unroll=span.unroll)
            totals = totals_after[0], totals_after[1]
        return dy, totals

    def output(self, first: Array | int, x: Array, ctx: Any) -> Array:
        """Output of the chunk that begins at row `first`; saves nothing."""
        for start, span in self.starts(first):

            def one(n: Array, x: Array, start: Array | int = start, span: Span = span) -> Array:
                row = start + n * span.rows_per_unit
                return self._passed_by(row, span.unit(*self._arguments(span, row), x, ctx), x)

            x = lax.fori_loop(0, span.units, one, x)
        return x

    def starts(self, first: Array | int) -> list[tuple[Array | int, Span]]:
        """The spans of a chunk, each with its first row."""
        return [(first + span.start, span) for span in self.spans]

    def buffers(self, slots: int, x: Array, ctx: Any, fill: float) -> Rings:
        """Rings before anything is saved. x [B, S, D]: like a layer's input; fill: about what they hold."""
        rings: Rings = []
        for span in self.spans:
            rings.append(self._ring(span, slots, self._saved(span, x, ctx), fill, sum(map(len, rings))))
        return rings

    def without_padding(self, totals: Params) -> Params:
        """Gradients of stacked weights with zeros in the rows that are no layer, whatever they hold (also NaN)."""
        if not self.padded:
            return totals
        real = jnp.asarray(self.numbers) >= 0
        return {path: jnp.where(real.reshape(-1, *[1] * (g.ndim - 1)), g, 0) for path, g in totals.items()}

    def _ring(self, span: Span, slots: int, saved: Any, fill: float, before: int) -> list[Array]:
        """Of the arrays that a unit saves: its input is laid out as such, the others as the compiler likes.

        before: rings made so far. No two rings hold the same number: the compiler would make one buffer of equal ones
        and copy it, in host memory at the speed of the host.
        """
        inputs = len(jax.tree.leaves(saved.args_res))
        rings = []
        for place, leaf in enumerate(jax.tree.leaves(saved)):
            value = fill + before + place if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
            ring = jnp.full((slots, span.units, *leaf.shape), value, leaf.dtype)
            # A vjp lists the inputs it keeps before all else; x is the only one left among them.
            ring = self.layout.act(ring, None, None, *RESIDUAL) if place < inputs else ring
            on_host = leaf.memory_space == jax.memory.Space.Host
            rings.append(jax.device_put(ring, jax.memory.Space.Host) if on_host else ring)
        return rings

    def _saved(self, span: Span, x: Array, ctx: Any) -> Any:
        """A unit's vjp as abstract arrays with their memory, without its inputs."""
        traced, tree = jax.make_jaxpr(lambda: self._differentiated(span, jnp.int32(0), x, ctx)[1], return_shape=True)()
        return jax.tree.unflatten(jax.tree.structure(tree), traced.out_avals)

    def _differentiated(self, span: Span, row: Array, x: Array, ctx: Any) -> tuple[Array, Any]:
        """A unit's output and its vjp, see `differentiated`."""
        return differentiated(span.unit, *self._arguments(span, row), x, ctx)

    def _pulled(
        self, span: Span, ring: list[Array], start: Array | int, slot: Array | int, ctx: Any
    ) -> Callable[[Array, tuple], tuple]:
        """(units done, (gradient of the output, totals)) -> those after one unit more."""

        def one(done: Array, carry: tuple) -> tuple:
            dy, stacked, common = carry
            n = span.units - 1 - done
            row = start + n * span.rows_per_unit
            tree = jax.tree.structure(self._saved(span, dy, ctx))
            pull = jax.tree.unflatten(tree, [take(a, slot, n) for a in ring])
            pull.args_res[:3], pull.args_res[4] = self._arguments(span, row), ctx
            gradients, everywhere, _, dx, _ = pull(dy)
            if self.padded:
                everywhere = {path: jnp.where(self._real(row), g, 0) for path, g in everywhere.items()}
            sums = add(_rows(span.uses(stacked), row, span.rows_per_unit), gradients)
            rows = {path: _put_rows(stacked[path], g, row, span.rows_per_unit) for path, g in sums.items()}
            return self._passed_by(row, dx, dy), {**stacked, **rows}, add(common, everywhere)

        return one

    def _arguments(self, span: Span, row: Array) -> tuple[Params, Params, Array]:
        """A unit's weights and numbers."""
        weights, numbers = _rows((span.uses(self.stacked), jnp.asarray(self.numbers)), row, span.rows_per_unit)
        made = {path: w.astype(self.made_in.get(path, w.dtype)) for path, w in weights.items()}
        return made, self.common, numbers

    def _real(self, row: Array) -> Array:
        """Whether a row is a layer, bool []."""
        return jnp.asarray(self.numbers)[row] >= 0

    def _passed_by(self, row: Array, y: Array, x: Array) -> Array:
        """y of a row that is a layer, x of one that is none."""
        return jnp.where(self._real(row), y, x) if self.padded else y
