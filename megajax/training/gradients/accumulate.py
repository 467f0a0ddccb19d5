"""Gradients of a global batch without a pipeline: microbatches in sequence, and the sections of each in sequence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from megajax.batch import Batch, Grads, Params, Rows
from megajax.pipeline.layer_loop import LayerLoop, Rings, add
from megajax.pipeline.partition import MEMORY, Staged, StagedSection
from megajax.training.gradients.grads import GradFn, Weights, over_replicas
from megajax.training.gradients.staged import SplitWeights


class Forward(NamedTuple):
    """The forward pass of a section on one microbatch, and its pullbacks."""

    ctx: Any
    memory: Array | None
    """The output of the section before."""
    output: Array
    to_layers: Callable | None
    """Cotangent of `output` -> cotangents of the shared weights and the layers' output; None for the last section."""
    to_inputs: Callable
    """Cotangent of the first layer's input -> cotangents of the shared weights and of `memory`."""


@dataclass(frozen=True)
class SectionRun:
    """A section with its weights."""

    section: StagedSection
    layers: LayerLoop
    shared: Params

    def start(self, rows: Rows, memory: Array | None) -> tuple[Any, Array, Callable]:
        """Context, the first layer's input, and `Forward.to_inputs`."""
        section, ctx = self.section, self.section.context(rows)

        def enter(shared: Params, memory: Array | None) -> Array:
            return section.enter(shared, section.embed(shared, rows), ctx, memory)

        return ctx, *jax.vjp(enter, self.shared, memory)

    def layers_with(self, memory: Array | None) -> LayerLoop:
        """The loop over layers, with the output of the section before as their common input."""
        return self.layers if memory is None else replace(self.layers, common={**self.layers.common, MEMORY: memory})

    def forward(self, rows: Rows, memory: Array | None, rings: Rings) -> tuple[Forward, Rings]:
        """The forward pass of a microbatch; writes the tensors that layers save into the rings."""
        ctx, x, to_inputs = self.start(rows, memory)
        y, rings = self.layers_with(memory).forward(0, x, ctx, rings, 0)
        leave, to_layers = self.section.leave, None
        if leave is not None:
            y, to_layers = jax.vjp(lambda shared, y: leave(shared, y, ctx), self.shared, y)
        return Forward(ctx, memory, y, to_layers, to_inputs), rings

    def backward(
        self, section_pass: Forward, dy: Any, rings: Rings, totals: SplitWeights
    ) -> tuple[Array | None, SplitWeights]:
        """-> (cotangent of the section's `memory`, totals plus its gradients). dy: cotangent of its output."""
        path, shared = self.section.path, totals.shared
        if section_pass.to_layers is not None:
            gradients, dy = section_pass.to_layers(dy)
            shared = add(shared, gradients)
        common = {name: shared[name] for name in self.layers.common if name in shared}
        if section_pass.memory is not None:
            common[MEMORY] = jnp.zeros_like(section_pass.memory, jnp.float32)
        sums = totals.stacked[path], common
        dx, (stacked, summed) = self.layers_with(section_pass.memory).backward(0, dy, section_pass.ctx, rings, 0, sums)
        gradients, dmemory = section_pass.to_inputs(dx)
        if section_pass.memory is not None:
            dmemory = (summed[MEMORY] + dmemory).astype(section_pass.memory.dtype)
        shared = {**shared, **{name: g for name, g in summed.items() if name in shared}}
        return dmemory, SplitWeights({**totals.stacked, path: stacked}, add(shared, gradients))

    def buffers(self, rows: Rows, memory: Array | None) -> tuple[Rings, Array]:
        """Empty rings for one microbatch, and zeros in the shape of the section's output."""
        ctx, x, _ = self.start(rows, memory)
        leave = self.section.leave
        like = x if leave is None else jax.eval_shape(lambda x: leave(self.shared, x, ctx), x)
        return self.layers_with(memory).buffers(1, x, ctx, 0.0), jnp.zeros(like.shape, like.dtype)


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


def accumulate(weights: Weights, parts: Staged, mesh: Mesh) -> GradFn:
    """A gradient function that runs the microbatches in sequence and accumulates in place.

    parts: each stack is one chunk.
    """

    def local(params: Params, batch: Batch, scale: Array) -> tuple:
        in_step = weights.gather_all_for_step(params, scale)
        runs = section_runs(weights, parts, in_step)
        shared = runs[-1].shared

        def microbatch(carry: tuple, rows: Rows) -> tuple[tuple, None]:
            sums, totals, buffers = carry
            memory, passes, rings = None, [], []
            for run, ring in zip(runs, buffers, strict=True):
                section_pass, ring = run.forward(rows, memory, ring)
                memory = section_pass.output
                passes, rings = [*passes, section_pass], [*rings, ring]
            _, to_head, new = jax.vjp(lambda w, x: parts.head(w, x, rows, scale), shared, memory, has_aux=True)
            gradients, dy = to_head(scale)
            totals = totals._replace(shared=add(totals.shared, gradients))
            for run, section_pass, ring in reversed([*zip(runs, passes, rings, strict=True)]):
                dy, totals = run.backward(section_pass, dy, ring, totals)
            return (jax.tree.map(jnp.add, sums, new), totals, rings), None

        first = jax.tree.map(lambda leaf: leaf[0], batch)
        memory, buffers = None, []
        for run in runs:
            rings, memory = run.buffers(first, memory)
            buffers.append(rings)
        shapes = jax.eval_shape(lambda x: parts.head(shared, x, first)[1], memory)
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        totals = SplitWeights.of(weights.zeros(in_step), [section.path for section in parts.sections])
        (sums, totals, _), _ = lax.scan(microbatch, (sums, totals, buffers), batch)
        return over_replicas(sums), weights.reduce_all(totals.joined())

    mapped = weights.manual(local, mesh, (PartitionSpec(), weights.reduced_specs()))

    def grad_fn(params: Params, batch: Batch, scale: Array) -> Grads:
        return weights.grads(*mapped(dict(params), dict(batch), scale))

    return grad_fn
