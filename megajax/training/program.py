"""The train and evaluation steps of a config on a mesh, without data or weights; the devices may be virtual."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped

from megajax.batch import SAMPLE, Batch, Leaf, Params, Schema, batch_schema
from megajax.config.errors import UserError
from megajax.kernels.attention.attention import local_device
from megajax.kernels.attention.capability import KernelChoice
from megajax.kernels.attention.request import KernelDevice, KernelRequest
from megajax.kernels.grouped.matmul import code_products
from megajax.layers.param import Adapter, Observation, ParamSpec, reordered, specs
from megajax.layers.quantization.replace_matrices import demand_device
from megajax.mesh.config import BATCH_AXES, TOKEN_AXES, ContextSharding, ParallelConfig, devices_over
from megajax.mesh.layout import Layout, exact, exact_on_cpus
from megajax.mesh.sharding_rules import Plan, demand_known
from megajax.mesh.zigzag_order import SequenceSharding
from megajax.models.facts import ChoosesKernels, ModelSummary, summarize
from megajax.models.protocol import Model, ModelConfig, demand_model
from megajax.models.reduction import LossReduction
from megajax.optim.config import score_limit
from megajax.optim.groups import trainable
from megajax.optim.optimizer import Optimizer
from megajax.optim.schedule import RateSchedule
from megajax.pipeline.check import check
from megajax.pipeline.executor import StageExecutor
from megajax.pipeline.partition import Partition, Staged
from megajax.pipeline.schedule import Schedule, build
from megajax.pipeline.side_by_side import SideBySide
from megajax.precision.config import PrecisionConfig
from megajax.precision.fp8 import capability_of
from megajax.precision.loss_scale import LossScaler
from megajax.precision.matmul import RoundedMatmul
from megajax.precision.recipes import recipe_of
from megajax.processes.xla_options import Value, options_for_once
from megajax.training.batch_sizes import BatchSizes
from megajax.training.check_compiler_options import run_options
from megajax.training.config import BatchConfig
from megajax.training.gradients.accumulate import accumulate
from megajax.training.gradients.grads import GradFn, Weights, batch_specs, forward_sums
from megajax.training.gradients.pipelined import pipelined, pipelined_sums
from megajax.training.gradients.staged import Head, staged, training_loss
from megajax.training.limits.nonfinite_gradients import NonfiniteGradients, make_nonfinite_gradients
from megajax.training.limits.step import exchanging, guarded
from megajax.training.observations import following
from megajax.training.run_config import RunConfig
from megajax.training.state import TrainState, fresh_state, parameter_shardings, state_shardings
from megajax.training.step import (
    ScheduleChoice,
    ScheduledTrainStep,
    StepParts,
    StepScheduler,
    compiled,
    make_eval_step,
)

DROPOUT_STREAM = 1
"""Separates the random numbers of dropout from those of the initial weights, which have the same seed."""


class WeightElements(NamedTuple):
    """Numbers of elements of a program's weights."""

    stored: int
    trained: int
    low_rank: int
    """In low-rank adapters."""


@dataclass(frozen=True)
class Program:
    """The programs of a config on one mesh."""

    cfg: RunConfig
    mesh: Mesh
    layout: Layout
    abstract: Model
    """The model without values."""
    declared: Mapping[str, ParamSpec]
    """The model's weights by path."""
    observed: Mapping[str, ParamSpec]
    """The model's observations by path."""
    optimizer: Optimizer
    schedule: RateSchedule
    shardings: Any
    """Sharding of each leaf of the state: a TrainState of NamedShardings."""
    sizes: BatchSizes
    """Rows and microbatches of each step."""
    partition: Partition
    """The layers of each stage."""
    pipeline: Schedule | None
    """The schedule of the stages in steps of the last batch size; None without a pipeline."""
    options: Mapping[str, Value]
    """Compiler options of every program of the run."""
    schema: Schema
    """The leaves of the run's batches."""
    scheduler: StepScheduler | None = None
    """Compiles the train step with the times of a cost model; None: XLA schedules it by its own."""

    def __repr__(self) -> str:
        used = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items() if size > 1)
        return f"<Program: {type(self.abstract).__name__}, {self.mesh.size} devices{': ' * bool(used)}{used}>"

    @property
    def microbatches(self) -> int:
        """Microbatches of a step of the last batch size, the largest."""
        return self.sizes.sizes()[-1].microbatches

    @property
    def parameters(self) -> int:
        """Number of weights, without padding of the vocabulary if the model has facts."""
        facts = self.summary.facts
        if facts is None:
            return self.elements.stored
        return facts.parameter_count().total

    @cached_property
    def summary(self) -> ModelSummary:
        """Figures of the model that follow from its config."""
        return summarize(self.cfg.model, self.cfg.optimizer.trainable)

    @property
    def elements(self) -> "WeightElements":
        """Elements of the weights, padding included."""
        paths = self.declared, self.optimizer.declared, self.adapters
        return WeightElements(*(sum(weight_size(self.declared[path]) for path in group) for group in paths))

    @cached_property
    def adapters(self) -> frozenset[str]:
        """Paths of the weights of low-rank adapters."""
        abstract: Any = self.abstract
        return frozenset(specs(abstract, Adapter))

    @property
    def arrays(self) -> dict[str, ParamSpec]:
        """Weights and observations by path."""
        return {**self.declared, **self.observed}

    def used(self, inputs: Params) -> dict[str, Array]:
        """Weights and observations of the state -> unchanged weights, and observations as layers read them."""
        scale = jnp.ones((), jnp.float32)
        return {
            path: self._weights.gather_for_step(path, x, scale) if path in self.observed else x
            for path, x in inputs.items()
        }

    @classmethod
    def of(
        cls,
        cfg: RunConfig,
        mesh: Mesh,
        options: Mapping[str, Value] | None = None,
        scheduler: StepScheduler | None = None,
    ) -> "Program":
        """The program of a config that passes its checks on the mesh's devices.

        options: compiler options; None: those of the config that the compiler accepts. Raises ConfigError for user
        options that it refuses.
        """
        demand_device(cfg.model, mesh.devices.flat[0])
        layout = _layout(cfg.parallel, cfg.precision, cfg.batch, cfg.model, mesh)
        layout = replace(layout, observes_scores=score_limit(cfg.optimizer) is not None)
        plan, partition = layout.plan, _partition(cfg.parallel, cfg.model)
        model = nnx.eval_shape(lambda: cfg.model.build(layout))
        demand_model(model)
        abstract = reordered(model, partition.order_of)
        declared, observed = specs(abstract), specs(abstract, Observation)
        demand_axes(cfg.model.schema(), {**declared, **observed})
        demand_divisible(declared, plan, mesh)
        trained = trainable(cfg.optimizer, declared, {*specs(abstract, Adapter)}, cfg.model.never_trained())
        optimizer = cfg.optimizer.build(trained, plan, cfg.model.width_ratio())
        if not isinstance(optimizer, Optimizer):
            message = f"{type(cfg.optimizer).__name__}.build returned a {type(optimizer).__name__}"
            raise UserError(f"{message}, not a megajax.optim.optimizer.Optimizer")
        sizes = cfg.batch_sizes(devices_over(mesh.shape, BATCH_AXES))
        return cls(
            cfg,
            mesh,
            layout,
            abstract,
            declared,
            following(observed, trained),
            optimizer,
            cfg.schedule.build(steps=cfg.steps, global_size=cfg.batch.global_size, samples=sizes.samples),
            state_shardings(declared, optimizer, plan, mesh, observed),
            sizes,
            partition,
            _pipeline(cfg.parallel, sizes.sizes()[-1].microbatches) if cfg.parallel.pipeline > 1 else None,
            run_options(cfg, mesh) if options is None else options,
            batch_schema(cfg.model.schema(), cfg.data.leaves()),
            scheduler,
        )

    def fresh_state(self) -> Callable[[], TrainState]:
        """Jitted: the state before the first step, computed in its shardings."""
        options = options_for_once(self.options, self.mesh.devices.flat[0].platform, self.elements.stored)
        return jax.jit(self._fresh, out_shardings=self.shardings, compiler_options=options)

    def state_like(self) -> TrainState:
        """The state as jax.ShapeDtypeStruct, with shardings."""
        return jax.tree.map(_placed, jax.eval_shape(self._fresh), self.shardings)

    def batch_like(self) -> Batch:
        """A global batch [M, B, ...] as jax.ShapeDtypeStruct, with shardings."""
        rows, microbatches = self.sizes.sizes()[-1]
        leading = (microbatches, rows // microbatches)

        def like(leaf: Leaf) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leading, *leaf.shape), leaf.dtype)

        return {name: _placed(like(leaf), self.batch_shardings[name]) for name, leaf in self.schema.items()}

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """Shardings of the leaves of a batch [M, B, ...]."""
        specs = batch_specs(self.schema, self.layout)
        return {name: NamedSharding(self.mesh, spec) for name, spec in specs.items()}

    def grad_fn(self, *, fill: float = 0.0, weights: Callable[..., Weights] = Weights) -> GradFn:
        """(weights, batch, loss scale) -> sums of gradients.

        fill: see `pipelined`; unused without a pipeline. weights: subclass of Weights, which reduces the gradients.
        """
        moving = self._weights_as(weights)
        key = jax.random.fold_in(jax.random.key(self.cfg.seed), DROPOUT_STREAM)
        if self.pipeline is None:
            parts = staged(self.abstract, self.arrays, self._reduction, key)
            return accumulate(moving, parts, self.mesh, self.cfg.batch.side_by_side)
        kind = SideBySide if self.cfg.batch.side_by_side > 1 else StageExecutor
        return pipelined(moving, self._chunks(key), self.mesh, self.schedule_of, self.partition, kind=kind, fill=fill)

    def schedule_of(self, microbatches: int) -> Schedule:
        """The schedule of the stages in a step of `microbatches` microbatches."""
        return _pipeline(self.cfg.parallel, microbatches)

    @cached_property
    def train_step(self) -> Wrapped | ScheduledTrainStep:
        """(state, batch) or (state, batch, StepControl) -> (state, metrics); compiled when it is called or lowered."""
        step = guarded(self.step_parts, drills=bool(self.cfg.resilience.drills()))
        jitted = compiled(exchanging(step, self.shardings.step), self.step_parts, self.options)
        return jitted if self.scheduler is None else self.scheduler.schedule(jitted)

    def schedules(self) -> list[ScheduleChoice]:
        """Of the programs of the train step that are compiled with the times of a cost model."""
        return [*self.train_step.scheduled.values()] if isinstance(self.train_step, ScheduledTrainStep) else []

    @cached_property
    def step_parts(self) -> StepParts:
        """The parts of the train step; `plain_step` of them is the step without a guard."""
        return StepParts(
            grad_fn=self.grad_fn(),
            optimizer=self.optimizer,
            schedule=self.schedule,
            shardings=self.shardings,
            gradient_shardings=parameter_shardings(self.optimizer.declared, self.layout.plan.optimizer, self.mesh),
            scaler=self._scaler,
            weight=self._weight,
            observed=self.observed,
        )

    @cached_property
    def nonfinite_gradients(self) -> NonfiniteGradients:
        """(weights, batch, loss scale, factor) -> whether gradients are not finite, by path; compiled when called."""
        return make_nonfinite_gradients(self.grad_fn(), self.shardings.step, self.options, self._weight, self.observed)

    @cached_property
    def eval_step(self) -> Callable[[Any, Any], Mapping[str, tuple[Array, Array]]]:
        """(weights, batch) -> {name: (sum, weight)}."""
        return self.forward_step(training_loss)

    def forward_step(self, head: Head) -> Callable[[Any, Any], Mapping[str, tuple[Array, Array]]]:
        """(weights, batch) -> {name: (sum, weight)}: the metrics of `head`, summed over the batch; no dropout."""
        if self.pipeline is None:
            sums = forward_sums(self._weights, self._reduction, self.mesh, head)
        else:
            chunks = self._chunks(None, head)
            sums = pipelined_sums(self._weights, chunks, self.mesh, self.schedule_of, self.partition)
        return make_eval_step(sums, self.options)

    def _fresh(self) -> TrainState:
        return fresh_state(self.declared, self.optimizer, self.cfg.seed, self._scaler, self.observed)

    @property
    def _scaler(self) -> LossScaler:
        return self.cfg.precision.scale().build()

    def _weight(self, batch: Batch) -> int:
        """Largest sum of weights of one device's losses in a step."""
        microbatches, rows = batch[SAMPLE].shape
        positions = rows * self.cfg.model.row_positions() // devices_over(self.mesh.shape, TOKEN_AXES)
        return microbatches * (positions if self._reduction.average == "tokens" else 1)

    @property
    def _weights(self) -> Weights:
        return self._weights_as(Weights)

    def _weights_as(self, kind: Callable[..., Weights]) -> Weights:
        frozen = frozenset(self.declared) - frozenset(self.optimizer.declared)
        return kind(self.abstract, self.arrays, self.schema, self.layout, self.cfg.precision, frozen)

    def _chunks(self, key: Array | None, head: Head = training_loss) -> Staged:
        return staged(self.abstract, self.arrays, self._reduction, key, self.partition, head)

    @property
    def _reduction(self) -> LossReduction:
        return LossReduction(self.cfg.batch.loss_average)


def demand_kernels(cfg: RunConfig, device: KernelDevice | None = None) -> tuple[KernelChoice[str], ...]:
    """The kernel of each block of the pattern on `device`; () for a model that does not choose kernels.

    device: None: the first local device. Raises UserError if the config names a kernel that the device lacks.
    """
    if not isinstance(cfg.model, ChoosesKernels):
        return ()
    split = ContextSharding.of(cfg.parallel, causal=cfg.model.ignores_later_positions())
    request = KernelRequest(dtype=cfg.precision.compute, documents="segment_ids" in cfg.data.leaves(), sharding=split)
    return cfg.model.kernel_choices(request, local_device() if device is None else device)


def demand_axes(schema: Schema, declared: Mapping[str, ParamSpec]) -> None:
    """Raises UserError for an array of a batch or of the model with an unknown logical axis."""
    for name, leaf in schema.items():
        demand_known(leaf.axes, f"{name}, a leaf of the model's schema,")
    for path, spec in declared.items():
        demand_known(spec.axes, f"the weight {path}")


def demand_divisible(declared: Mapping[str, ParamSpec], plan: Plan, mesh: Mesh) -> None:
    """Raises UserError for a weight with a dimension that is not divisible by its mesh axes."""
    for path, spec in declared.items():
        for rules in (plan.compute, plan.params, plan.optimizer):
            for size, name, axes in zip(spec.shape, spec.axes, rules.dimensions(spec.axes), strict=True):
                devices = devices_over(mesh.shape, axes)
                if size % devices:
                    over = " x ".join(axes)
                    raise UserError(
                        f"{path} has shape {spec.shape}: its dimension {name} of {size} is not divisible by the "
                        f"{devices} devices of {over}. Change the size or the layout (parallel)."
                    )


def _layout(
    parallel: ParallelConfig, precision: PrecisionConfig, batch: BatchConfig, model: ModelConfig, mesh: Mesh
) -> Layout:
    tokens = 1 if batch.loss_average == "tokens" else batch.micro_size * model.row_positions()
    device = mesh.devices.flat[0]
    layout = Layout(
        Plan.of(parallel),
        matmul=exact_on_cpus if device.platform == "cpu" else exact,
        gathered=precision.compute,
        reduced=precision.reduced_in(),
        rows=SequenceSharding.of(parallel, causal=model.ignores_later_positions()),
        token_weight=1 / tokens,
    )
    if precision.matmul is None:
        return layout
    matmul = RoundedMatmul(
        recipe_of(precision.matmul, device, layout.token_weight, code_products(capability_of(device)))
    )
    layers = precision.matmul.layers(model.stack.layers())
    once = precision.matmul.once_a_step(fsdp=parallel.data_sharding == "fsdp")
    layout = replace(layout, matrices=matmul.matrices if once else None, recipe_layers=layers)
    return replace(layout, matmul=matmul, grouped=matmul.grouped, beside=matmul.beside)


def _partition(parallel: ParallelConfig, model: ModelConfig) -> Partition:
    unit = model.stack.cut_unit()
    if parallel.layers is not None and parallel.pipeline > 1:
        return Partition(parallel.pipeline, parallel.virtual_stages, parallel.layers, unit)
    return Partition.even(model.stack.layers() // unit, parallel.pipeline, parallel.virtual_stages, unit)


def _pipeline(parallel: ParallelConfig, microbatches: int) -> Schedule:
    schedule = build(
        parallel.schedule,
        stages=parallel.pipeline,
        microbatches=microbatches,
        chunks=parallel.virtual_stages,
        loss_wait=parallel.loss_wait,
    )
    check(schedule)
    return schedule


def weight_size(spec: ParamSpec) -> int:
    """Elements of a weight, without padding rows."""
    rows = sum(layer >= 0 for layer in spec.layers)
    return prod(spec.shape) * rows // len(spec.layers) if spec.layers else prod(spec.shape)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
