"""A model as gradient functions see it: cut into way in, stack and loss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax import Array

from megajax.batch import Loss, Params, Rows
from megajax.config.errors import UserError
from megajax.layers.param import ParamSpec, bind
from megajax.layers.stack import BLOCKS, Unit
from megajax.models.protocol import Model, Section
from megajax.models.reduction import LossReduction
from megajax.pipeline.staged import Span, Staged

OTHERS = "stack."
"""Where a stack's weights are that are not cut over stages."""
STACK = OTHERS + BLOCKS
"""Where a model's stacked weights are."""


def only_section(model: Model) -> Section:
    """The model's section. Raises UserError for several, which no gradient function runs yet."""
    if len(model.sections) != 1:
        raise UserError(f"{type(model).__name__} has {len(model.sections)} sections, training runs models of one")
    return next(iter(model.sections.values()))


def forward(model: Model, rows: Rows, key: Array | None, reduction: LossReduction) -> Loss:
    """The loss of a microbatch [B, ...], whole; not to be differentiated. key: random key, None: deterministic."""
    section = only_section(model)
    ctx = section.context(rows, key)
    return model.loss(section.stack(section.enter(section.embed(rows), ctx), ctx), rows, ctx, reduction)


def staged(
    model: Model,
    declared: Mapping[str, ParamSpec],
    reduction: LossReduction,
    key: Array | None,
    repeats: int,
    first: int | None = None,
) -> Staged:
    """The model (abstract) cut at its stack.

    key: random key of the run for dropout, None for none; repeats: of the stack's pattern in a chunk; first: number of
    the first of them where that is the same on all devices.
    """
    shapes = {path: jax.ShapeDtypeStruct(spec.shape, "float32") for path, spec in declared.items()}
    section = only_section(model)

    def bound(shared: Params) -> Any:
        return bind(model, shapes | dict(shared))

    def embed(shared: Params, rows: Rows) -> Array:
        return only_section(bound(shared)).embed(rows)

    def enter(shared: Params, x: Array, ctx: Any) -> Array:
        return only_section(bound(shared)).enter(x, ctx)

    def head(shared: Params, x: Array, rows: Rows, scale: Array | float = 1.0) -> tuple[Array, tuple]:
        loss = bound(shared).loss(x, rows, section.context(rows, key), replace(reduction, scale=scale))
        return loss.loss_sum, tuple(loss)

    def common(shared: Params) -> Params:
        return {path: shared[path] for path in shared if path.startswith(OTHERS)}

    def named(unit: Unit) -> Unit:
        return lambda weights, common, numbers, x, ctx: unit(
            weights, {path.removeprefix(OTHERS): w for path, w in common.items()}, numbers, x, ctx
        )

    spans = [
        Span(span.units, span.repeats, named(span.unit), span.unroll, span.start, span.weights)
        for span in section.stack.spans(repeats, first)
    ]
    return Staged(lambda rows: section.context(rows, key), embed, enter, spans, common, head)


class Parted(NamedTuple):
    """Weights, or other values by path, apart: those of the stack and the others."""

    stacked: dict[str, Any]
    """By their paths in the stack's blocks."""
    shared: dict[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Parted":
        """From values by path in the model."""
        stacked = {path.removeprefix(STACK): value for path, value in values.items() if path.startswith(STACK)}
        return cls(stacked, {path: value for path, value in values.items() if not path.startswith(STACK)})

    def whole(self) -> dict[str, Any]:
        """By path in the model."""
        return {STACK + path: value for path, value in self.stacked.items()} | self.shared
