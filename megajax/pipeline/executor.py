"""Runs a schedule's table, forwards and backwards of all stages tick by tick, in a shard_map manual over `pipeline`.

`megajax.pipeline.layer_loop` goes through the layers of a chunk. A tick is arranged so that what goes between stages
travels while layers compute:

    gradient to the stage before, gradient of the loss,
    gradient of the embedding, next embedding               | while the forward runs
    output to the stage after, output to all for the loss   | while the backward runs

Which chunk a stage works on differs between stages, so it is data. Each chunk is a loop of one turn or none, within
which its rows are static: there, stacked weights and accumulators are read and written in place (see `layer_loop`).
Idle stages take no turn, so that nothing they would compute, NaN perhaps, is ever added. With one chunk they run the
forward all the same and write it to a slot that nobody reads, which spares the loop.

Embedding and loss are spread over all stages. With one chunk a stage, microbatches enter and leave in every tick of the
steady phase, and the four sums over stages hide behind layers. With several, most ticks have none of them, and a
`lax.cond` leaves them out there. Its predicate depends on the tick alone, so all devices agree on it.

B rows, S positions, D hidden; P stages, V chunks of each, L rows of stacked weights in a chunk, M microbatches.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.batch import Params
from megajax.mesh.layout import Layout
from megajax.pipeline.layer_loop import RESIDUAL, LayerLoop, Rings, add, entry, put, take
from megajax.pipeline.partition import Partition
from megajax.pipeline.schedule import Schedule, Work, entering
from megajax.pipeline.staged import Rows, Staged, Sums

AXIS = "pipeline"

MOST_LOOPS = 8
"""Chunks of a stage up to which each has its own loop in the program. More take too long to compile."""

type Which = Literal["none", "some", "all"]
"""In which ticks of a segment something is done; "some": a `lax.cond` asks in each."""


class Segment(NamedTuple):
    """Ticks [start, stop) of one loop."""

    start: int
    stop: int
    forward: bool
    backward: bool
    head: Which
    """Ticks in which a loss is made."""
    ready: Which
    """Ticks after which a loss is made, so that its input travels in them."""
    embed: Which
    """Ticks before one in which a microbatch enters, so that it is looked up in them."""
    leave: Which
    """Ticks after one in which a gradient left stage 0."""

    def ticks(self, tick: Array, microbatches: np.ndarray) -> "Ticks":
        """This loop's ticks for a kind of work; see `Ticks`."""
        return Ticks(tick, microbatches, self.start, self.stop)

    def busy(self, work: Work, chunk: int | None) -> np.ndarray:
        """Bool [ticks, stages]: whether that chunk, or any, is at work."""
        part = slice(self.start, self.stop)
        return (work.microbatch[part] >= 0) & (chunk is None or work.chunk[part] == chunk)

    def runs(self, work: Work, chunk: int | None) -> str:
        """How many of the ticks have that chunk, or any, at work; see `runs`."""
        return runs(self.busy(work, chunk))


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
    rings: Rings
    """What layers saved, by the schedule's slots."""
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
        kinds = phase.forward, phase.input_gradient
        travelling = (
            _travelling(schedule, after(schedule.head)[start:stop]),
            _travelling(schedule, after(schedule.embed)[start:stop]),
            _travelling(schedule, before(schedule.embed_gradient)[start:stop]),
        )
        found.append(Segment(start, stop, *kinds, _which(schedule.head[start:stop]), *travelling))
    return found


def _which(microbatches: np.ndarray) -> Which:
    busy = microbatches >= 0
    return "all" if busy.all() else "some" if busy.any() else "none"


def _travelling(schedule: Schedule, microbatches: np.ndarray) -> Which:
    """When a sum over stages is made. With one chunk few ticks could do without, and asking would expose it in all."""
    which = _which(microbatches)
    return "all" if which == "some" and schedule.chunks == 1 else which


def after(microbatches: np.ndarray) -> np.ndarray:
    """Int32 [T]: for each tick, the entry of the one after; -1 at the end."""
    return np.append(microbatches[1:], np.int32(-1))


def before(microbatches: np.ndarray) -> np.ndarray:
    """Int32 [T]: for each tick, the entry of the one before; -1 at the start."""
    return np.insert(microbatches[:-1], 0, np.int32(-1))


def _repeat(segment: tuple[int, int], tick: Callable[[Array, Any], Any], carry: Any) -> Any:
    """The ticks [start, stop) one after the other."""
    start, stop = segment
    return lax.fori_loop(start, stop, tick, carry) if stop > start + 1 else tick(jnp.int32(start), carry)


class Ticks(NamedTuple):
    """A loop's current tick, and when something is done in the loop."""

    tick: Array
    microbatches: np.ndarray
    """Int32 [T]: what is worked on in each tick of the schedule; -1 for none."""
    start: int
    stop: int

    @property
    def microbatch(self) -> Array:
        """Worked on in this tick; -1 for none."""
        return jnp.asarray(self.microbatches)[self.tick]

    def marked(self) -> AbstractContextManager:
        """Names operations after how often they run, which a compiled program's text does not say otherwise."""
        return jax.named_scope(runs(self.microbatches[self.start : self.stop] >= 0))


def runs(busy: np.ndarray) -> str:
    """busy bool [ticks] or [ticks, stages] -> "runs_3_of_20": in how many of the ticks, on average over stages."""
    return f"runs_{busy.sum()}_of_{busy.size}"


def maybe[T](ticks: Ticks, which: Which, work: Callable[[T], T], carry: T) -> T:
    """work(carry) in the ticks that have a microbatch; all devices agree on them, so collectives within are safe."""
    if which == "all":
        return work(carry)
    with ticks.marked():
        return lax.cond(ticks.microbatch >= 0, work, lambda carry: carry, carry)


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
    made_in: Mapping[str, Any]
    """See `LayerLoop`."""
    batch: Rows
    """Leaves [M, ...]: this device's rows of every microbatch."""

    @property
    def index(self) -> Array:
        return lax.axis_index(AXIS)

    @property
    def last(self) -> Array:
        return self.index == self.schedule.stages - 1

    @property
    def layers(self) -> LayerLoop:
        """This stage's layers."""
        return LayerLoop(
            self.staged.spans,
            self.layout,
            self.stacked,
            self.staged.common(self.shared),
            jnp.asarray(self.partition.numbers())[self.index],
            self.partition.padded(),
            self.made_in,
        )

    def gradients(
        self, scale: Array, zeros: tuple[Params, Params], *, fill: float = 0.0
    ) -> tuple[Sums, dict[str, Array], dict[str, Array]]:
        """What the heads report, and the gradients of the stacked and of the shared weights, times `scale`.

        zeros: accumulators for the gradients of both. fill: what buffers hold before they are written; nothing
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
        return carry.sums, dict(self.layers.without_padding(carry.stacked)), dict(shared)

    def losses(self) -> Sums:
        """What the heads report, by forwards alone."""
        leaving = entering(self.schedule.forward, self.schedule.stages - 1, self.schedule.chunks - 1)
        first, last = int(np.flatnonzero(leaving >= 0)[0]), int(np.flatnonzero(leaving >= 0)[-1])
        embedded = self.embed(jnp.int32(0))
        x = self.blank(embedded, 0.0)
        carry = x, embedded, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.reported(x))
        for start, stop in ((0, first), (first, last + 1)):
            embed = _travelling(self.schedule, after(self.schedule.embed)[start:stop])
            segment = Segment(start, stop, True, False, _which(leaving[start:stop]), "none", embed, "none")

            def tick(tick: Array, carry: tuple, segment: Segment = segment) -> tuple:
                x, embedded, sums = carry
                x, ctx, chunk, _ = self.enter(tick, x, embedded)
                kind, ticks = self.schedule.forward, segment.ticks(tick, leaving)
                y = self.in_chunk(segment, kind, chunk, lambda first, x: self.layers.output(first, x, ctx), x)

                def made(sums: Sums) -> Sums:
                    new = self.staged.head(self.shared, self.to_all(y), self.rows(ticks.microbatch))[1]
                    return jax.tree.map(jnp.add, sums, new)

                sums = sums if segment.head == "none" else maybe(ticks, segment.head, made, sums)
                return self.shift(y, 1), self.next_embedded(segment, tick, embedded), sums

            carry = _repeat((start, stop), tick, carry) if stop > start else carry
        return carry[2]

    @property
    def early(self) -> bool:
        """Losses are made at the start of a tick, of outputs that waited; otherwise of the tick's own output."""
        return self.schedule.output_slots > 0

    def start(self, zeros: tuple[Params, Params], fill: float) -> Carry:
        """Before the first tick."""
        schedule, embedded = self.schedule, self.embed(jnp.int32(0))
        blank = self.blank(embedded, fill)
        outputs = jnp.full((schedule.output_slots, *blank.shape), fill, blank.dtype)
        sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.reported(blank))
        return Carry(
            x=blank,
            embedded=embedded,
            dx=blank,
            ready=blank,
            outputs=self.layout.act(outputs, None, *RESIDUAL),
            rings=self.layers.buffers(schedule.ring_slots, blank, self.staged.context(self.rows(jnp.int32(0))), fill),
            stacked=zeros[0],
            shared=zeros[1],
            sums=sums,
        )

    def blank(self, embedded: Array, fill: float) -> Array:
        """What goes between stages before the first tick, like the input of a layer."""
        ctx = self.staged.context(self.rows(jnp.int32(0)))
        like = jax.eval_shape(lambda: self.staged.enter(self.shared, embedded, ctx))
        return self.layout.act(jnp.full(like.shape, fill, like.dtype), *RESIDUAL)

    def reported(self, x: Array) -> Sums:
        """Shapes of what a head reports."""
        return jax.eval_shape(lambda: self.staged.head(self.shared, x, self.rows(jnp.int32(0)))[1])

    def tick(self, segment: Segment, tick: Array, c: Carry, scale: Array) -> Carry:
        """One tick of a segment."""
        from_after = from_loss = left = None
        if segment.backward:
            from_after, left = self.shift(c.dx, -1), self.left_in(segment.leave, tick, c.dx)
        if segment.head != "none" and self.early:
            c, from_loss = self.loss(segment, tick, c, scale)
        if segment.forward:
            embedded = self.next_embedded(segment, tick, c.embedded)
            y, rings = self.forward(segment, tick, c)
            # What travelled during the forward is used after it; without this it would be waited for before.
            travelled = from_after, from_loss, left, embedded
            (from_after, from_loss, left, embedded), y = lax.optimization_barrier((travelled, y))
            c = c._replace(rings=rings, x=self.shift(y, 1), embedded=embedded, outputs=self.keep(tick, y, c))
            if segment.head != "none" and not self.early:
                c, from_loss = self.loss(segment, tick, c._replace(ready=y), scale)
        if self.early:
            c = c._replace(ready=self.next_ready(segment, tick, c))
        if from_after is not None:  # in segments with a backward
            c = c._replace(shared=self.add_embedding_gradient(segment, tick, left, c))
            dx, stacked, shared = self.backward(segment, tick, from_after, from_loss, c)
            (x, ready), dx = lax.optimization_barrier(((c.x, c.ready), dx))
            c = c._replace(x=x, ready=ready, dx=dx, stacked=stacked, shared=shared)
        return c

    def enter(self, tick: Array, x: Array, embedded: Array) -> tuple[Array, Any, Array, Array]:
        """A forward's (input, context, chunk or -1, slot); x: what came from the stage before."""
        microbatch, chunk, slot = self.entry(self.schedule.forward, tick)
        ctx = self.staged.context(self.rows(microbatch))
        x = jnp.where((self.index == 0) & (chunk == 0), self.staged.enter(self.shared, embedded, ctx), x)
        return x, ctx, jnp.where(microbatch >= 0, chunk, -1), slot

    def forward(self, segment: Segment, tick: Array, c: Carry) -> tuple[Array, Rings]:
        """(output, rings) of the tick's forward."""
        x, ctx, chunk, slot = self.enter(tick, c.x, c.embedded)
        if self.schedule.chunks == 1:
            return self.layers.forward(0, x, ctx, c.rings, slot)

        def saved(first: Array | int, carry: tuple[Array, Rings]) -> tuple[Array, Rings]:
            return self.layers.forward(first, carry[0], ctx, carry[1], slot)

        return self.in_chunk(segment, self.schedule.forward, chunk, saved, (x, c.rings))

    def in_chunk[T](
        self, segment: Segment, kind: Work, chunk: Array, work: Callable[[Array | int, T], T], carry: T
    ) -> T:
        """work(first row, carry) of that chunk; `carry` for -1, no chunk. kind: of work, in the schedule.

        Each chunk is a loop of one turn or none: the compiler updates in place what goes through loops, and copies what
        goes through branches. More chunks than MOST_LOOPS share one loop, whose rows are data.
        """
        if self.schedule.chunks > MOST_LOOPS:
            turns, first = (chunk >= 0).astype(jnp.int32), jnp.maximum(chunk, 0) * self.partition.rows
            with jax.named_scope(segment.runs(kind, None)):
                return lax.fori_loop(0, turns, lambda _, carry: work(first, carry), carry)
        for number in range(self.schedule.chunks):
            if not segment.busy(kind, number).any():
                continue
            turns, first = (chunk == number).astype(jnp.int32), number * self.partition.rows
            with jax.named_scope(segment.runs(kind, number)):
                carry = lax.fori_loop(0, turns, lambda _, carry, first=first: work(first, carry), carry)
        return carry

    def loss(self, segment: Segment, tick: Array, c: Carry, scale: Array) -> tuple[Carry, Array]:
        """Loss of `ready`: what is reported and weight gradients added up, and the gradient of the output."""
        ticks = segment.ticks(tick, self.schedule.head)

        def made(carry: tuple[Sums, Params, Array]) -> tuple[Sums, Params, Array]:
            sums, shared, _ = carry
            rows, ready = self.rows(ticks.microbatch), c.ready if self.early else self.to_all(c.ready)
            _, pull, new = jax.vjp(lambda w, x: self.staged.head(w, x, rows, scale), self.shared, ready, has_aux=True)
            gradients, dy = pull(scale / self.schedule.stages)  # see `Staged.head`
            return jax.tree.map(jnp.add, sums, new), add(shared, gradients), self.over_stages(dy)

        carry = c.sums, c.shared, jnp.zeros_like(c.ready)
        sums, shared, dy = maybe(ticks, segment.head, made, carry)
        return c._replace(sums=sums, shared=shared), dy

    def backward(
        self, segment: Segment, tick: Array, from_after: Array, from_loss: Array | None, c: Carry
    ) -> tuple[Array, Params, Params]:
        """(gradient of the chunk's input, gradients of the stacked and of the shared weights) after the tick."""
        microbatch, chunk, slot = self.entry(self.schedule.input_gradient, tick)
        ctx, dy = self.staged.context(self.rows(microbatch)), from_after
        if from_loss is not None:
            dy = jnp.where(self.last & (chunk == self.schedule.chunks - 1), from_loss, dy)

        totals = dict(c.stacked), {path: c.shared[path] for path in self.staged.common(self.shared) if path in c.shared}

        def pulled(
            first: Array | int, carry: tuple[Array, tuple[Params, Params]]
        ) -> tuple[Array, tuple[Params, Params]]:
            return self.layers.backward(first, carry[0], ctx, c.rings, slot, carry[1])

        kind, chunk = self.schedule.input_gradient, jnp.where(microbatch >= 0, chunk, -1)
        dx, (stacked, common) = self.in_chunk(segment, kind, chunk, pulled, (dy, totals))
        return dx, stacked, {**c.shared, **common}

    def left_in(self, which: Which, tick: Array, dx: Array) -> Array | None:
        """What left stage 0, where it travels in every tick; None where it does not, or is asked for when needed."""
        return self.left(tick, dx) if which == "all" else None

    def left(self, tick: Array, dx: Array) -> Array:
        """On all stages, what left stage 0 in the tick before; zeros where nothing did."""
        return self.over_stages(jnp.where((self.index == 0) & (self.leaving(tick) >= 0), dx, 0))

    def leaving(self, tick: Array) -> Array:
        """Microbatch whose gradient left stage 0 in the tick before; -1 for none."""
        return jnp.asarray(np.insert(self.schedule.embed_gradient, 0, np.int32(-1)))[tick]

    def add_embedding_gradient(self, segment: Segment, tick: Array, left: Array | None, c: Carry) -> Params:
        """Gradients of the shared weights with what left stage 0 in the tick before; left: as `left_in` has it."""
        if segment.leave == "none":
            return c.shared

        def added(shared: Params) -> Params:
            return self.embedding_gradient(tick, self.left(tick, c.dx) if left is None else left, shared)

        return maybe(segment.ticks(tick, before(self.schedule.embed_gradient)), segment.leave, added, c.shared)

    def embedding_gradient(self, tick: Array, left: Array, shared: Params) -> Params:
        """`shared` with the gradient of embedding and `enter` added."""
        rows = self.rows(self.leaving(tick))
        ctx = self.staged.context(rows)
        _, pull = jax.vjp(lambda w: self.staged.enter(w, self.staged.embed(w, rows), ctx), self.shared)
        gradients = pull(left)[0]
        # All stages make the gradient of what is not cut over them, which is summed over stages in the end.
        once = {path: g if path in self.cut else jnp.where(self.index == 0, g, 0) for path, g in gradients.items()}
        return add(shared, once)

    def keep(self, tick: Array, y: Array, c: Carry) -> Array:
        """`outputs` after a forward."""
        if not self.early:
            return c.outputs
        slot = jnp.asarray(self.schedule.output_kept)[tick]
        place = jnp.maximum(slot, 0)
        return put(c.outputs, jnp.where(slot >= 0, y, take(c.outputs, place)), place)

    def next_ready(self, segment: Segment, tick: Array, c: Carry) -> Array:
        """`ready` after a tick: on all stages, the output whose loss is made at the next one."""
        if segment.ready == "none":
            return c.ready
        ticks = segment.ticks(tick, after(self.schedule.head))
        return maybe(ticks, segment.ready, lambda _: self.to_all(self.waiting(c.outputs, tick + 1)), c.ready)

    def waiting(self, outputs: Array, tick: Array) -> Array:
        """The output whose loss is made at a tick; any one where none is."""
        slot = jnp.asarray(self.schedule.output_taken)[jnp.minimum(tick, self.schedule.ticks - 1)]
        return take(outputs, jnp.maximum(slot, 0))

    def rows(self, microbatch: Array) -> Rows:
        """A microbatch; the first one for an idle stage, to have something to compute on."""
        return entry(self.batch, jnp.maximum(microbatch, 0))

    def entry(self, work: Work, tick: Array) -> tuple[Array, Array, Array]:
        """(microbatch or -1, chunk, slot) of this stage in a tick."""
        microbatch, chunk, slot = (jnp.asarray(table)[tick, self.index] for table in work)
        return microbatch, chunk, slot

    def next_embedded(self, segment: Segment, tick: Array, embedded: Array) -> Array:
        """`embedded` after a tick: of the microbatch that enters at the next one."""
        if segment.embed == "none":
            return embedded
        ticks = segment.ticks(tick, after(self.schedule.embed))
        return maybe(ticks, segment.embed, lambda _: self.embed(tick + 1), embedded)

    def embed(self, tick: Array) -> Array:
        """Embeddings of the microbatch that enters at a tick; of any one where none does."""
        microbatch = jnp.asarray(self.schedule.embed)[jnp.minimum(tick, self.schedule.ticks - 1)]
        return self.staged.embed(self.shared, self.rows(microbatch))

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
