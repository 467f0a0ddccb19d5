"""Divides a model for gradient functions: the inputs of its sections, their stacks, and the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax import Array

from megajax.batch import Loss, Params, Rows
from megajax.layers.context import Context
from megajax.layers.param import ParamSpec, bind
from megajax.layers.stack.spans import Unit
from megajax.layers.stack.stack import BLOCKS
from megajax.models.protocol import Model, last_output, with_memory
from megajax.models.reduction import LossReduction
from megajax.pipeline.partition import MEMORY, Partition, Staged, StagedSection

STACK_PREFIX = "stack."
"""Path prefix of the stack's weights in a section."""
STACK = STACK_PREFIX + BLOCKS
"""Path prefix of the stacked weights in a section."""


type Head = Callable[[Any, Array, Rows, Context, LossReduction], Loss]
"""(model, output of its last section, rows of a microbatch, context, reduction) -> sums over the microbatch."""


def training_loss(model: Model, x: Array, rows: Rows, ctx: Context, reduction: LossReduction) -> Loss:
    """The loss that the model defines."""
    return model.loss(x, rows, ctx, reduction)


def forward(model: Model, rows: Rows, key: Array | None, reduction: LossReduction, head: Head = training_loss) -> Loss:
    """The loss of a microbatch [B, ...], without gradients. key: random key; None: deterministic."""
    x, ctx = last_output(model.sections, rows, key)
    return head(model, x, rows, ctx, reduction)


def staged(
    model: Model,
    declared: Mapping[str, ParamSpec],
    reduction: LossReduction,
    key: Array | None,
    partition: Partition | None = None,
    loss: Head = training_loss,
) -> Staged:
    """The abstract model, divided at its stacks.

    key: random key of the run for dropout, None: no dropout; partition: the chunks of a pipeline, None: one chunk;
    loss: called with the output of the last section.
    """
    shapes = {path: jax.ShapeDtypeStruct(spec.shape, "float32") for path, spec in declared.items()}
    paths = tuple(model.sections)

    def bound(shared: Params) -> Any:
        return bind(model, shapes | dict(shared))

    def divide(path: str) -> StagedSection:
        section, prefix = model.sections[path], f"{path}." if path else ""

        def bound_section(shared: Params) -> Any:
            return bound(shared).sections[path]

        def with_names(unit: Unit) -> Unit:
            def run(weights: Params, common: Params, numbers: Array, x: Array, ctx: Context) -> Array:
                stack = {name.removeprefix(prefix + STACK_PREFIX): w for name, w in common.items() if name != MEMORY}
                return unit(weights, stack, numbers, x, with_memory(ctx, common.get(MEMORY)))

            return run

        stack = section.stack
        spans = stack.spans() if partition is None else partition.spans(stack)
        return StagedSection(
            path=prefix + STACK,
            context=lambda rows: section.context(rows, key),
            embed=lambda shared, rows: bound_section(shared).embed(rows),
            enter=lambda shared, x, ctx, memory: bound_section(shared).enter(x, with_memory(ctx, memory)),
            spans=[span._replace(unit=with_names(span.unit)) for span in spans],
            common=lambda shared: {name: shared[name] for name in shared if name.startswith(prefix + STACK_PREFIX)},
            leave=None
            if path == paths[-1]
            else lambda shared, x, ctx, memory: bound_section(shared).leave(x, with_memory(ctx, memory)),
        )

    def head(shared: Params, x: Array, rows: Rows, scale: Array | float = 1.0) -> tuple[Array, tuple]:
        ctx = model.sections[paths[-1]].context(rows, key)
        sums = loss(bound(shared), x, rows, ctx, replace(reduction, scale=scale))
        return sums.loss_sum, tuple(sums)

    return Staged([divide(path) for path in paths], head)


class SplitWeights(NamedTuple):
    """Weights, or other values by path, split into values of stacks and the others."""

    stacked: Mapping[str, Mapping[str, Any]]
    """Path of a stack -> values by path in its blocks."""
    shared: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any], stacks: Sequence[str]) -> "SplitWeights":
        """Splits values by path in the model. stacks: paths of the sections, see `StagedSection.path`."""
        stacked = {
            stack: {path.removeprefix(stack): value for path, value in values.items() if path.startswith(stack)}
            for stack in stacks
        }
        return cls(stacked, {path: v for path, v in values.items() if not path.startswith(tuple(stacks))})

    def joined(self) -> dict[str, Any]:
        """All values by path in the model."""
        by_path = {stack + path: value for stack, values in self.stacked.items() for path, value in values.items()}
        return {**by_path, **self.shared}
