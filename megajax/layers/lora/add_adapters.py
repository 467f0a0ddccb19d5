"""Adding low-rank adapters to a built model, dropout of their inputs, and several adapters in one matrix."""

import zlib
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.config.errors import UserError
from megajax.config.hints import matching
from megajax.layers.context import Context, dropout
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.param import matrices_of
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import LogicalAxes

SETTING = "model.lora.targets"


def adapt[M: nnx.Module](cfg: LoRAConfig, model: M) -> M:
    """The model with an adapter on each matrix that matches a target.

    Raises UserError for a target that matches no matrix, for a rank above the smaller side of every adapted matrix, and
    for dropout or magnitudes where they are not possible. The rank may exceed the sides of some matrices, such as
    routers.
    """
    matrices = matrices_of(model)
    targeted = {path for target in cfg.targets for path in matching(SETTING, target, matrices, "matrix")}
    widest = max(sorted(targeted), key=lambda path: matrices[path].smaller_side())
    if cfg.rank > (side := matrices[widest].smaller_side()):
        raise UserError(
            f"model.lora.rank={cfg.rank} is more than the smaller side of every matrix that has an adapter; the "
            f"largest smaller side is {side}, of {widest}\n"
            f"Use a rank of at most {side}, or train the matrices themselves (optimizer.trainable)."
        )
    for path, matrix in matrices.items():
        if path not in targeted:
            continue
        if cfg.decomposed and "expert" in matrix.array.axes:
            raise UserError(
                f"model.lora.decomposed=true is not possible for {path}: it is a matrix of experts\n"
                f"Set it to false, or name only other matrices in {SETTING}."
            )
        if cfg.dropout and ("expert" in matrix.array.axes or not matrix.array.layers):
            why = "rows are reordered for experts" if matrix.array.layers else "it is not in a stack"
            raise UserError(
                f"model.lora.dropout={cfg.dropout:g} is not possible for {path}: {why}\n"
                f"Set it to 0, or name only matrices inside a stack, outside experts, in {SETTING}."
            )
        matrix.adapt(cfg.rank, cfg.scale(), cfg.dropout, decomposed=cfg.decomposed)
    return model


def drop_inputs(block: nnx.Module, ctx: Context) -> None:
    """Turns on input dropout in the adapters of a block, if the context has row keys.

    Each adapter has its own mask, seeded by its path in the block.
    """
    if ctx.row_keys is None:
        return
    for path, matrix in matrices_of(block).items():
        if matrix.low_rank is not None and matrix.low_rank.rate:
            place = zlib.crc32(path.encode()) >> 1
            matrix.low_rank = replace(matrix.low_rank, drop=partial(_dropped, ctx, place, matrix.layout))


class AdapterSlots(NamedTuple):
    """Room for several adapters beside each matrix: `build(model)` adds it, as a config of adapters does.

    A and B of a matrix hold all slots: slot s is the columns s * rank to (s + 1) * rank of A, and the same rows of B.
    The scale of an adapter is part of its B.
    """

    count: int
    rank: int
    """Maximum rank of an adapter."""

    def build[M: nnx.Module](self, model: M) -> M:
        """The model with slots beside the matrices that `Stack.step` multiplies by, except those of experts."""
        for path, matrix in matrices_of(model).items():
            if path.startswith(STACKED) and "expert" not in matrix.array.axes:
                matrix.adapt(self.count * self.rank, 1.0, 0.0)
        return model

    def columns(self, slots: Array) -> Array:
        """Slot of each token int32 [T], -1 for none -> its columns of A, bool [T, count * rank]."""
        return slots[:, None] == jnp.repeat(jnp.arange(self.count), self.rank)[None]


STACKED = "stack.blocks."
"""Prefix of the paths of matrices that decoding steps multiply by."""


def choose_adapters(block: nnx.Module, columns: Array | None) -> None:
    """Lets each token of a decoding step use some columns of the adapters' A in a block, bool [T, R]; None: all."""
    if columns is None:
        return
    for matrix in matrices_of(block).values():
        if matrix.low_rank is not None:
            matrix.low_rank = replace(matrix.low_rank, choose=partial(_chosen, columns))


def _chosen(columns: Array, inner: Array) -> Array:
    return jnp.where(columns.reshape(len(columns), *[1] * (inner.ndim - 2), -1), inner, 0)


def _dropped(ctx: Context, place: int, layout: Layout, x: Array, rate: float, axes: LogicalAxes) -> Array:
    """Dropout of x [B, S, ...], which may come from another section with its own length and positions."""
    local_ctx = ctx if x.shape[1] == ctx.index.shape[0] else ctx._replace(index=layout.row_index(x.shape[1]))
    return dropout(x, rate, local_ctx, place, layout, axes)
