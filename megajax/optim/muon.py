"""Muon: orthogonalised momentum for the matrices of the stack, on any layout.

Orthogonalisation needs whole matrices. If the rows of a matrix are sharded over data-parallel devices (ZeRO), the
devices exchange shards: each gets whole matrices of some layers, orthogonalises them and sends the shards back. A
device gathers one matrix at a time, every element moves twice, and no work is done twice. A matrix that tensor
parallelism shards along its longer side stays sharded: the small product of each iteration is summed over `tensor`. A
matrix sharded along its shorter side (keys and values of grouped-query attention) is gathered over `tensor` instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod, sqrt
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array

from megajax.batch import Params
from megajax.layers.param import ParamSpec
from megajax.mesh.mesh import free_axes
from megajax.mesh.sharding_rules import LogicalAxes, Plan, Rules
from megajax.optim.config import MuonConfig
from megajax.optim.optimizer import Adam, Moments, RuleOptimizer, UpdateRule
from megajax.optim.qk_clip import clipped, head_parts

type Polynomial = tuple[float, float, float]

POLYNOMIALS: Mapping[str, tuple[Polynomial, ...]] = MappingProxyType(
    {
        # Jordan et al. 2024.
        "simple": ((3.4445, -4.7750, 2.0315),),
        # Found by L. Cesista and others for the NanoGPT speed runs, 2025.
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # Amsel et al. 2025 (Polar Express); the last one repeats.
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
    }
)
"""(a, b, c) of X <- a X + (b A + c A^2) X with A = X X^T."""

HEADS = ("heads", "kv_heads", "kv_heads_copied")


@dataclass(frozen=True, slots=True)
class Matrices:
    """The dimensions of a stacked weight as matrices [in, out]."""

    stacked: int
    """Number of leading dimensions that index matrices: layer, and expert if there is one."""
    rows: int
    """Number of the following dimensions that form the rows; the rest form the columns."""

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) for a weight of that shape."""
        middle = self.stacked + self.rows
        return prod(shape[self.stacked : middle]), prod(shape[middle:])


def matrices(spec: ParamSpec) -> Matrices | None:
    """A weight as matrices; None for weights that Adam updates: embeddings, head, vectors and other non-matrices.

    heads and head_dim together form one dimension: query [embed, heads x head_dim], output [heads x head_dim, embed].
    Query, key and value are three matrices, gate and up are two.
    """
    if spec.role != "weight" or not spec.layers:
        return None
    axes = spec.axes[1:]
    experts = int(len(axes) > 2 and axes[0] == "expert")
    parts: list[int] = []
    for before, name in zip((None, *axes[experts:]), axes[experts:], strict=False):
        if before in HEADS and name == "head_dim":
            parts[-1] += 1
        else:
            parts.append(1)
    return Matrices(1 + experts, parts[0]) if len(parts) == 2 else None


def orthogonalise(x: Array, cfg: MuonConfig, *, tall: bool | None = None) -> Array:
    """x float32 [..., R, C] -> [..., R, C] with the same singular vectors and singular values near 1.

    Newton-Schulz iterations on x / |x|, on the side of the smaller dimension (Jordan et al. 2024). tall: whether that
    is C; only a square that is sharded needs it.
    """
    tall = x.shape[-2] > x.shape[-1] if tall is None else tall
    x = x.mT if tall else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, 1e-7)).astype(cfg.dtype)
    for a, b, c in polynomials(cfg):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.astype(jnp.float32)
    return x.mT if tall else x


def polynomials(cfg: MuonConfig) -> tuple[Polynomial, ...]:
    """The polynomial of each iteration."""
    coefficients = POLYNOMIALS[cfg.coefficients]
    if cfg.coefficients == "polar_express":
        return coefficients + coefficients[-1:] * (cfg.iterations - len(coefficients))
    return coefficients * (cfg.iterations // len(coefficients))


def scale(cfg: MuonConfig, rows: int, columns: int) -> float:
    """Factor on an orthogonal matrix [rows, columns] = [in, out]."""
    factors = {
        "spectral": max(rows, columns),
        "shape_scaling": max(1.0, columns / rows),
        "unit_rms_norm": columns / rows,
    }
    return cfg.extra_scale * sqrt(factors[cfg.scale])


@dataclass(frozen=True)
class Orthogonalised:
    """The rule of a stacked weight: the direction is the orthogonal factor of m <- momentum m + (1 - momentum) g."""

    cfg: MuonConfig
    axes: LogicalAxes
    shape: Matrices
    rules: Rules | None
    """Sharding rules of the moment; None: not sharded."""
    coupled: bool = False
    moments: tuple[str, ...] = ("momentum",)
    width_powers: tuple[int, int] = (0, 0)

    def __call__(self, g: Array, moments: Moments, step: Array) -> tuple[Array, Moments]:
        beta = self.cfg.momentum
        m = beta * moments[0] + (1 - beta) * g
        ahead = beta * m + (1 - beta) * g if self.cfg.nesterov else m
        return scale(self.cfg, *self.shape.size(g.shape)) * self.orthogonal(ahead), (m,)

    def orthogonal(self, x: Array) -> Array:
        """x [layers, ...] -> the same shape and layout; each sharing device computes one layer at a time."""
        stages, sharers = self._sizes()
        rows = x.shape[0] // stages
        rounds = -(-rows // sharers)
        # Layers of a stage are adjacent; each round takes the next layers of every stage.
        split = x.reshape(stages, rows, *x.shape[1:])
        padded = jnp.pad(split, ((0, 0), (0, rounds * sharers - rows), *((0, 0),) * (x.ndim - 1)))
        parts = jnp.moveaxis(padded.reshape(stages, rounds, sharers, *x.shape[1:]), 1, 0)
        orthogonal = jax.lax.map(self._round, parts)
        return jnp.moveaxis(orthogonal, 0, 1).reshape(padded.shape)[:, :rows].reshape(x.shape)

    def _round(self, part: Array) -> Array:
        """[stages, sharers, ...]: a matrix for each sharing device."""
        rows, columns = self._sharded_sides(*self.shape.size(part.shape[1:]))
        keep = self.rules if rows or columns else self._unsharded()
        matrix = self._laid_out(part.reshape(-1, *part.shape[2:]), keep)
        flat = matrix.reshape(*matrix.shape[: self.shape.stacked], *self.shape.size(matrix.shape))
        orthogonal = orthogonalise(flat, self.cfg, tall=True if rows else None)
        gathered = self._laid_out(orthogonal.reshape(matrix.shape), keep)
        return self._laid_out(gathered).reshape(part.shape)

    def _sharded_sides(self, rows: int, columns: int) -> tuple[bool, bool]:
        """Whether the rows or the columns stay sharded: only the longer side may."""
        if self.rules is None:
            return False, False
        first, free = self.shape.stacked, free_axes()
        names = (self.axes[first : first + self.shape.rows], self.axes[first + self.shape.rows :])
        sharded = [
            any(free.get(axis, 1) > 1 for name in side if name != "embed" for axis in self.rules.mesh_axes(name))
            for side in names
        ]
        return sharded[0] and rows >= columns, sharded[1] and columns >= rows

    def _unsharded(self) -> Rules | None:
        """Rules that shard only the dimensions that index matrices."""
        names = {name for name in self.axes[self.shape.stacked :] if name not in (None, "embed")}
        return None if self.rules is None else replace(self.rules, **dict.fromkeys(names, ()))

    def _sharing(self) -> tuple[str, ...]:
        """Mesh axes that `embed` is sharded over."""
        if self.rules is None:
            return ()
        dimensions = zip(self.axes, self.rules.dimensions(self.axes), strict=True)
        return tuple(axis for name, over in dimensions if name == "embed" for axis in over)

    def _sizes(self) -> tuple[int, int]:
        """(shards of `layer`, devices that share a stage's matrices) on the surrounding mesh."""
        if self.rules is None:
            return 1, 1
        free = free_axes()
        stages, sharers = (prod(free.get(axis, 1) for axis in axes) for axes in (self.rules.layer, self._sharing()))
        return stages, sharers

    def _laid_out(self, x: Array, keep: Rules | None = None) -> Array:
        """[layers, ...] sharded like the moment; or like `keep`, with the axes of `embed` moved to `layer`."""
        free = free_axes()
        if self.rules is None or max(free.values(), default=1) == 1:
            return x
        rules = self.rules if keep is None else replace(keep, embed=(), layer=(*keep.layer, *self._sharing()))
        return jax.lax.with_sharding_constraint(x, rules.spec(self.axes, keep=tuple(free)))


class ClippedMuon(RuleOptimizer):
    """Muon with QK-clip."""

    def adjusted(self, params: Params, observed: Params) -> Params:
        return clipped(params, observed, head_parts(self.declared), self.limit)

    @property
    def limit(self) -> float:
        """The bound of scores. Raises ValueError for settings without one."""
        if not isinstance(self.cfg, MuonConfig) or self.cfg.qk_clip is None:
            raise ValueError("optimizer.qk_clip is none")
        return self.cfg.qk_clip

    def kinds(self) -> dict[str, str]:
        clipping = {part.path: f" with QK-clip at {self.limit:g}" for part in head_parts(self.declared)}
        return {path: kind + clipping.get(path, "") for path, kind in super().kinds().items()}


def muon(
    cfg: MuonConfig, declared: Mapping[str, ParamSpec], plan: Plan | None = None, width: float = 1.0
) -> RuleOptimizer:
    """Orthogonalised momentum for matrices of the stack, AdamW for the rest."""
    rules = None if plan is None else plan.optimizer
    adam = Adam(cfg.beta1, cfg.beta2, cfg.epsilon)
    rules_by_path: dict[str, UpdateRule] = {}
    for path, spec in declared.items():
        shape = matrices(spec)
        rules_by_path[path] = adam if shape is None else Orthogonalised(cfg, spec.axes, shape, rules)
    kind = RuleOptimizer if cfg.qk_clip is None else ClippedMuon
    return kind(cfg, declared, rules_by_path, width)
