"""Loops over the layers of a chunk: the forward pass saves residuals, the backward pass accumulates gradients.

Nothing differentiates through a loop: `jax.vjp` is called for each layer where it runs. The residuals are written to
ring buffers at [slot, layer]. The buffers contain no weights: `jax.vjp` keeps the inputs it needs separately, and they
are put back for the backward pass.

Weight gradients are accumulated in place. A matrix enters its layer in the dtype of its accumulator, so its gradient is
computed in that dtype (see `Layout.dot`), and the compiler fuses "slice, matmul, add, update" into one matmul that
adds to the accumulator. It can do so only if the row is a function of the loop index, so callers pass a chunk's first
row as a Python integer where possible.

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
"""For each span: [slots, units, ...] for each residual of a unit."""


def entry(tree: Any, index: Array) -> Any:
    """Element `index` along the leading dimension of every array."""
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
    """`total` with `new` added to its paths; observations are combined by their reduction.

    Frozen weights have no total, so the compiler eliminates the computation of their gradients.
    """
    return {**total, **{path: accumulated(path, total[path], g) for path, g in new.items() if path in total}}


def differentiated(unit: Callable[..., Array], *inputs: Any) -> tuple[Array, Any]:
    """A unit's output and its vjp, without its saved inputs except x. inputs: weights, common, numbers, x, ctx."""
    y, pullback = jax.vjp(unit, *inputs)
    saved = pullback.args_res  # ty: ignore[missing-attribute]  # jax annotates its VJP object as a plain callable
    saved[:3], saved[4] = [None] * 3, None
    return y, pullback


def _rows[T](tree: T, first: Array, count: int) -> T:
    """Row `first` of every array; for count > 1, that many rows from there on."""
    if count == 1:
        return entry(tree, first)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, count, allow_negative_indices=False), tree)


def _put_rows(array: Array, value: Array, first: Array, count: int) -> Array:
    """The array with the rows that `_rows` reads replaced."""
    value = value if count > 1 else value[None]
    return lax.dynamic_update_slice_in_dim(array, value, first, 0, allow_negative_indices=False)


@dataclass(frozen=True)
class LayerLoop:
    """The rows of stacked weights on a device, and the loops over them."""

    spans: Sequence[Span]
    """The layers of a chunk."""
    layout: Layout
    stacked: Params
    """[chunks * rows, ...], in the layout in which layers use them."""
    common: Params
    """Weights that every layer uses, by their paths in the model."""
    numbers: Array | np.ndarray
    """Int32 [chunks * rows]: repeat of the stack in each row; -1 for padding."""
    padded: bool
    """Whether there are padding rows."""
    gradient_dtypes: Mapping[str, Any]
    """Path in `stacked` -> dtype of the gradient of a matrix; other gradients have the dtype of their weight."""

    def forward(self, first: Array | int, x: Array, ctx: Any, rings: Rings, slot: Array | int) -> tuple[Array, Rings]:
        """(output, rings with the residuals at `slot`) of the chunk that starts at row `first`."""
        new_rings = []
        for (start, span), ring in zip(self.starts(first), rings, strict=True):

            def step(
                n: Array, carry: tuple, start: Array | int = start, span: Span = span
            ) -> tuple[Array, list[Array]]:
                x, ring = carry
                row = start + n * span.rows_per_unit
                y, pullback = self._differentiated(span, row, x, ctx)
                ring = [put(a, value, slot, n) for a, value in zip(ring, jax.tree.leaves(pullback), strict=True)]
                return self._skip_padding(row, y, x), ring

            x, ring = lax.fori_loop(0, span.units, step, (x, ring), unroll=span.unroll)
            new_rings.append(ring)
        return x, new_rings

    def backward(
        self, first: Array | int, dy: Array, ctx: Any, rings: Rings, slot: Array | int, totals: tuple[Params, Params]
    ) -> tuple[Array, tuple[Params, Params]]:
        """(gradient of the chunk's input, totals with the gradients added).

        totals: of the stacked and of the common weights. The gradients of padding rows are arbitrary: see
        `without_padding`.
        """
        for (start, span), ring in reversed([*zip(self.starts(first), rings, strict=True)]):
            step = self._backward_step(span, ring, start, slot, ctx)
            dy, stacked, common = lax.fori_loop(0, span.units, step, (dy, *totals), unroll=span.unroll)
            totals = stacked, common
        return dy, totals

    def output(self, first: Array | int, x: Array, ctx: Any) -> Array:
        """Output of the chunk that starts at row `first`, without saving residuals."""
        for start, span in self.starts(first):

            def step(n: Array, x: Array, start: Array | int = start, span: Span = span) -> Array:
                row = start + n * span.rows_per_unit
                return self._skip_padding(row, span.unit(*self._arguments(span, row), x, ctx), x)

            x = lax.fori_loop(0, span.units, step, x)
        return x

    def starts(self, first: Array | int) -> list[tuple[Array | int, Span]]:
        """The spans of a chunk, each with its first row."""
        return [(first + span.start, span) for span in self.spans]

    def buffers(self, slots: int, x: Array, ctx: Any, fill: float) -> Rings:
        """Empty rings. x [B, S, D]: like a layer's input; fill: their approximate initial value."""
        rings: Rings = []
        for span in self.spans:
            rings.append(self._ring(span, slots, self._residuals(span, x, ctx), fill, sum(map(len, rings))))
        return rings

    def without_padding(self, totals: Params) -> Params:
        """Gradients of stacked weights with zeros in the padding rows, whose values are arbitrary (also NaN)."""
        if not self.padded:
            return totals
        real = jnp.asarray(self.numbers) >= 0
        return {path: jnp.where(real.reshape(-1, *[1] * (g.ndim - 1)), g, 0) for path, g in totals.items()}

    def _ring(self, span: Span, slots: int, saved: Any, fill: float, before: int) -> list[Array]:
        """Rings of a unit's residuals: its input has a given layout, the compiler chooses those of the others.

        before: number of earlier rings. Every ring has a different initial value, because the compiler would make one
        buffer of equal ones and copy it, which is slow in host memory.
        """
        inputs = len(jax.tree.leaves(saved.args_res))
        rings = []
        for number, leaf in enumerate(jax.tree.leaves(saved)):
            value = fill + before + number if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
            ring = jnp.full((slots, span.units, *leaf.shape), value, leaf.dtype)
            # The first leaves of a vjp are its saved inputs, of which only x is left.
            ring = self.layout.act(ring, None, None, *RESIDUAL) if number < inputs else ring
            on_host = leaf.memory_space == jax.memory.Space.Host
            rings.append(jax.device_put(ring, jax.memory.Space.Host) if on_host else ring)
        return rings

    def _residuals(self, span: Span, x: Array, ctx: Any) -> Any:
        """A unit's vjp as abstract arrays with their memory spaces, without its inputs."""
        traced, tree = jax.make_jaxpr(lambda: self._differentiated(span, jnp.int32(0), x, ctx)[1], return_shape=True)()
        return jax.tree.unflatten(jax.tree.structure(tree), traced.out_avals)

    def _differentiated(self, span: Span, row: Array, x: Array, ctx: Any) -> tuple[Array, Any]:
        """A unit's output and its vjp, see `differentiated`."""
        return differentiated(span.unit, *self._arguments(span, row), x, ctx)

    def _backward_step(
        self, span: Span, ring: list[Array], start: Array | int, slot: Array | int, ctx: Any
    ) -> Callable[[Array, tuple], tuple]:
        """(units done, (gradient of the output, totals)) -> (gradient, totals) after one more unit."""

        def step(done: Array, carry: tuple) -> tuple:
            dy, stacked, common = carry
            n = span.units - 1 - done
            row = start + n * span.rows_per_unit
            tree = jax.tree.structure(self._residuals(span, dy, ctx))
            pullback = jax.tree.unflatten(tree, [take(a, slot, n) for a in ring])
            pullback.args_res[:3], pullback.args_res[4] = self._arguments(span, row), ctx
            gradients, of_common, _, dx, _ = pullback(dy)
            if self.padded:
                of_common = {path: jnp.where(self._is_layer(row), g, 0) for path, g in of_common.items()}
            sums = add(_rows(span.uses(stacked), row, span.rows_per_unit), gradients)
            rows = {path: _put_rows(stacked[path], g, row, span.rows_per_unit) for path, g in sums.items()}
            return self._skip_padding(row, dx, dy), {**stacked, **rows}, add(common, of_common)

        return step

    def _arguments(self, span: Span, row: Array) -> tuple[Params, Params, Array]:
        """A unit's weights and numbers."""
        weights, numbers = _rows((span.uses(self.stacked), jnp.asarray(self.numbers)), row, span.rows_per_unit)
        cast = {path: w.astype(self.gradient_dtypes.get(path, w.dtype)) for path, w in weights.items()}
        return cast, self.common, numbers

    def _is_layer(self, row: Array) -> Array:
        """False for a padding row, bool []."""
        return jnp.asarray(self.numbers)[row] >= 0

    def _skip_padding(self, row: Array, y: Array, x: Array) -> Array:
        """y for a layer, x for a padding row."""
        return jnp.where(self._is_layer(row), y, x) if self.padded else y
