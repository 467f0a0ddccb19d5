"""The weight of a position in a step, for losses of layers that are means over positions rather than over labels.

Gradients of a step are sums that are divided once, by the sum of the labels' weights. A layer that adds the gradient of
a sum over positions, such as a router's balancing loss, therefore multiplies it by that sum over the number of
positions: a mean over positions remains, whatever the labels' weights are. Both sums depend on the batch alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters.partial_eval import dce_jaxpr

from megajax.batch import Batch, Params, Rows
from megajax.layers.param import ParamSpec
from megajax.mesh.layer_observations import OverPositions
from megajax.models.reduction import divisor
from megajax.pipeline.partition import Staged, StagedSection
from megajax.training.gradients.grads import over_replicas
from megajax.training.gradients.staged import STACK


def by_position(
    declared: Mapping[str, ParamSpec], parts: Staged, in_step: Params, batch: Batch
) -> tuple[Params, Batch]:
    """The arrays of a step, with observations that layers read as a scale multiplied by the weight of a position; and
    the batch, made to depend on that weight: on few CPU cores, collectives of layers beside these would wait forever.

    declared: of `in_step`; parts: the model in the step; batch: [M, B, ...], the device's part.
    """
    paths = [path for path, spec in declared.items() if sums_over_positions(spec)]
    if not paths:
        return in_step, batch
    counts = {section.path.removesuffix(STACK): counted_positions(section.context) for section in parts.sections}
    weight, positions = over_replicas(
        (_total(labels_weight(parts, in_step), batch), {path: _total(count, batch) for path, count in counts.items()})
    )

    def factor(path: str) -> Array:
        section = max((prefix for prefix in positions if path.startswith(prefix)), key=len)
        return divisor(weight) / divisor(positions[section])

    later = {name: jnp.where(weight < 0, jnp.zeros_like(leaf), leaf) for name, leaf in batch.items()}
    return {**in_step, **{path: in_step[path] * factor(path) for path in paths}}, later


def _total(of_rows: Callable[[Rows], Array], batch: Batch) -> Array:
    return jnp.sum(lax.map(of_rows, dict(batch)))


def sums_over_positions(spec: ParamSpec) -> bool:
    """Whether the layers of an observation add gradients of sums over positions."""
    return isinstance(spec.updater, OverPositions) and spec.updater.over_positions()


def counted_positions(context: Callable) -> Callable[[Rows], Array]:
    """rows [B, ...] -> the number of positions that are not padding, float32 []. context: of a section."""

    def count(rows: Rows) -> Array:
        ctx = context(rows)
        return jnp.float32(ctx.positions.size) if ctx.padding is None else jnp.sum(~ctx.padding, dtype=jnp.float32)

    return count


def labels_weight(parts: Staged, shared: Params) -> Callable[[Rows], Array]:
    """rows [B, ...] -> the weight of the rows' loss, `Loss.weight_sum`, without the computation of the loss.

    It does not depend on the model's output. Where the tracer can't tell, the output is taken as zeros.
    """

    def weight(rows: Rows) -> Array:
        memory: Any = None
        for section in parts.sections:
            memory = jax.eval_shape(partial(_output, section), shared, rows, memory)
        closed = jax.make_jaxpr(lambda x, rows: parts.head(shared, x, rows)[1][1])(memory, rows)
        # Equations without outputs have effects, such as a print.
        pure = closed.jaxpr.replace(eqns=[equation for equation in closed.jaxpr.eqns if equation.outvars])
        jaxpr, used = dce_jaxpr(pure, [True])
        arrays = jnp.zeros(memory.shape, memory.dtype), *jax.tree.leaves(rows)
        needed = [array for array, is_used in zip(arrays, used, strict=True) if is_used]
        (total,) = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(jaxpr, closed.consts))(*needed)
        return total

    return weight


def _output(section: StagedSection, shared: Params, rows: Rows, memory: Array | None) -> Array:
    """An array like the output of a section whose layers are the identity."""
    ctx = section.context(rows)
    x = section.enter(shared, section.embed(shared, rows), ctx, memory)
    return x if section.leave is None else section.leave(shared, x, ctx, memory)
