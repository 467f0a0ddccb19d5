"""Runs a schedule tick by tick, forwards and backwards of all stages, in a shard_map manual over `pipeline`.

layer_forward_backward.py runs the layers of a chunk. In a tick, communication between stages overlaps the layers:

    gradient to the previous stage, gradient of the loss,
    gradient of the embedding, next embedding              | during the forward
    output to the next stage, output to all for the loss   | during the backward

The chunk of a tick differs between stages, so it is data. Each chunk is a loop of one iteration or none, inside which
its rows are static, so that stacked weights and accumulators are read and updated in place (see `layer_loop`). Idle
stages run no iteration, so their values, possibly NaN, are never accumulated. With one chunk there is no such loop:
idle stages run the forward too and write it to a slot that nobody reads.

Embedding and loss are sharded over all stages. With one chunk per stage, a microbatch enters and leaves in every tick
of the steady phase, and the four all-reduces over stages overlap with layers. With several chunks, most ticks have none
of them, and a `lax.cond` skips them. Its predicate depends on the tick only, so all devices agree.

B rows, S positions, D hidden; P stages, V chunks of each, L rows of stacked weights in a chunk, M microbatches.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.batch import Params, Rows
from megajax.mesh.layout import Layout
from megajax.pipeline.layer_forward_backward import RESIDUAL, LayerLoop, Rings, add, entry, put, take
from megajax.pipeline.partition import Partition, Staged, StagedSection, Sums
from megajax.pipeline.schedule import Schedule, StageWork, entering

AXIS = "pipeline"

MOST_LOOPS = 8
"""Maximum number of chunks with separate loops in the program. More take too long to compile."""

type Which = Literal["none", "some", "all"]
"""The ticks of a loop in which something runs; "some": under a `lax.cond`."""


class TickLoop(NamedTuple):
    """Ticks [start, stop), which run in one loop."""

    start: int
    stop: int
    forward: bool
    backward: bool
    head: Which
    """Ticks with a loss."""
    ready: Which
    """Ticks before a loss, in which its input is sent."""
    embed: Which
    """Ticks before a microbatch enters, in which it is embedded."""
    leave: Which
    """Ticks after a gradient left stage 0."""

    def ticks(self, tick: Array, microbatches: np.ndarray) -> "Ticks":
        """The ticks of this loop for a kind of work; see `Ticks`."""
        return Ticks(tick, microbatches, self.start, self.stop)

    def busy(self, work: StageWork, chunk: int | None) -> np.ndarray:
        """Bool [ticks, stages]: whether the chunk (None: any) has work."""
        ticks = slice(self.start, self.stop)
        return (work.microbatch[ticks] >= 0) & (chunk is None or work.chunk[ticks] == chunk)

    def runs(self, work: StageWork, chunk: int | None) -> str:
        """How often the chunk (None: any) has work; see `runs`."""
        return runs(self.busy(work, chunk))


class Carry(NamedTuple):
    """The state of a stage between ticks."""

    x: Array
    """Input of the next forward, from the previous stage."""
    embedded: Array
    """Embeddings of the next microbatch that enters stage 0."""
    dx: Array
    """Gradient with respect to the input of the last backward."""
    ready: Array
    """The output whose loss is computed next, on all stages."""
    outputs: Array
    """[output slots, B, S, D]: on the last stage, outputs that wait for their loss."""
    rings: Rings
    """Residuals of layers, by the schedule's slots."""
    stacked: Params
    """Accumulated gradients of the stacked weights."""
    shared: Params
    """Accumulated gradients of the other weights; if not sharded over stages, the contribution of this stage."""
    sums: Sums


def tick_loops(schedule: Schedule, more: Iterable[int] = ()) -> list[TickLoop]:
    """The phases of the schedule, split where losses begin and end, and at `more` ticks."""
    losses = np.flatnonzero(schedule.head >= 0)
    edges = {edge for phase in schedule.phases for edge in phase[:2]} | {int(losses[0]), int(losses[-1]) + 1, *more}
    loops = []
    for start, stop in pairwise(sorted(edges)):
        phase = next(phase for phase in schedule.phases if phase.start <= start < phase.stop)
        moved = after(schedule.head), after(schedule.embed), before(schedule.embed_gradient)
        collectives = (_which_collective(schedule, microbatches[start:stop]) for microbatches in moved)
        kinds = phase.forward, phase.backward, _which(schedule.head[start:stop])
        loops.append(TickLoop(start, stop, *kinds, *collectives))
    return loops


def _which(microbatches: np.ndarray) -> Which:
    busy = microbatches >= 0
    return "all" if busy.all() else "some" if busy.any() else "none"


def _which_collective(schedule: Schedule, microbatches: np.ndarray) -> Which:
    """The ticks of an all-reduce over stages. With one chunk most ticks need it, and a cond would prevent overlap."""
    which = _which(microbatches)
    return "all" if which == "some" and schedule.chunks == 1 else which


def after(microbatches: np.ndarray) -> np.ndarray:
    """Int32 [T]: for each tick, the value of the next one; -1 at the end."""
    return np.append(microbatches[1:], np.int32(-1))


def before(microbatches: np.ndarray) -> np.ndarray:
    """Int32 [T]: for each tick, the value of the previous one; -1 at the start."""
    return np.insert(microbatches[:-1], 0, np.int32(-1))


def _run_ticks[T](ticks: tuple[int, int], tick: Callable[[Array, T], T], carry: T) -> T:
    """Runs the ticks [start, stop) in order."""
    start, stop = ticks
    return lax.fori_loop(start, stop, tick, carry) if stop > start + 1 else tick(jnp.int32(start), carry)


class Ticks(NamedTuple):
    """The current tick of a loop, and the microbatches of a kind of work."""

    tick: Array
    microbatches: np.ndarray
    """Int32 [T]: microbatch in each tick of the schedule; -1 for none."""
    start: int
    stop: int

    @property
    def microbatch(self) -> Array:
        """Microbatch of the current tick; -1 for none."""
        return jnp.asarray(self.microbatches)[self.tick]

    def marked(self) -> AbstractContextManager:
        """Names operations by how often they run, because the compiled program does not show it."""
        return jax.named_scope(runs(self.microbatches[self.start : self.stop] >= 0))


def runs(busy: np.ndarray) -> str:
    """busy bool [ticks] or [ticks, stages] -> "runs_3_of_20": the number of ticks, on average over stages."""
    return f"runs_{busy.sum()}_of_{busy.size}"


def when_busy[T](ticks: Ticks, which: Which, work: Callable[[T], T], carry: T) -> T:
    """work(carry) in the ticks with a microbatch. All devices agree on them, so collectives inside are safe."""
    if which == "all":
        return work(carry)
    with ticks.marked():
        return lax.cond(ticks.microbatch >= 0, work, lambda carry: carry, carry)


@dataclass(frozen=True)
class StageExecutor:
    """One stage of a schedule; created and used inside the shard_map."""

    schedule: Schedule
    partition: Partition
    staged: Staged
    layout: Layout
    stacked: Params
    """[V * L, ...]: the rows of this stage, in the layout in which layers use them."""
    shared: Params
    sharded: frozenset[str]
    """Paths of the shared weights that are sharded over the stages."""
    gradient_dtypes: Mapping[str, Any]
    """See `LayerLoop`."""
    batch: Rows
    """Leaves [M, ...]: the rows of this device in every microbatch."""

    @property
    def section(self) -> StagedSection:
        """The model's only section: a schedule partitions one stack."""
        (section,) = self.staged.sections
        return section

    @property
    def index(self) -> Array:
        return lax.axis_index(AXIS)

    @property
    def last(self) -> Array:
        return self.index == self.schedule.stages - 1

    @property
    def layers(self) -> LayerLoop:
        """This stage's layers."""
        # Spans with layer numbers run over no more rows than there are layers.
        rows_tell = any(span.layer is None for span in self.section.spans)
        return LayerLoop(
            self.section.spans,
            self.layout,
            self.stacked,
            self.section.common(self.shared),
            jnp.asarray(self.partition.numbers())[self.index],
            self.partition.padded() and rows_tell,
            self.gradient_dtypes,
            self.index,
            self.schedule.stages,
        )

    def gradients(
        self, scale: Array, zeros: tuple[Params, Params], *, fill: float = 0.0
    ) -> tuple[Sums, dict[str, Array], dict[str, Array]]:
        """The sums of the heads, and the gradients of the stacked and of the shared weights, times `scale`.

        zeros: initial accumulators of both gradients. fill: initial value of buffers; no result depends on it, which
        tests check with NaN.
        """
        carry = self.start(zeros, fill)
        for loop in self.loops():
            if loop.head != "none" and self.loss_first:
                output = self.stored_output(carry.outputs, jnp.int32(loop.start))
                carry = carry._replace(ready=self.broadcast_from_last(output))

            def tick(tick: Array, carry: Carry, loop: TickLoop = loop) -> Carry:
                return self.tick(loop, tick, carry, scale)

            carry = _run_ticks(loop[:2], tick, carry)
        end = jnp.int32(self.schedule.ticks)
        shared = self.embedding_gradient(end, self.stage0_gradient(end, carry.dx), carry.shared)
        return carry.sums, dict(self.layers.without_padding(carry.stacked)), dict(shared)

    def losses(self) -> Sums:
        """The sums of the heads, without gradients."""
        leaving = entering(self.schedule.forward, self.schedule.stages - 1, self.schedule.chunks - 1)
        first, last = int(np.flatnonzero(leaving >= 0)[0]), int(np.flatnonzero(leaving >= 0)[-1])
        embedded = self.embed(jnp.int32(0))
        x = self.empty_input(embedded, 0.0)
        carry = x, embedded, self.zero_sums(x)
        for start, stop in ((0, first), (first, last + 1)):
            embed = _which_collective(self.schedule, after(self.schedule.embed)[start:stop])
            loop = TickLoop(start, stop, True, False, _which(leaving[start:stop]), "none", embed, "none")

            def tick(tick: Array, carry: tuple, loop: TickLoop = loop) -> tuple:
                x, embedded, sums = carry
                x, ctx, chunk, _ = self.enter(tick, x, embedded)
                kind, ticks = self.schedule.forward, loop.ticks(tick, leaving)
                y = self.in_chunk(loop, kind, chunk, lambda chunk, x: self.layers.output(chunk, x, ctx), x)

                def add_loss(sums: Sums) -> Sums:
                    output = self.broadcast_from_last(y)
                    new = self.staged.head(self.shared, output, self.rows(ticks.microbatch))[1]
                    return jax.tree.map(jnp.add, sums, new)

                sums = sums if loop.head == "none" else when_busy(ticks, loop.head, add_loss, sums)
                return self.shift(y, 1), self.next_embedded(loop, tick, embedded), sums

            carry = _run_ticks((start, stop), tick, carry) if stop > start else carry
        return carry[2]

    @property
    def loss_first(self) -> bool:
        """Whether a tick starts with the loss of a stored output; otherwise it uses the output of the same tick."""
        return self.schedule.output_slots > 0

    def loops(self) -> list[TickLoop]:
        """All ticks, in order."""
        return tick_loops(self.schedule)

    def start(self, zeros: tuple[Params, Params], fill: float) -> Carry:
        """The state before the first tick."""
        schedule, embedded = self.schedule, self.embed(jnp.int32(0))
        empty = self.empty_input(embedded, fill)
        outputs = jnp.full((schedule.output_slots, *empty.shape), fill, empty.dtype)
        return Carry(
            x=empty,
            embedded=embedded,
            dx=empty,
            ready=empty,
            outputs=self.layout.act(outputs, None, *RESIDUAL),
            rings=self.layers.buffers(schedule.ring_slots, empty, self.section.context(self.rows(jnp.int32(0))), fill),
            stacked=zeros[0],
            shared=zeros[1],
            sums=self.zero_sums(empty),
        )

    def empty_input(self, embedded: Array, fill: float) -> Array:
        """An array like the input of a layer, with the value `fill`."""
        ctx = self.section.context(self.rows(jnp.int32(0)))
        like = jax.eval_shape(lambda: self.section.enter(self.shared, embedded, ctx, None))
        return self.layout.act(jnp.full(like.shape, fill, like.dtype), *RESIDUAL)

    def zero_sums(self, x: Array) -> Sums:
        """Zeros like the sums of a head."""
        like = jax.eval_shape(lambda: self.staged.head(self.shared, x, self.rows(jnp.int32(0)))[1])
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

    def tick(self, loop: TickLoop, tick: Array, c: Carry, scale: Array) -> Carry:
        """One tick of a loop."""
        from_next = from_loss = stage0_gradient = None
        if loop.backward:
            from_next = self.shift(c.dx, -1)
            stage0_gradient = self.stage0_gradient(tick, c.dx) if loop.leave == "all" else None
        if loop.head != "none" and self.loss_first:
            c, from_loss = self.loss(loop, tick, c, scale)
        if loop.forward:
            embedded = self.next_embedded(loop, tick, c.embedded)
            y, rings = self.forward(loop, tick, c)
            # The barrier delays the use of communicated values until after the forward, so that they overlap.
            communicated = from_next, from_loss, stage0_gradient, embedded
            (from_next, from_loss, stage0_gradient, embedded), y = lax.optimization_barrier((communicated, y))
            c = c._replace(rings=rings, x=self.shift(y, 1), embedded=embedded, outputs=self.store_output(tick, y, c))
            if loop.head != "none" and not self.loss_first:
                c, from_loss = self.loss(loop, tick, c._replace(ready=y), scale)
        if self.loss_first:
            c = c._replace(ready=self.next_ready(loop, tick, c))
        if from_next is not None:  # in loops with a backward
            c = c._replace(shared=self.add_embedding_gradient(loop, tick, stage0_gradient, c))
            c = self.backward(loop, tick, from_next, from_loss, c)
        return c

    def enter(self, tick: Array, x: Array, embedded: Array) -> tuple[Array, Any, Array, Array]:
        """(input, context, chunk or -1, slot) of a forward; x: from the previous stage."""
        microbatch, chunk, slot = self.entry(self.schedule.forward, tick)
        ctx = self.section.context(self.rows(microbatch))
        x = jnp.where((self.index == 0) & (chunk == 0), self.section.enter(self.shared, embedded, ctx, None), x)
        return x, ctx, jnp.where(microbatch >= 0, chunk, -1), slot

    def forward(self, loop: TickLoop, tick: Array, c: Carry) -> tuple[Array, Rings]:
        """(output, rings) of the tick's forward."""
        x, ctx, chunk, slot = self.enter(tick, c.x, c.embedded)
        if self.schedule.chunks == 1:
            (y,), rings = self.layers.forward(0, (x,), (ctx,), c.rings, (slot,))
            return y, rings

        def run_layers(chunk: Array | int, carry: tuple[Array, Rings]) -> tuple[Array, Rings]:
            (y,), rings = self.layers.forward(chunk, carry[:1], (ctx,), carry[1], (slot,))
            return y, rings

        return self.in_chunk(loop, self.schedule.forward, chunk, run_layers, (x, c.rings))

    def in_chunk[T](self, loop: TickLoop, kind: StageWork, chunk: Array, run: Callable[[Array | int, T], T], c: T) -> T:
        """run(chunk, c) of the chunk, or `c` if it is -1. kind: the kind of work in the schedule.

        Each chunk is a loop of one iteration or none: the compiler updates the carry of loops in place, and copies that
        of branches. More chunks than MOST_LOOPS share one loop, in which the number of the chunk is data.
        """
        if self.schedule.chunks > MOST_LOOPS:
            iterations, index = (chunk >= 0).astype(jnp.int32), jnp.maximum(chunk, 0)
            with jax.named_scope(loop.runs(kind, None)):
                return lax.fori_loop(0, iterations, lambda _, c: run(index, c), c)
        for number in range(self.schedule.chunks):
            if not loop.busy(kind, number).any():
                continue
            iterations = (chunk == number).astype(jnp.int32)
            with jax.named_scope(loop.runs(kind, number)):
                c = lax.fori_loop(0, iterations, lambda _, c, number=number: run(number, c), c)
        return c

    def loss(self, loop: TickLoop, tick: Array, c: Carry, scale: Array) -> tuple[Carry, Array]:
        """Loss of `ready`: adds its sums and weight gradients, and returns the gradient of the output."""
        ticks = loop.ticks(tick, self.schedule.head)

        def add_loss(carry: tuple[Sums, Params, Array]) -> tuple[Sums, Params, Array]:
            sums, shared, _ = carry
            rows = self.rows(ticks.microbatch)
            ready = c.ready if self.loss_first else self.broadcast_from_last(c.ready)
            _, pullback, new = jax.vjp(
                lambda w, x: self.staged.head(w, x, rows, scale), self.shared, ready, has_aux=True
            )
            gradients, dy = pullback(scale / self.schedule.stages)  # see `Staged.head`
            return jax.tree.map(jnp.add, sums, new), add(shared, gradients), self.sum_over_stages(dy)

        carry = c.sums, c.shared, jnp.zeros_like(c.ready)
        sums, shared, dy = when_busy(ticks, loop.head, add_loss, carry)
        return c._replace(sums=sums, shared=shared), dy

    def backward(self, loop: TickLoop, tick: Array, from_next: Array, from_loss: Array | None, c: Carry) -> Carry:
        """The carry after the tick's backward."""
        dy, ctx, chunk, slot = self.enter_backward(tick, from_next, from_loss)

        def run_layers(chunk: Array | int, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            (dx,), totals = self.layers.backward(chunk, carry[:1], (ctx,), c.rings, (slot,), carry[1])
            return dx, totals

        return self.leave(c, *self.in_chunk(loop, self.schedule.backward, chunk, run_layers, (dy, self.totals(c))))

    def leave(self, c: Carry, dx: Array, totals: tuple[Params, Params]) -> Carry:
        """The carry after a backward, which what was sent before it overlaps."""
        (x, ready), dx = lax.optimization_barrier(((c.x, c.ready), dx))
        return c._replace(x=x, ready=ready, dx=dx, stacked=totals[0], shared={**c.shared, **totals[1]})

    def enter_backward(self, tick: Array, dy: Array, from_loss: Array | None) -> tuple[Array, Any, Array, Array]:
        """(gradient of the output, context, chunk or -1, slot) of a backward; dy: from the next stage."""
        microbatch, chunk, slot = self.entry(self.schedule.backward, tick)
        if from_loss is not None:
            dy = jnp.where(self.last & (chunk == self.schedule.chunks - 1), from_loss, dy)
        return dy, self.section.context(self.rows(microbatch)), jnp.where(microbatch >= 0, chunk, -1), slot

    def totals(self, c: Carry) -> tuple[Params, Params]:
        """The gradients that layers add to: of the stacked weights, and of those that every layer uses."""
        return dict(c.stacked), {path: c.shared[path] for path in self.section.common(self.shared) if path in c.shared}

    def stage0_gradient(self, tick: Array, dx: Array) -> Array:
        """On all stages, the gradient that left stage 0 in the previous tick; zeros if none did."""
        return self.sum_over_stages(jnp.where((self.index == 0) & (self.leaving(tick) >= 0), dx, 0))

    def leaving(self, tick: Array) -> Array:
        """Microbatch whose gradient left stage 0 in the previous tick; -1 for none."""
        return jnp.asarray(np.insert(self.schedule.embed_gradient, 0, np.int32(-1)))[tick]

    def add_embedding_gradient(self, loop: TickLoop, tick: Array, stage0_gradient: Array | None, c: Carry) -> Params:
        """Adds the embedding's gradient to the shared ones. stage0_gradient: None if not communicated in every tick."""
        if loop.leave == "none":
            return c.shared

        def added(shared: Params) -> Params:
            dx = self.stage0_gradient(tick, c.dx) if stage0_gradient is None else stage0_gradient
            return self.embedding_gradient(tick, dx, shared)

        return when_busy(loop.ticks(tick, before(self.schedule.embed_gradient)), loop.leave, added, c.shared)

    def embedding_gradient(self, tick: Array, stage0_gradient: Array, shared: Params) -> Params:
        """`shared` with the gradient of embedding and `enter` added."""
        rows = self.rows(self.leaving(tick))
        ctx = self.section.context(rows)
        _, pullback = jax.vjp(lambda w: self.section.enter(w, self.section.embed(w, rows), ctx, None), self.shared)
        gradients = pullback(stage0_gradient)[0]
        # Gradients of unsharded weights are equal on all stages and are summed over stages at the end: count one.
        once = {path: g if path in self.sharded else jnp.where(self.index == 0, g, 0) for path, g in gradients.items()}
        return add(shared, once)

    def store_output(self, tick: Array, y: Array, c: Carry) -> Array:
        """`outputs` after a forward."""
        if not self.loss_first:
            return c.outputs
        slot = jnp.asarray(self.schedule.output_written)[tick]
        index = jnp.maximum(slot, 0)
        return put(c.outputs, jnp.where(slot >= 0, y, take(c.outputs, index)), index)

    def next_ready(self, loop: TickLoop, tick: Array, c: Carry) -> Array:
        """`ready` after a tick: on all stages, the output whose loss is computed in the next one."""
        if loop.ready == "none":
            return c.ready

        def send(_: Array) -> Array:
            return self.broadcast_from_last(self.stored_output(c.outputs, tick + 1))

        return when_busy(loop.ticks(tick, after(self.schedule.head)), loop.ready, send, c.ready)

    def stored_output(self, outputs: Array, tick: Array) -> Array:
        """The output whose loss is computed in a tick; an arbitrary one if there is none."""
        slot = jnp.asarray(self.schedule.output_read)[jnp.minimum(tick, self.schedule.ticks - 1)]
        return take(outputs, jnp.maximum(slot, 0))

    def rows(self, microbatch: Array) -> Rows:
        """The rows of a microbatch; of the first one for an idle stage."""
        return entry(self.batch, jnp.maximum(microbatch, 0))

    def entry(self, work: StageWork, tick: Array) -> tuple[Array, Array, Array]:
        """(microbatch or -1, chunk, slot) of this stage in a tick."""
        microbatch, chunk, slot = (jnp.asarray(table)[tick, self.index] for table in work)
        return microbatch, chunk, slot

    def next_embedded(self, loop: TickLoop, tick: Array, embedded: Array) -> Array:
        """`embedded` after a tick: of the microbatch that enters in the next one."""
        if loop.embed == "none":
            return embedded
        ticks = loop.ticks(tick, after(self.schedule.embed))
        return when_busy(ticks, loop.embed, lambda _: self.embed(tick + 1), embedded)

    def embed(self, tick: Array) -> Array:
        """Embeddings of the microbatch that enters in a tick; of an arbitrary one if none does."""
        microbatch = jnp.asarray(self.schedule.embed)[jnp.minimum(tick, self.schedule.ticks - 1)]
        return self.section.embed(self.shared, self.rows(microbatch))

    def shift(self, x: Array, step: Literal[1, -1]) -> Array:
        """Sends x to the next stage (1) or the previous one (-1); with several chunks, also around the end."""
        stages, around = self.schedule.stages, self.schedule.chunks > 1
        pairs = [(s, (s + step) % stages) for s in range(stages) if around or 0 <= s + step < stages]
        return lax.ppermute(x, AXIS, pairs)

    def broadcast_from_last(self, y: Array) -> Array:
        """The last stage's y, on every stage."""
        return self.sum_over_stages(jnp.where(self.last, y, 0))

    def sum_over_stages(self, x: Array) -> Array:
        """x [B, S, D] summed over the stages."""
        # In an island: a bfloat16 psum over one manual axis, with other axes left to the compiler, aborts on CPU.
        return self.layout.island(lambda x: lax.psum(x, AXIS), (RESIDUAL,), RESIDUAL)(x)
