"""Gradients of a global batch without a pipeline: microbatches in sequence, and the sections of each in sequence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from megajax.batch import Batch, Grads, Params, Rows
from megajax.layers.context import Context
from megajax.pipeline.layer_forward_backward import LayerLoop, Rings, add
from megajax.pipeline.partition import MEMORY, Staged, StagedSection
from megajax.training.gradients.grads import GradFn, Weights, over_replicas
from megajax.training.gradients.position_weights import by_position
from megajax.training.gradients.staged import SplitWeights


class Forward(NamedTuple):
    """The forward pass of a section on microbatches side by side, and its pullbacks, one of each for a microbatch."""

    ctxs: tuple[Context, ...]
    memories: tuple[Array | None, ...]
    """The output of the section before."""
    outputs: tuple[Array, ...]
    to_layers: tuple[Callable, ...]
    """Cotangent of `output` -> cotangents of the shared weights, the layers' output and `memory`; empty for the last
    section."""
    to_inputs: tuple[Callable, ...]
    """Cotangent of the first layer's input -> cotangents of the shared weights and of `memory`."""


@dataclass(frozen=True)
class SectionRun:
    """A section with its weights."""

    section: StagedSection
    layers: LayerLoop
    shared: Params

    def start(self, rows: Rows, memory: Array | None) -> tuple[Context, Array, Callable]:
        """Context, the first layer's input, and one of `Forward.to_inputs`."""
        section, ctx = self.section, self.section.context(rows)

        def enter(shared: Params, memory: Array | None) -> Array:
            return section.enter(shared, section.embed(shared, rows), ctx, memory)

        return ctx, *jax.vjp(enter, self.shared, memory)

    def layers_with(self, memory: Array | None) -> LayerLoop:
        """The loop over layers, with the output of the section before as their common input."""
        return self.layers if memory is None else replace(self.layers, common={**self.layers.common, MEMORY: memory})

    def forward(
        self, group: tuple[Rows, ...], memories: tuple[Array | None, ...], rings: Rings
    ) -> tuple[Forward, Rings]:
        """The forward pass of microbatches; writes the tensors that layers save into the rings.

        Several microbatches have no memories: the settings refuse them for models with several sections.
        """
        starts = (self.start(rows, memory) for rows, memory in zip(group, memories, strict=True))
        ctxs, xs, to_inputs = zip(*starts, strict=True)
        ys, rings = self.layers_with(memories[0]).forward(0, xs, ctxs, rings, range(len(group)))
        leave, to_layers = self.section.leave, ()
        if leave is not None:
            outputs = []
            for y, ctx, memory in zip(ys, ctxs, memories, strict=True):

                def left(shared: Params, y: Array, memory: Array | None, ctx: Context = ctx) -> Array:
                    return leave(shared, y, ctx, memory)

                output, pullback = jax.vjp(left, self.shared, y, memory)
                outputs, to_layers = [*outputs, output], (*to_layers, pullback)
            ys = tuple(outputs)
        return Forward(ctxs, memories, ys, to_layers, to_inputs), rings

    def backward(
        self, section_pass: Forward, dys: tuple[Any, ...], rings: Rings, totals: SplitWeights
    ) -> tuple[tuple[Array | None, ...], SplitWeights]:
        """-> (cotangent of each of the section's `memories`, totals plus its gradients). dys: of its outputs."""
        path, shared, memory = self.section.path, totals.shared, section_pass.memories[0]
        dleft: Array | int = 0
        if section_pass.to_layers:
            cotangents = []
            for to_layers, dy in zip(section_pass.to_layers, dys, strict=True):
                gradients, dy, dleft = to_layers(dy)
                shared, cotangents = add(shared, gradients), [*cotangents, dy]
            dys = tuple(cotangents)
        common = {name: shared[name] for name in self.layers.common if name in shared}
        if memory is not None:
            common[MEMORY] = jnp.zeros_like(memory, jnp.float32)
        sums, slots = (totals.stacked[path], common), range(len(dys))
        dxs, (stacked, summed) = self.layers_with(memory).backward(0, dys, section_pass.ctxs, rings, slots, sums)
        shared = {**shared, **{name: g for name, g in summed.items() if name in shared}}
        dmemories = []
        for to_inputs, dx in zip(section_pass.to_inputs, dxs, strict=True):
            gradients, dmemory = to_inputs(dx)
            if memory is not None:
                dmemory = (summed[MEMORY] + dmemory + dleft).astype(memory.dtype)
            shared, dmemories = add(shared, gradients), [*dmemories, dmemory]
        return tuple(dmemories), SplitWeights({**totals.stacked, path: stacked}, shared)

    def buffers(self, slots: int, rows: Rows, memory: Array | None) -> tuple[Rings, Array]:
        """Empty rings for so many microbatches, and zeros in the shape of the section's output."""
        ctx, x, _ = self.start(rows, memory)
        leave = self.section.leave
        like = x if leave is None else jax.eval_shape(lambda x: leave(self.shared, x, ctx, memory), x)
        return self.layers_with(memory).buffers(slots, x, ctx, 0.0), jnp.zeros(like.shape, like.dtype)


def section_runs(weights: Weights, parts: Staged, in_step: Params) -> list[SectionRun]:
    """The sections with the gathered weights of a step."""
    paths = [section.path for section in parts.sections]
    stacked, shared = SplitWeights.of(in_step, paths)
    dtypes = SplitWeights.of(weights.gradient_dtypes(), paths).stacked
    return [
        SectionRun(
            section,
            LayerLoop(
                section.spans,
                weights.layout,
                stacked[section.path],
                section.common(shared),
                None,
                False,
                dtypes[section.path],
            ),
            shared,
        )
        for section in parts.sections
    ]


def accumulate(weights: Weights, parts: Staged, mesh: Mesh, side_by_side: int = 1) -> GradFn:
    """A gradient function that runs groups of microbatches in sequence and accumulates in place.

    parts: each stack is one chunk; side_by_side: microbatches of a group, whose layers run in one loop.
    """

    def local(params: Params, batch: Batch, scale: Array) -> tuple:
        in_step, batch = by_position(weights.declared, parts, weights.gather_all_for_step(params, scale), batch)
        runs = section_runs(weights, parts, in_step)
        shared = runs[-1].shared

        def microbatches(carry: tuple, group: tuple[Rows, ...]) -> tuple[tuple, None]:
            sums, totals, buffers = carry
            memories, passes, rings = (None,) * len(group), [], []
            for run, ring in zip(runs, buffers, strict=True):
                section_pass, ring = run.forward(group, memories, ring)
                memories = section_pass.outputs
                passes, rings = [*passes, section_pass], [*rings, ring]
            dys = ()
            for rows, output in zip(group, memories, strict=True):

                def head(w: Params, x: Array, rows: Rows = rows) -> Any:
                    return parts.head(w, x, rows, scale)

                _, to_head, new = jax.vjp(head, shared, output, has_aux=True)
                gradients, dy = to_head(scale)
                totals = totals._replace(shared=add(totals.shared, gradients))
                sums, dys = jax.tree.map(jnp.add, sums, new), (*dys, dy)
            for run, section_pass, ring in reversed([*zip(runs, passes, rings, strict=True)]):
                dys, totals = run.backward(section_pass, dys, ring, totals)
            return (sums, totals, rings), None

        first = jax.tree.map(lambda leaf: leaf[0], batch)
        memory, buffers = None, []
        for run in runs:
            rings, memory = run.buffers(side_by_side, first, memory)
            buffers.append(rings)
        shapes = jax.eval_shape(lambda x: parts.head(shared, x, first)[1], memory)
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        totals = SplitWeights.of(weights.zeros(in_step), [section.path for section in parts.sections])
        (sums, totals, _), _ = lax.scan(microbatches, (sums, totals, buffers), groups(batch, side_by_side))
        return over_replicas(sums), weights.reduce_all(totals.joined())

    mapped = weights.manual(local, mesh, (PartitionSpec(), weights.reduced_specs()))

    def grad_fn(params: Params, batch: Batch, scale: Array) -> Grads:
        return weights.grads(*mapped(dict(params), dict(batch), scale))

    return grad_fn


def groups(batch: Batch, size: int) -> tuple[Batch, ...]:
    """Microbatches [M, ...] -> for each place in a group of this size, its microbatches [M / size, ...]."""
    if size == 1:
        return (batch,)
    return tuple(jax.tree.map(lambda leaf, place=place: leaf[place::size], batch) for place in range(size))
