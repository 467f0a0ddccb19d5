"""Loops over the layers of a chunk: the forward pass saves residuals, the backward pass accumulates gradients.

Nothing differentiates through a loop: `jax.vjp` is called for each layer where it runs. The residuals are written to
ring buffers at [slot, layer]. The buffers contain no weights: they are removed from the inputs that `jax.vjp` saves,
and restored for the backward pass.

Weight gradients are accumulated in place. A matrix enters its layer in the dtype of its accumulator, so its gradient is
computed in that dtype (see `Layout.dot`), and the compiler fuses "slice, matmul, add, update" into one matmul that
adds to the accumulator. It can do so only if the row is a function of the loop index, so callers pass a chunk's
number as a Python integer where possible.

Chunks with different layers run one program: each span is a loop whose number of iterations, possibly 0, is data, and
so are the rows of its weights.

B rows, S positions, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.batch import Params
from megajax.layers.context import Context
from megajax.layers.stack.spans import PerChunk, Span
from megajax.mesh.layer_observations import accumulated
from megajax.mesh.layout import Layout

RESIDUAL = ("batch", "seq_residual", "embed")

type Rings = list[list[Array]]
"""For each ring of the spans: [slots, units, ...] for each residual of a unit."""
type Slots = Sequence[Array | int]
"""The slot of each microbatch that runs."""


def entry[T](tree: T, index: Array) -> T:
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
    """A unit's output and its vjp, with no saved inputs but x. inputs: weights, common, numbers, x, ctx."""
    y, pullback = jax.vjp(unit, *inputs)
    saved = pullback.args_res  # ty: ignore[missing-attribute]  # jax annotates its VJP object as a plain callable
    saved[:3], saved[4] = [None] * 3, None
    return y, pullback


def _rows[T](tree: T, first: Array, count: int) -> T:
    """Row `first` of every array; for count > 1, `count` rows from `first` on."""
    if count == 1:
        return entry(tree, first)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, count, allow_negative_indices=False), tree)


def _put_rows(array: Array, value: Array, first: Array, count: int) -> Array:
    """The array with the rows of `_rows` replaced."""
    value = value if count > 1 else value[None]
    return lax.dynamic_update_slice_in_dim(array, value, first, 0, allow_negative_indices=False)


class Turn(NamedTuple):
    """A span in one chunk."""

    span: Span
    count: Array | int
    """Number of units."""
    rows: tuple[Array | int, ...]
    """For each place of a unit, the row of the first unit."""
    kept_at: Array | int
    """Index of the first unit's residuals in the ring."""
    layer: Array | int | None
    """Number of the first layer, see `Span`."""

    def row(self, place: int, n: Array) -> Array:
        """First row of unit n."""
        return self.rows[place] + n * self.span.places[place].stride


class Pass(NamedTuple):
    """A microbatch that passes through layers, forwards or backwards."""

    value: Array
    """[B, S, D]: their input, or the gradient of their output."""
    ctx: Context
    slot: Array | int
    """Where its residuals are in the rings."""


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
    numbers: Array | np.ndarray | None
    """Int32 [chunks * rows]: number of the first layer of each repeat, -1 for padding; None if spans have them."""
    padded: bool
    """Whether loops run over padding rows."""
    gradient_dtypes: Mapping[str, Any]
    """Path in `stacked` -> dtype of the gradient of a matrix; other gradients have the dtype of their weight."""
    stage: Array | int = 0
    """Index of the device's stage."""
    stages: int = 1

    def forward(
        self, chunk: Array | int, xs: tuple[Array, ...], ctxs: Sequence[Any], rings: Rings, slots: Slots
    ) -> tuple[tuple[Array, ...], Rings]:
        """(outputs, rings with the residuals at `slots`) of a chunk of this stage, for microbatches side by side.

        xs, ctxs, slots: input, context and slot of each microbatch. A layer computes all of them in one iteration.
        """
        rings = [*rings]
        for turn in self.turns(chunk):

            def step(n: Array, carry: tuple, turn: Turn = turn) -> tuple[tuple[Array, ...], list[Array]]:
                xs, ring = carry
                ys = []
                for x, ctx, slot in zip(xs, ctxs, slots, strict=True):
                    y, ring = self._forward_step(turn, n, Pass(x, ctx, slot), ring)
                    ys.append(y)
                return tuple(ys), ring

            xs, rings[turn.span.ring] = self._loop(turn, step, (xs, rings[turn.span.ring]))
        return xs, rings

    def backward(
        self,
        chunk: Array | int,
        dys: tuple[Array, ...],
        ctxs: Sequence[Any],
        rings: Rings,
        slots: Slots,
        totals: tuple[Params, Params],
    ) -> tuple[tuple[Array, ...], tuple[Params, Params]]:
        """(gradients of the chunk's inputs, totals with the gradients added); see `forward`.

        totals: of the stacked and of the common weights. The gradients of padding rows are arbitrary: see
        `without_padding`.
        """
        for turn in reversed(self.turns(chunk)):

            def step(finished: Array, carry: tuple, turn: Turn = turn) -> tuple:
                dys, sums = carry
                n, dxs = turn.count - 1 - finished, []
                for dy, ctx, slot in zip(dys, ctxs, slots, strict=True):
                    residuals = self._residuals_at(turn, n, rings[turn.span.ring], slot)
                    dx, sums = self._backward_step(turn, n, Pass(dy, ctx, slot), residuals, sums)
                    dxs.append(dx)
                return tuple(dxs), sums

            dys, totals = self._loop(turn, step, (dys, totals))
        return dys, totals

    def forward_and_backward(
        self, forward: Pass, backward: Pass, rings: Rings, totals: tuple[Params, Params]
    ) -> tuple[Array, Array, Rings, tuple[Params, Params]]:
        """(output, gradient of the input, rings, totals) of a forward of one microbatch beside a backward of another.

        One iteration computes a layer of each, so that either hides the collectives of the other. For one chunk with
        one span of as many units on every stage. See `forward` and `backward`.
        """
        (turn,) = self.turns(0)

        def step(finished: Array, carry: tuple) -> tuple:
            x, dy, ring, sums = carry
            n = turn.count - 1 - finished
            # The compiler can't tell that the slots differ: without an order, it would copy the whole ring.
            residuals, ring = lax.optimization_barrier((self._residuals_at(turn, n, ring, backward.slot), ring))
            y, ring = self._forward_step(turn, finished, forward._replace(value=x), ring)
            dx, sums = self._backward_step(turn, n, backward._replace(value=dy), residuals, sums)
            return y, dx, ring, sums

        carry = forward.value, backward.value, rings[turn.span.ring], totals
        y, dx, ring, totals = self._loop(turn, step, carry)
        return y, dx, [ring], totals

    def part(self, begin: int, end: int | None = None) -> "LayerLoop":
        """The loops over units [begin, end) of the only span; end: None for all others."""
        (span,) = self.spans
        return replace(self, spans=[span.part(begin, span.units if end is None else end)])

    def output(self, chunk: Array | int, x: Array, ctx: Context) -> Array:
        """Output of a chunk of this stage, without saving residuals."""
        for turn in self.turns(chunk):

            def step(n: Array, x: Array, turn: Turn = turn) -> Array:
                return self._skip_padding(turn, n, turn.span.unit(*self._arguments(turn, n), x, ctx), x)

            x = lax.fori_loop(0, turn.count, step, x)
        return x

    def turns(self, chunk: Array | int) -> list[Turn]:
        """The spans of a chunk of this stage."""
        number = chunk * self.stages + self.stage

        def of(values: PerChunk) -> Array | int:
            return values if isinstance(values, int) else jnp.asarray(values)[number]

        return [
            Turn(
                span,
                of(span.counts),
                tuple(chunk * place.rows + of(place.start) for place in span.places),
                of(span.kept_at),
                None if span.layer is None else of(span.layer),
            )
            for span in self.spans
        ]

    def buffers(self, slots: int, x: Array, ctx: Context, fill: float) -> Rings:
        """Empty rings. x [B, S, D]: like a layer's input; fill: their approximate initial value."""
        rings: Rings = []
        for turn in self.turns(0):
            if turn.span.ring == len(rings):
                saved = self._residuals(turn, x, ctx)
                rings.append(self._ring(turn, slots, saved, fill, sum(map(len, rings))))
        return rings

    def without_padding(self, totals: Params) -> Params:
        """Gradients of stacked weights with zeros in the padding rows, whose values are arbitrary (also NaN)."""
        if not self.padded:
            return totals
        real = jnp.asarray(self.numbers) >= 0
        return {path: jnp.where(real.reshape(-1, *[1] * (g.ndim - 1)), g, 0) for path, g in totals.items()}

    def _loop[T](self, turn: Turn, step: Callable[[Array, T], T], carry: T) -> T:
        """Runs all units; the loop is unrolled only if all chunks have the same number of units.

        Otherwise its name tells the reader of the compiled program how many units a chunk has, on average.
        """
        counts = turn.span.counts
        if isinstance(counts, int):
            return lax.fori_loop(0, turn.count, step, carry, unroll=turn.span.unroll)
        with jax.named_scope(f"runs_{sum(counts)}_of_{len(counts)}"):
            return lax.fori_loop(0, turn.count, step, carry)

    def _ring(self, turn: Turn, slots: int, saved: Any, fill: float, before: int) -> list[Array]:
        """Rings of a unit's residuals. Its input has the layout RESIDUAL; the compiler chooses the other layouts.

        before: number of earlier rings. Every ring has a different initial value: the compiler would merge equal ones
        into one buffer and copy it, which is slow in host memory.
        """
        inputs = len(jax.tree.leaves(saved.args_res))
        rings = []
        for number, leaf in enumerate(jax.tree.leaves(saved)):
            value = fill + before + number if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
            ring = jnp.full((slots, turn.span.units, *leaf.shape), value, leaf.dtype)
            # The first leaves of a vjp are its saved inputs; only x remains of them.
            ring = self.layout.act(ring, None, None, *RESIDUAL) if number < inputs else ring
            on_host = leaf.memory_space == jax.memory.Space.Host
            rings.append(jax.device_put(ring, jax.memory.Space.Host) if on_host else ring)
        return rings

    def _residuals(self, turn: Turn, x: Array, ctx: Context) -> Any:
        """A unit's vjp as abstract arrays with their memory spaces, without its inputs."""
        traced, tree = jax.make_jaxpr(lambda: self._differentiated(turn, jnp.int32(0), x, ctx)[1], return_shape=True)()
        return jax.tree.unflatten(jax.tree.structure(tree), traced.out_avals)

    def _differentiated(self, turn: Turn, n: Array, x: Array, ctx: Context) -> tuple[Array, Any]:
        """A unit's output and its vjp, see `differentiated`."""
        return differentiated(turn.span.unit, *self._arguments(turn, n), x, ctx)

    def _forward_step(self, turn: Turn, n: Array, of: Pass, ring: list[Array]) -> tuple[Array, list[Array]]:
        """(output of unit n, ring with its residuals)."""
        y, pullback = self._differentiated(turn, n, of.value, of.ctx)
        residuals = zip(ring, jax.tree.leaves(pullback), strict=True)
        ring = [put(a, value, of.slot, turn.kept_at + n) for a, value in residuals]
        return self._skip_padding(turn, n, y, of.value), ring

    def _residuals_at(self, turn: Turn, n: Array, ring: list[Array], slot: Array | int) -> list[Array]:
        """The residuals of unit n."""
        return [take(a, slot, turn.kept_at + n) for a in ring]

    def _backward_step(
        self, turn: Turn, n: Array, of: Pass, residuals: list[Array], totals: tuple[Params, Params]
    ) -> tuple[Array, tuple[Params, Params]]:
        """(gradient of the input of unit n, totals with its gradients); residuals: its residuals."""
        dy, (stacked, common) = of.value, totals
        pullback = jax.tree.unflatten(jax.tree.structure(self._residuals(turn, dy, of.ctx)), residuals)
        pullback.args_res[:3], pullback.args_res[4] = self._arguments(turn, n), of.ctx
        gradients, of_common, _, dx, _ = pullback(dy)
        if self.padded:
            of_common = {path: jnp.where(self._is_layer(turn, n), g, 0) for path, g in of_common.items()}
        stacked = self._added(turn, n, stacked, gradients)
        return self._skip_padding(turn, n, dx, dy), (stacked, add(common, of_common))

    def _added(self, turn: Turn, n: Array, totals: Params, gradients: Params) -> Params:
        """Totals of the stacked weights with a unit's gradients; see `add`."""
        totals, used, count = dict(totals), turn.span.used(self.stacked), turn.span.repeats
        for inside, g in gradients.items():
            path, place = used[inside]
            if path in totals:
                row = turn.row(place, n)
                sums = accumulated(path, _rows(totals[path], row, count), g)
                totals[path] = _put_rows(totals[path], sums, row, count)
        return totals

    def _arguments(self, turn: Turn, n: Array) -> tuple[Params, Params, Array]:
        """A unit's weights and numbers."""
        count, cast = turn.span.repeats, {}
        for inside, (path, place) in turn.span.used(self.stacked).items():
            w, dtype = _rows(self.stacked[path], turn.row(place, n), count), self.gradient_dtypes.get(path)
            cast[inside] = w if dtype is None else w.astype(dtype)
        if turn.layer is None:
            return cast, self.common, _rows(jnp.asarray(self.numbers), turn.row(0, n), count)
        size = len(turn.span.places)
        first = turn.layer + n * count * size
        return cast, self.common, first if count == 1 else first + size * jnp.arange(count)

    def _is_layer(self, turn: Turn, n: Array) -> Array:
        """bool []: False for a padding row."""
        return jnp.asarray(self.numbers)[turn.row(0, n)] >= 0

    def _skip_padding(self, turn: Turn, n: Array, y: Array, x: Array) -> Array:
        """y for a layer, x for a padding row."""
        return jnp.where(self._is_layer(turn, n), y, x) if self.padded else y
