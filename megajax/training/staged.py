"""A decoder as gradient functions see it: cut into embedding, stack and loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax import Array

from megajax.batch import LMBatch, Params
from megajax.layers.context import Context
from megajax.layers.param import ParamSpec, bind
from megajax.layers.stack import BLOCKS, Unit
from megajax.models.decoder import DecoderLM
from megajax.pipeline.staged import Span, Staged
from megajax.training.loss import LossFn

OTHERS = "stack."
"""Where a stack's weights are that are not cut over stages."""
STACK = OTHERS + BLOCKS
"""Where a model's stacked weights are."""


def staged(
    model: DecoderLM,
    declared: Mapping[str, ParamSpec],
    loss_fn: LossFn,
    key: Array | None,
    repeats: int,
    first: int | None = None,
) -> Staged:
    """The model (abstract) cut at its stack.

    key: random key of the run for dropout, None for none; repeats: of the stack's pattern in a chunk; first: number of
    the first of them where that is the same on all devices.
    """
    shapes = {path: jax.ShapeDtypeStruct(spec.shape, "float32") for path, spec in declared.items()}

    def look_up(shared: Params, rows: LMBatch) -> Array:
        return bind(model, shapes | dict(shared)).look_up(rows.tokens)

    def enter(shared: Params, x: Array, ctx: Context) -> Array:
        return bind(model, shapes | dict(shared)).enter(x, ctx)

    def head(shared: Params, x: Array, rows: LMBatch, scale: Array | float = 1.0) -> tuple[Array, tuple]:
        out = loss_fn.head(bind(model, shapes | dict(shared)), x, rows, key, scale)
        return out.loss_sum, tuple(out)

    def common(shared: Params) -> Params:
        return {path: shared[path] for path in shared if path.startswith(OTHERS)}

    def named(unit: Unit) -> Unit:
        return lambda weights, common, numbers, x, ctx: unit(
            weights, {path.removeprefix(OTHERS): w for path, w in common.items()}, numbers, x, ctx
        )

    spans = [
        Span(span.units, span.together, named(span.unit), span.unroll) for span in model.stack.spans(repeats, first)
    ]
    return Staged(lambda rows: loss_fn.context(model, rows, key), look_up, enter, spans, common, head)


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
