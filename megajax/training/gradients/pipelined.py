"""Gradients of a global batch through a pipeline, with the signature of `accumulate`."""

from collections.abc import Callable, Mapping

from jax import Array
from jax.sharding import Mesh, PartitionSpec

from megajax.batch import SAMPLE, Batch, Grads, Params
from megajax.pipeline.executor import AXIS, StageExecutor
from megajax.pipeline.partition import Partition, Staged
from megajax.pipeline.schedule import Schedule
from megajax.training.gradients.grads import GradFn, Sums, Weights, over_replicas
from megajax.training.gradients.position_weights import by_position
from megajax.training.gradients.staged import SplitWeights

type Schedules = Callable[[int], Schedule]
"""Number of microbatches -> the schedule of the stages; each number is compiled separately."""


def _stage[T: StageExecutor](
    kind: type[T],
    weights: Weights,
    schedule: Schedule,
    partition: Partition,
    parts: Staged,
    in_step: Params,
    batch: Batch,
) -> T:
    (section,) = parts.sections
    stacked, shared = SplitWeights.of(in_step, [section.path])
    dtypes = SplitWeights.of(weights.gradient_dtypes(), [section.path]).stacked
    chunks, sharded = stacked[section.path], weights.sharded_over(AXIS)
    return kind(schedule, partition, parts, weights.layout, chunks, shared, sharded, dtypes[section.path], batch)


def pipelined(
    weights: Weights,
    parts: Staged,
    mesh: Mesh,
    schedules: Schedules,
    partition: Partition,
    *,
    kind: type[StageExecutor] = StageExecutor,
    fill: float = 0.0,
) -> GradFn:
    """A gradient function that runs a schedule; see megajax.pipeline.executor.

    parts: divided into chunks; kind: what runs a tick; fill: initial value of buffers.
    """

    def local(params: Params, batch: Batch, scale: Array) -> tuple:
        in_step, batch = by_position(weights.declared, parts, weights.gather_all_for_step(params, scale), batch)
        stage = _stage(kind, weights, schedules(len(batch[SAMPLE])), partition, parts, in_step, batch)
        (section,) = parts.sections
        zeros = SplitWeights.of(weights.zeros(in_step), [section.path])
        sums, stacked, shared = stage.gradients(scale, (zeros.stacked[section.path], zeros.shared), fill=fill)
        return over_replicas(sums), weights.reduce_all(SplitWeights({section.path: stacked}, shared).joined())

    mapped = weights.manual(local, mesh, (PartitionSpec(), weights.reduced_specs()))

    def grad_fn(params: Params, batch: Batch, scale: Array) -> Grads:
        return weights.grads(*mapped(dict(params), dict(batch), scale))

    return grad_fn


def pipelined_sums(
    weights: Weights, parts: Staged, mesh: Mesh, schedules: Schedules, partition: Partition
) -> Callable[[Params, Batch], Sums]:
    """(weights, batch [M, B, ...]) -> metrics summed over the batch, without gradients or dropout."""

    def local(params: Params, batch: Batch, scale: Array) -> Mapping[str, tuple[Array, Array]]:
        in_step = weights.gather_all_for_step(params, scale)
        stage = _stage(StageExecutor, weights, schedules(len(batch[SAMPLE])), partition, parts, in_step, batch)
        return over_replicas(stage.losses()[2])

    return weights.sums(local, mesh)
