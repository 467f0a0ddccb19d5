"""Ticks in which a forward of one microbatch and a backward of another run in one loop over the layers of a stage.

Each hides the collectives over `tensor` of the other. What stages exchange hides behind what follows it in a tick:

    gradient to the previous stage, gradient of the loss  | during the forward of the first layer
    gradient of the embedding, next embedding             | during the loop over all other layers
    output to the next stage, output to all for the loss  | during the backward of the first layer

So no activation waits longer than in ticks with one after the other: schedule and memory are the same.
"""

import numpy as np
from jax import Array, lax

from megajax.pipeline.executor import Carry, StageExecutor, TickLoop, tick_loops
from megajax.pipeline.layer_forward_backward import Pass
from megajax.pipeline.schedule import Schedule


def full_ticks(schedule: Schedule) -> range:
    """The ticks in which every stage has a forward and a backward; one chunk per stage."""
    busy = [(work.microbatch >= 0).all(axis=1) for work in (schedule.forward, schedule.backward)]
    ticks = np.flatnonzero(busy[0] & busy[1])
    return range(int(ticks[0]), int(ticks[-1]) + 1) if ticks.size else range(0)


class SideBySide(StageExecutor):
    """A stage of a schedule with one chunk per stage, whose losses wait (`loss_wait=1`), and layers of one kind."""

    def loops(self) -> list[TickLoop]:
        full = full_ticks(self.schedule)
        return tick_loops(self.schedule, (full.start, full.stop))

    def tick(self, loop: TickLoop, tick: Array, c: Carry, scale: Array) -> Carry:
        """One tick of a loop; one kind of work after the other unless every stage has both."""
        if loop.start not in full_ticks(self.schedule):
            return super().tick(loop, tick, c, scale)
        first, others = self.layers.part(0, 1), self.layers.part(1)
        from_next, stage0_gradient = self.shift(c.dx, -1), self.stage0_gradient(tick, c.dx)
        c, from_loss = self.loss(loop, tick, c, scale)
        embedded = self.next_embedded(loop, tick, c.embedded)
        x, ctx, _, slot = self.enter(tick, c.x, c.embedded)
        (x,), rings = first.forward(0, (x,), (ctx,), c.rings, (slot,))
        (from_next, from_loss), x = lax.optimization_barrier(((from_next, from_loss), x))
        dy, of_backward, _, slot_read = self.enter_backward(tick, from_next, from_loss)
        forward, backward = Pass(x, ctx, slot), Pass(dy, of_backward, slot_read)
        y, dy, rings, totals = others.forward_and_backward(forward, backward, rings, self.totals(c))
        (stage0_gradient, embedded), y = lax.optimization_barrier(((stage0_gradient, embedded), y))
        c = c._replace(rings=rings, x=self.shift(y, 1), embedded=embedded, outputs=self.store_output(tick, y, c))
        c = c._replace(ready=self.next_ready(loop, tick, c))
        (dx,), totals = first.backward(0, (dy,), (of_backward,), rings, (slot_read,), totals)
        c = self.leave(c, dx, totals)
        return c._replace(shared=self.add_embedding_gradient(loop, tick, stage0_gradient, c))
