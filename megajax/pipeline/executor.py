"""Runs a schedule's table, forwards and backwards of all stages tick by tick, in a shard_map manual over `pipeline`.

Nothing differentiates through a loop: each layer's vjp is taken where it runs, what it saves goes to the ring at
[slot, layer], its weight gradient to a float32 accumulator. The ring never holds weights: `jax.vjp` keeps the inputs it
needs apart from what it saves, and they are put back at the backward.

A tick is arranged so that what goes between stages travels while layers compute:

    gradient to the stage before, gradient of the loss,
    gradient of the embedding, next embedding               | while the forward runs
    output to the stage after, output to all for the loss   | while the backward runs

Idle stages compute on whatever is there; what they make is never added (`where`, not a product: it may be NaN).

B rows, S positions, D hidden; P stages, V chunks of each, L rows of stacked weights in a chunk, M microbatches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.batch import Params
from megajax.mesh.layout import Layout
from megajax.pipeline.partition import Partition
from megajax.pipeline.schedule import Schedule, Work, entering
from megajax.precision.maxima import added

AXIS = "pipeline"
RESIDUAL = ("batch", "seq_residual", "embed")

type Rows = Any
"""The leaves of a microbatch: those of a batch without the leading dimension."""
type Sums = Any
"""What a head reports, added up over microbatches."""
type Which = Literal["none", "some", "all"]


class Staged(NamedTuple):
    """A model as a pipeline sees it. `shared` are the weights outside the stack, each stage with its share of them."""

    context: Callable[[Rows], Any]
    """rows -> what layers know of them besides activations; not differentiated."""
    look_up: Callable[[Params, Rows], Array]
    """(shared, rows) -> embeddings [B, S, D], by all stages together; the same on all of them, as is the cotangent."""
    enter: Callable[[Params, Array, Any], Array]
    """(shared, embeddings, context) -> input of the first layer [B, S, D]."""
    spans: Sequence["Span"]
    """The layers of a chunk, by what they keep for the backward pass."""
    common: Callable[[Params], Params]
    """shared -> those of them that every layer uses; by their paths in `shared`."""
    head: Callable[[Params, Array, Rows], tuple[Array, Sums]]
    """(shared, x, rows) -> loss to differentiate [] and what to report; its gradients are a stage's parts."""


class Span(NamedTuple):
    """Rows of a chunk that follow each other and keep the same for the backward pass."""

    units: int
    """How often `unit` is applied."""
    together: int
    """Rows it takes: n."""
    unit: Callable[[Params, Params, Array, Array, Any], Array]
    """(rows of the stacked weights, common weights, the rows' numbers, x, context) -> x; [n, ...] of each for n > 1."""
    unroll: int
    """Units written out in each turn of a loop over them."""


class Segment(NamedTuple):
    """Ticks [start, stop) of one loop."""

    start: int
    stop: int
    forward: bool
    backward: bool
    head: Which
    """In which of its ticks a loss is made."""


class Carry(NamedTuple):
    """What goes from tick to tick."""

    x: Array
    """Input of the next forward, from the stage before."""
    embedded: Array
    """Embeddings of the microbatch that enters stage 0 next, as they are looked up."""
    dx: Array
    """Gradient with respect to the input of the last backward."""
    ready: Array
    """On all stages, the output whose loss is made next."""
    outputs: Array
    """[output slots, B, S, D]: on the last stage, outputs that wait for their loss."""
    rings: list[list[Array]]
    """For each span [slots, units, ...] for each array that a unit saves."""
    stacked: Params
    """Gradients of the stacked weights, added up."""
    shared: Params
    """Gradients of the others, added up: of what is not cut over stages, each stage's part."""
    sums: Sums


def segments(schedule: Schedule) -> list[Segment]:
    """The schedule's phases, cut further where losses begin and end. Raises ValueError for a split backward."""
    if schedule.split_backward:
        raise ValueError(f"schedule {schedule.name} has weight gradients apart, which the executor does not run")
    losses = np.flatnonzero(schedule.head >= 0)
    edges = {edge for phase in schedule.phases for edge in phase[:2]} | {int(losses[0]), int(losses[-1]) + 1}
    found = []
    for start, stop in pairwise(sorted(edges)):
        phase = next(phase for phase in schedule.phases if phase.start <= start < phase.stop)
        found.append(Segment(start, stop, phase.forward, phase.input_gradient, _which(schedule.head[start:stop])))
    return found


def _which(microbatches: np.ndarray) -> Which:
    busy = microbatches >= 0
    return "all" if busy.all() else "some" if busy.any() else "none"


def _at(tree: Any, index: Array) -> Any:
    """Entry `index` along the leading dimension of every array."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def _put(array: Array, value: Array, *index: Array) -> Array:
    """The array with `value` at these leading indices."""
    return lax.dynamic_update_slice(array, value[(None,) * len(index)], (*index, *[0] * value.ndim))


def _take(array: Array, *index: Array) -> Array:
    """The array at these leading indices."""
    rest = array.shape[len(index) :]
    return lax.dynamic_slice(array, (*index, *[0] * len(rest)), (*[1] * len(index), *rest)).reshape(rest)


def _rows[T](tree: T, first: Array, count: int) -> T:
    """Row `first` of every array, or of several the rows from there on."""
    if count == 1:
        return _at(tree, first)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, count), tree)


def _put_rows(array: Array, value: Array, first: Array, count: int) -> Array:
    """The array with what `_rows` takes replaced."""
    return lax.dynamic_update_slice_in_dim(array, value if count > 1 else value[None], first, 0)


def _add(total: Params, new: Mapping[str, Array]) -> Params:
    return {path: added(path, total[path], g) for path, g in new.items()}


def _where(counts: Array, new: Mapping[str, Array]) -> Params:
    return {path: jnp.where(counts, g, 0) for path, g in new.items()}


def _repeat(segment: tuple[int, int], tick: Callable[[Array, Any], Any], carry: Any) -> Any:
    """The ticks [start, stop) one after the other."""
    start, stop = segment
    return lax.fori_loop(start, stop, tick, carry) if stop > start + 1 else tick(jnp.int32(start), carry)


@dataclass(frozen=True)
class Stage:
    """One stage's part in a schedule; made and used within the shard_map."""

    schedule: Schedule
    partition: Partition
    staged: Staged
    layout: Layout
    stacked: Params
    """[V * L, ...]: this stage's rows, as layers use them."""
    shared: Params
    cut: frozenset[str]
    """Paths of the shared weights that are cut over the stages."""
    batch: Rows
    """Leaves [M, ...]: this device's rows of every microbatch."""

    @property
    def index(self) -> Array:
        return lax.axis_index(AXIS)

    @property
    def last(self) -> Array:
        return self.index == self.schedule.stages - 1

    def gradients(
        self, scale: Array, zeros: Callable[[Params], Params], *, fill: float = 0.0
    ) -> tuple[Sums, dict[str, Array], dict[str, Array]]:
        """What the heads report, and the gradients of the stacked and of the shared weights, times `scale`.

        zeros: accumulators for the gradients of weights. fill: what buffers hold before they are written; nothing
        depends on it, which tests show with NaN.
        """
        carry = self.start(zeros, fill)
        for segment in segments(self.schedule):
            if segment.head != "none" and self.early:
                carry = carry._replace(ready=self.to_all(self.waiting(carry.outputs, jnp.int32(segment.start))))

            def tick(tick: Array, carry: Carry, segment: Segment = segment) -> Carry:
                return self.tick(segment, tick, carry, scale)

            carry = _repeat(segment[:2], tick, carry)
        end = jnp.int32(self.schedule.ticks)
        shared = self.embedding_gradient(end, self.left(end, carry.dx), carry.shared)
        return carry.sums, dict(carry.stacked), dict(shared)

    def losses(self) -> Sums:
        """What the heads report, by forwards alone."""
        leaving = entering(self.schedule.forward, self.schedule.stages - 1, self.schedule.chunks - 1)
        first, last = int(np.flatnonzero(leaving >= 0)[0]), int(np.flatnonzero(leaving >= 0)[-1])
        embedded = self.look_up(jnp.int32(0))
        x = self.blank(embedded, 0.0)
        carry = x, embedded, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.reported(x))
        for span in ((0, first), (first, last + 1)):
            which = _which(leaving[slice(*span)])

            def tick(tick: Array, carry: tuple, which: Which = which) -> tuple:
                x, embedded, sums = carry
                x, ctx, chunk, _ = self.enter(tick, x, embedded)

                y = x
                for first, span in self.spans():
                    y = lax.fori_loop(
                        0, span.units, lambda n, y, s=span, f=first: self.apply(s, self.row(chunk, f, s, n), y, ctx), y
                    )
                if which != "none":
                    ready, microbatch = self.to_all(y), jnp.asarray(leaving)[tick]
                    sums = self.maybe(
                        which,
                        microbatch,
                        lambda sums: jax.tree.map(
                            jnp.add, sums, self.staged.head(self.shared, ready, self.rows(microbatch))[1]
                        ),
                        sums,
                    )
                return self.shift(y, 1), self.look_up(tick + 1), sums

            carry = _repeat(span, tick, carry) if span[1] > span[0] else carry
        return carry[2]

    @property
    def early(self) -> bool:
        """Losses are made at the start of a tick, of outputs that waited; otherwise of the tick's own output."""
        return self.schedule.output_slots > 0

    def start(self, zeros: Callable[[Params], Params], fill: float) -> Carry:
        """Before the first tick."""
        schedule, embedded = self.schedule, self.look_up(jnp.int32(0))
        blank = self.blank(embedded, fill)
        outputs = jnp.full((schedule.output_slots, *blank.shape), fill, blank.dtype)
        sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.reported(blank))
        return Carry(
            x=blank,
            embedded=embedded,
            dx=blank,
            ready=blank,
            outputs=self.layout.act(outputs, None, *RESIDUAL),
            rings=[self.buffers(span, self.saved(span, blank), fill) for span in self.staged.spans],
            stacked=zeros(self.stacked),
            shared=zeros(self.shared),
            sums=sums,
        )

    def blank(self, embedded: Array, fill: float) -> Array:
        """What goes between stages before the first tick, like the input of a layer."""
        ctx = self.staged.context(self.rows(jnp.int32(0)))
        like = jax.eval_shape(lambda: self.staged.enter(self.shared, embedded, ctx))
        return self.layout.act(jnp.full(like.shape, fill, like.dtype), *RESIDUAL)

    def buffers(self, span: Span, saved: Any, fill: float) -> list[Array]:
        """The rings of the arrays that a unit saves: its input laid out as such, the others as the compiler likes."""
        inputs = len(jax.tree.leaves(saved.args_res))
        rings = []
        for place, leaf in enumerate(jax.tree.leaves(saved)):
            value = fill if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
            ring = jnp.full((self.schedule.ring_slots, span.units, *leaf.shape), value, leaf.dtype)
            # A vjp lists the inputs it keeps before all else; x is the only one left among them.
            ring = self.layout.act(ring, None, None, *RESIDUAL) if place < inputs else ring
            on_host = leaf.memory_space == jax.memory.Space.Host
            rings.append(jax.device_put(ring, jax.memory.Space.Host) if on_host else ring)
        return rings

    def reported(self, x: Array) -> Sums:
        """Shapes of what a head reports."""
        return jax.eval_shape(lambda: self.staged.head(self.shared, x, self.rows(jnp.int32(0)))[1])

    def saved(self, span: Span, x: Array) -> Any:
        """A unit's vjp as abstract arrays with their memory, without its inputs."""
        ctx = self.staged.context(self.rows(jnp.int32(0)))
        traced, tree = jax.make_jaxpr(lambda: self.differentiated(span, jnp.int32(0), x, ctx)[1], return_shape=True)()
        return jax.tree.unflatten(jax.tree.structure(tree), traced.out_avals)

    def spans(self) -> list[tuple[int, Span]]:
        """Each with the row of a chunk it begins at."""
        firsts = np.cumsum([0, *(span.units * span.together for span in self.staged.spans)])
        return [*zip(firsts.tolist(), self.staged.spans, strict=False)]

    def row(self, chunk: Array, first: int, span: Span, unit: Array) -> Array:
        """Of the stacked weights, where a unit of a span begins."""
        return chunk * self.partition.rows + first + unit * span.together

    def apply(self, span: Span, row: Array, x: Array, ctx: Any) -> Array:
        """A unit's output."""
        return self.passed_by(row, span.unit(*self.arguments(span, row), x, ctx), x)

    def tick(self, segment: Segment, tick: Array, c: Carry, scale: Array) -> Carry:
        """One tick of a segment."""
        from_after = from_loss = left = None
        if segment.backward:
            from_after, left = self.shift(c.dx, -1), self.left(tick, c.dx)
        if segment.head != "none" and self.early:
            c, from_loss = self.loss(segment.head, tick, c, scale)
        if segment.forward:
            embedded = self.look_up(tick + 1)
            y, rings = self.forward(tick, c)
            # What travelled during the forward is used after it; without this it would be waited for before.
            travelled = from_after, from_loss, left, embedded
            (from_after, from_loss, left, embedded), y = lax.optimization_barrier((travelled, y))
            c = c._replace(rings=rings, x=self.shift(y, 1), embedded=embedded, outputs=self.keep(tick, y, c))
            if segment.head != "none" and not self.early:
                c, from_loss = self.loss(segment.head, tick, c._replace(ready=self.to_all(y)), scale)
        if segment.head != "none" and self.early:
            c = c._replace(ready=self.to_all(self.waiting(c.outputs, tick + 1)))
        if segment.backward:
            c = c._replace(shared=self.embedding_gradient(tick, left, c.shared))
            dx, stacked, shared = self.backward(tick, from_after, from_loss, c)
            (x, ready), dx = lax.optimization_barrier(((c.x, c.ready), dx))
            c = c._replace(x=x, ready=ready, dx=dx, stacked=stacked, shared=shared)
        return c

    def enter(self, tick: Array, x: Array, embedded: Array) -> tuple[Array, Any, Array, Array]:
        """A forward's (input, context, chunk, slot); x: what came from the stage before."""
        microbatch, chunk, slot = self.entry(self.schedule.forward, tick)
        ctx = self.staged.context(self.rows(microbatch))
        first = (self.index == 0) & (chunk == 0)
        return jnp.where(first, self.staged.enter(self.shared, embedded, ctx), x), ctx, chunk, slot

    def forward(self, tick: Array, c: Carry) -> tuple[Array, list[list[Array]]]:
        """(output, rings) of the tick's forward."""
        x, ctx, chunk, slot = self.enter(tick, c.x, c.embedded)
        rings = []
        for (first, span), ring in zip(self.spans(), c.rings, strict=True):

            def one(n: Array, carry: tuple, first: int = first, span: Span = span) -> tuple[Array, list[Array]]:
                x, ring = carry
                row = self.row(chunk, first, span, n)
                y, pull = self.differentiated(span, row, x, ctx)
                ring = [_put(a, value, slot, n) for a, value in zip(ring, jax.tree.leaves(pull), strict=True)]
                return self.passed_by(row, y, x), ring

            x, ring = lax.fori_loop(0, span.units, one, (x, ring), unroll=span.unroll)
            rings.append(ring)
        return x, rings

    def differentiated(self, span: Span, row: Array, x: Array, ctx: Any) -> tuple[Array, Any]:
        """A unit's output and its vjp, from which all inputs but x are taken out."""
        y, pull = jax.vjp(span.unit, *self.arguments(span, row), x, ctx)
        pull.args_res[:3], pull.args_res[4] = [None] * 3, None
        return y, pull

    def arguments(self, span: Span, row: Array) -> tuple[Params, Params, Array]:
        """A unit's weights and numbers."""
        numbers = jnp.asarray(self.partition.numbers())[self.index]
        weights, numbers = _rows((self.stacked, numbers), row, span.together)
        return weights, self.staged.common(self.shared), numbers

    def loss(self, which: Which, tick: Array, c: Carry, scale: Array) -> tuple[Carry, Array]:
        """Loss of `ready`: what is reported and weight gradients added up, and the gradient of the output."""
        microbatch = jnp.asarray(self.schedule.head)[tick]

        def made(carry: tuple[Sums, Params, Array]) -> tuple[Sums, Params, Array]:
            sums, shared, _ = carry
            rows = self.rows(microbatch)
            _, pull, new = jax.vjp(lambda w, x: self.staged.head(w, x, rows), self.shared, c.ready, has_aux=True)
            gradients, dy = pull(scale)
            return jax.tree.map(jnp.add, sums, new), _add(shared, gradients), dy

        sums, shared, dy = self.maybe(which, microbatch, made, (c.sums, c.shared, jnp.zeros_like(c.ready)))
        return c._replace(sums=sums, shared=shared), self.over_stages(dy)

    def backward(
        self, tick: Array, from_after: Array, from_loss: Array | None, c: Carry
    ) -> tuple[Array, Params, Params]:
        """(gradient of the chunk's input, gradients of the stacked and of the shared weights) after the tick."""
        microbatch, chunk, slot = self.entry(self.schedule.input_gradient, tick)
        ctx, live = self.staged.context(self.rows(microbatch)), microbatch >= 0
        dy, stacked, shared = from_after, c.stacked, c.shared
        if from_loss is not None:
            dy = jnp.where(self.last & (chunk == self.schedule.chunks - 1), from_loss, dy)
        for (first, span), ring in reversed([*zip(self.spans(), c.rings, strict=True)]):
            one = self.pulled(span, ring, (chunk, first, slot), ctx, live)
            common = {path: shared[path] for path in self.staged.common(shared)}
            carry = dy, stacked, common
            dy, stacked, common = lax.fori_loop(0, span.units, one, carry, unroll=span.unroll)
            shared = {**shared, **common}
        return dy, stacked, shared

    def pulled(
        self, span: Span, ring: list[Array], place: tuple[Array, int, Array], ctx: Any, live: Array
    ) -> Callable[[Array, tuple], tuple]:
        """(units done, (gradient of the output, of stacked and of common weights)) -> those after one unit more.

        place: (chunk, row in it where the span begins, slot); live: whether this is more than an idle tick.
        """
        chunk, first, slot = place

        def one(done: Array, carry: tuple) -> tuple:
            dy, stacked, common = carry
            n = span.units - 1 - done
            row = self.row(chunk, first, span, n)
            tree = jax.tree.structure(self.saved(span, dy))
            pull = jax.tree.unflatten(tree, [_take(a, slot, n) for a in ring])
            pull.args_res[:3], pull.args_res[4] = self.arguments(span, row), ctx
            gradients, everywhere, _, dx, _ = pull(dy)
            counts = live & (self.number(row) >= 0) if self.partition.padded() else live
            sums = _add(_rows(stacked, row, span.together), _where(counts, gradients))
            stacked = {path: _put_rows(stacked[path], g, row, span.together) for path, g in sums.items()}
            return self.passed_by(row, dx, dy), stacked, _add(common, _where(counts, everywhere))

        return one

    def leaving(self, tick: Array) -> Array:
        """Microbatch whose gradient left stage 0 in the tick before; -1 for none."""
        return jnp.asarray(np.concatenate([[-1], self.schedule.embed_gradient]).astype(np.int32))[tick]

    def left(self, tick: Array, dx: Array) -> Array:
        """On all stages, what left stage 0 in the tick before; zeros where nothing did."""
        return self.over_stages(jnp.where((self.index == 0) & (self.leaving(tick) >= 0), dx, 0))

    def embedding_gradient(self, tick: Array, left: Array, shared: Params) -> Params:
        """`shared` with what that adds to it."""
        rows = self.rows(self.leaving(tick))
        ctx = self.staged.context(rows)
        _, pull = jax.vjp(lambda w: self.staged.enter(w, self.staged.look_up(w, rows), ctx), self.shared)
        gradients = pull(left)[0]
        # All stages make the gradient of what is not cut over them, which is summed over stages in the end.
        once = {path: g if path in self.cut else jnp.where(self.index == 0, g, 0) for path, g in gradients.items()}
        return _add(shared, once)

    def keep(self, tick: Array, y: Array, c: Carry) -> Array:
        """`outputs` after a forward."""
        if not self.early:
            return c.outputs
        slot = jnp.asarray(self.schedule.output_kept)[tick]
        place = jnp.maximum(slot, 0)
        return _put(c.outputs, jnp.where(slot >= 0, y, _take(c.outputs, place)), place)

    def waiting(self, outputs: Array, tick: Array) -> Array:
        """The output whose loss is made at a tick; any one where none is."""
        slot = jnp.asarray(self.schedule.output_taken)[jnp.minimum(tick, self.schedule.ticks - 1)]
        return _take(outputs, jnp.maximum(slot, 0))

    def maybe[T](self, which: Which, microbatch: Array, work: Callable[[T], T], carry: T) -> T:
        """work(carry) where there is a microbatch; all devices agree on that, so collectives within are safe."""
        return work(carry) if which == "all" else lax.cond(microbatch >= 0, work, lambda carry: carry, carry)

    def rows(self, microbatch: Array) -> Rows:
        """A microbatch; the first one for an idle stage, to have something to compute on."""
        return _at(self.batch, jnp.maximum(microbatch, 0))

    def entry(self, work: Work, tick: Array) -> tuple[Array, Array, Array]:
        """(microbatch or -1, chunk, slot) of this stage in a tick."""
        microbatch, chunk, slot = (jnp.asarray(table)[tick, self.index] for table in work)
        return microbatch, chunk, slot

    def number(self, row: Array) -> Array:
        """Of the repeat that a row of the stacked weights holds; -1 for none."""
        return jnp.asarray(self.partition.numbers())[self.index, row]

    def passed_by(self, row: Array, y: Array, x: Array) -> Array:
        """y of a row that is a layer, x of one that is none."""
        return jnp.where(self.number(row) >= 0, y, x) if self.partition.padded() else y

    def look_up(self, tick: Array) -> Array:
        """Embeddings of the microbatch that enters at a tick; of any one where none does."""
        microbatch = jnp.asarray(self.schedule.embed)[jnp.minimum(tick, self.schedule.ticks - 1)]
        return self.staged.look_up(self.shared, self.rows(microbatch))

    def shift(self, x: Array, step: Literal[1, -1]) -> Array:
        """x to the next stage (1) or the one before (-1), around the end only where chunks follow each other there."""
        stages, around = self.schedule.stages, self.schedule.chunks > 1
        pairs = [(s, (s + step) % stages) for s in range(stages) if around or 0 <= s + step < stages]
        return lax.ppermute(x, AXIS, pairs)

    def to_all(self, y: Array) -> Array:
        """The last stage's y, on every stage."""
        return self.over_stages(jnp.where(self.last, y, 0))

    def over_stages(self, x: Array) -> Array:
        """x [B, S, D] summed over the stages."""
        # In an island: a sum in bfloat16 over one manual axis, with others left to the compiler, aborts on CPU.
        return self.layout.island(lambda x: lax.psum(x, AXIS), (RESIDUAL,), RESIDUAL)(x)
