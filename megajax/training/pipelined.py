"""Gradients of a global batch through a pipeline: the same signature as microbatch after microbatch."""

from collections.abc import Callable, Mapping

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from megajax.batch import Grads, LMBatch, Params
from megajax.layers.context import Context
from megajax.layers.param import bind
from megajax.layers.stack import BLOCKS, Unit
from megajax.models.decoder import DecoderLM
from megajax.pipeline.executor import Span, Stage, Staged
from megajax.pipeline.partition import Partition
from megajax.pipeline.schedule import Schedule
from megajax.training.grads import GradFn, Sums, Weights, over_replicas
from megajax.training.loss import LossFn

OTHERS = "stack."
"""Where a stack's weights are that are not cut over stages."""
STACK = OTHERS + BLOCKS
"""Where a model's stacked weights are."""


def staged(weights: Weights, loss_fn: LossFn, key: Array | None, partition: Partition) -> Staged:
    """A decoder cut at its stack. key: random key of the run for dropout, None for none."""
    model = weights.model
    shapes = {path: jax.ShapeDtypeStruct(spec.shape, "float32") for path, spec in weights.declared.items()}

    def look_up(shared: Params, rows: LMBatch) -> Array:
        return bind(model, shapes | dict(shared)).look_up(rows.tokens)

    def enter(shared: Params, x: Array, ctx: Context) -> Array:
        return bind(model, shapes | dict(shared)).enter(x, ctx)

    def head(shared: Params, x: Array, rows: LMBatch) -> tuple[Array, tuple]:
        out = loss_fn.head(bind(model, shapes | dict(shared)), x, rows, key)
        return out.loss_sum, tuple(out)

    def common(shared: Params) -> Params:
        return {path: shared[path] for path in shared if path.startswith(OTHERS)}

    return Staged(
        lambda rows: loss_fn.context(model, rows, key), look_up, enter, spans(model, partition.rows), common, head
    )


def spans(model: DecoderLM, repeats: int) -> list[Span]:
    """The repeats of a chunk, as the stack wants them differentiated."""

    def named(unit: Unit) -> Unit:
        return lambda weights, common, numbers, x, ctx: unit(
            weights, {path.removeprefix(OTHERS): w for path, w in common.items()}, numbers, x, ctx
        )

    return [Span(units, together, named(unit), unroll) for units, together, unit, unroll in model.stack.spans(repeats)]


type Schedules = Callable[[int], Schedule]
"""Microbatches of a step -> what stages do when; steps of another size are compiled apart."""


def _stage(
    weights: Weights, plan: tuple[Schedules, Partition], parts: Staged, params: Params, batch: LMBatch, scale: Array
) -> Stage:
    schedules, partition = plan
    held = {path: weights.hold(path, w, scale) for path, w in params.items()}
    stacked = {path.removeprefix(STACK): w for path, w in held.items() if path.startswith(STACK)}
    shared = {path: w for path, w in held.items() if not path.startswith(STACK)}
    schedule = schedules(batch.tokens.shape[0])
    return Stage(schedule, partition, parts, weights.layout, stacked, shared, weights.cut_over("pipeline"), batch)


def pipelined(
    weights: Weights,
    loss_fn: LossFn,
    key: Array | None,
    mesh: Mesh,
    schedules: Schedules,
    partition: Partition,
    *,
    fill: float = 0.0,
) -> GradFn:
    """A gradient function that runs a schedule; see megajax.pipeline.executor.

    key: random key of the run for dropout, None for none; fill: what buffers hold before they are written.
    """
    parts = staged(weights, loss_fn, key, partition)

    def local(params: Params, batch: LMBatch, scale: Array) -> tuple:
        stage = _stage(weights, (schedules, partition), parts, params, batch, scale)

        def zeros(held: Params) -> Params:
            prefix = STACK if held is stage.stacked else ""
            whole = weights.zeros({prefix + path: w for path, w in held.items()})
            return {path.removeprefix(prefix): g for path, g in whole.items()}

        sums, stacked, shared = stage.gradients(scale, zeros, fill=fill)
        total = {STACK + path: g for path, g in stacked.items()} | shared
        return over_replicas(sums), {path: weights.reduce(path, total[path]) for path in params}

    mapped = weights.manual(local, mesh, (PartitionSpec(), weights.reduced_specs()))

    def grad_fn(params: Params, batch: LMBatch, scale: Array) -> Grads:
        (loss_sum, weight_sum, metrics), grads = mapped(dict(params), batch, scale)
        return Grads(loss_sum, weight_sum, grads, metrics)

    return grad_fn


def pipelined_sums(
    weights: Weights, loss_fn: LossFn, mesh: Mesh, schedules: Schedules, partition: Partition
) -> Callable[[Params, LMBatch], Sums]:
    """(weights, batch [M, B, S]) -> metrics summed over the batch, without gradients or dropout."""
    parts = staged(weights, loss_fn, None, partition)

    def local(params: Params, batch: LMBatch, scale: Array) -> Mapping[str, tuple[Array, Array]]:
        return over_replicas(_stage(weights, (schedules, partition), parts, params, batch, scale).losses()[2])

    return weights.sums(local, mesh)
