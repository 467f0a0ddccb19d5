"""The object through which layers state the layout of arrays: act, gather, dot, island, zeros.

It reads the surrounding mesh while tracing. Axes that an enclosing shard_map made manual are dropped, and without a
mesh everything is the identity. So the same layer runs under plain `jax.jit` in a notebook and in the training step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_lowercase
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp
from jax import Array

from megajax.mesh.collectives import LetterSharding, Moves, gather_shards, moved_axes, reduce_shards
from megajax.mesh.layer_observations import Observed
from megajax.mesh.mesh import devices_along, free_axes, manual_axes
from megajax.mesh.sharding_rules import LogicalAxes, Plan, demand_known
from megajax.mesh.zigzag_order import AXIS, UNSHARDED_ROWS, SequenceSharding

type AxesTree = LogicalAxes | Sequence[AxesTree] | Mapping[str, AxesTree] | None
"""Logical axes of one array, or of each array of a tuple or a mapping; None where there is no array."""

type Matmul = Callable[..., Array]
"""A matmul recipe: (einsum equation, activation, weight, sharding=) -> their product, in the activation's dtype.

Hashable. The auxiliary arrays of the weight are passed as keyword arguments, by the names of `Layout.beside`.
"""


class MultipliedWeight(Protocol):
    """A weight that `Layout.dot` multiplies by."""

    def product(self, multiply: Matmul, equation: str, x: Array, *out: str | None) -> Array:
        """The product of x and the weight by this recipe, or by the weight's own recipe, as for quantized weights, with
        its adapter if there is one. out: logical axes of the product."""
        ...

    def axes(self) -> LogicalAxes:
        """Logical axes of the array for products."""
        ...


def exact(equation: str, x: Array, w: Array, **carried: object) -> Array:
    """einsum in x's dtype; ignores auxiliary arrays. The gradient of w is computed in w's dtype."""
    del carried
    return _product(in_order(equation), False, x, w)


def exact_on_cpus(equation: str, x: Array, w: Array, **carried: object) -> Array:
    """`exact`, with a barrier before the gradient of w.

    XLA for CPUs fuses what computes an operand, such as the derivative of an activation, into that product, which then
    computes it again for every tile. On GPUs a barrier delays collectives.
    """
    del carried
    return _product(in_order(equation), True, x, w)


def in_order(equation: str) -> str:
    """An einsum equation of a product with a weight, with letters in alphabetical order in the weight.

    einsum contracts dimensions in the order of their letters. In another order than the weight's, XLA transposes the
    weight, which copies it in each product: "bsnh,nhd->bsd" becomes "deab,abc->dec".
    """
    letters = [letter for letter in equation.partition(",")[2] + equation if letter.isalpha()]
    return equation.translate(dict(zip(map(ord, dict.fromkeys(letters)), ascii_lowercase, strict=False)))


def nothing(shape: tuple[int, ...], axes: LogicalAxes) -> Mapping[str, Observed]:
    """The auxiliary arrays of a weight for einsum: none."""
    del shape, axes
    return {}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, barrier: bool, x: Array, w: Array) -> Array:
    del barrier
    return jnp.einsum(equation, x, w.astype(x.dtype))


def _product_backward(equation: str, barrier: bool, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    inputs, out = equation.split("->")
    first, second = inputs.split(",")
    dx = jnp.einsum(f"{out},{second}->{first}", dy, w.astype(x.dtype))
    x, dy = jax.lax.optimization_barrier((x, dy)) if barrier else (x, dy)
    return dx, jnp.einsum(f"{first},{out}->{second}", x, dy, preferred_element_type=w.dtype)


_product.defvjp(lambda equation, barrier, x, w: (_product(equation, barrier, x, w), (x, w)), _product_backward)


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan as layers see it. Hashable, so it can be a static attribute of a module."""

    plan: Plan
    matmul: Matmul = exact
    """The recipe of `dot`; precision.matmul replaces it."""
    grouped: Callable[..., Array] | None = None
    """The recipe of products of rows with the matrices of their groups; None: in the dtype of the rows."""
    matrices: Callable[..., tuple[Any, Any]] | None = None
    """Makes the operands of `grouped` from matrices [E, K, N], once a step; None: it makes them itself each time."""
    beside: Callable[[tuple[int, ...], LogicalAxes], Mapping[str, Observed]] = nothing
    """(shape, logical axes) of a weight -> its auxiliary arrays for the recipe, by name."""
    recipe_layers: tuple[int, int] | None = None
    """Layers [first, end) that use the recipe; the others use einsum. None: all use it."""
    gathered: str | None = None
    """Dtype in which `gather` communicates weights; None: unchanged."""
    reduced: str | None = None
    """Dtype in which their gradients are communicated; None: unchanged."""
    rows: SequenceSharding = UNSHARDED_ROWS
    """How a step shards rows over `context`; see `zigzag_order`."""
    token_weight: float = 1.0
    """Approximate weight of one position's loss in the differentiated loss, before the loss scale."""
    observes_scores: bool = False
    """Attention observes a bound of each head's scores, which QK-clip reads."""

    def plain(self) -> "Layout":
        """A copy that multiplies with plain einsum; the auxiliary arrays of weights stay."""
        return replace(self, matmul=exact, grouped=None, matrices=None, recipe_layers=None)

    def recipe_or_plain(
        self, layer: Array, in_recipe: Callable[..., Array], plain: Callable[..., Array]
    ) -> Callable[..., Array]:
        """in_recipe for the layers in `recipe_layers`, plain for the others; the same on all devices of `tensor`."""
        return lambda *inputs: jax.lax.cond(self.in_recipe(layer), in_recipe, plain, *inputs)

    @overload
    def in_recipe(self, layer: int) -> bool: ...
    @overload
    def in_recipe(self, layer: Array) -> Array: ...
    def in_recipe(self, layer: Array | int) -> Array | bool:
        """Whether the layer is one of `recipe_layers`."""
        first, end = self.recipe_layers or (0, 2**31 - 1)
        return (layer >= first) & (layer < end)

    def sequence_sharding(self) -> SequenceSharding:
        """The sharding of rows here: `rows` within a step, plain chunks under `jax.jit`, or none."""
        if manual_axes().get(AXIS, 1) > 1:
            return self.rows
        return self.rows.plain() if free_axes().get(AXIS, 1) > 1 else UNSHARDED_ROWS

    def row_index(self, length: int) -> Array:
        """int32 [length]: indices in the row of the positions that layers see, outside islands.

        All positions under `jax.jit`, the positions of this device in a step.
        """
        return (self.rows if manual_axes().get(AXIS, 1) > 1 else UNSHARDED_ROWS).local_index(length)

    def act(self, x: Array, *axes: str | None) -> Array:
        """Constrains the sharding of an activation; one logical axis (or None) for each dimension of x."""
        if len(axes) != x.ndim:
            raise ValueError(f"{len(axes)} logical axes {axes} for an array of shape {x.shape}")
        demand_known(axes, f"an activation of shape {x.shape}")
        free = free_axes()
        if max(free.values(), default=1) == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.plan.compute.spec(axes, keep=tuple(free)))

    def gather(self, w: Array, axes: LogicalAxes) -> Array:
        """All-gathers a weight from its layout during the step; the transpose reduce-scatters its gradient."""
        in_step = self.plan.rules_in_step(("layer", *axes))
        moves = moved_axes(in_step, self.plan.compute, axes)
        if not moves:
            return w
        if not set(manual_axes()).issuperset(axis for _, axis in moves):
            return self.act(w, *axes)
        return self._gathered(w, moves, self.plan.axes_in_step(axes))

    def dot(self, equation: str, x: Array, w: MultipliedWeight | Array, *out: str | None) -> Array:
        """einsum of x and a weight with the recipe of this layout, by default in x's dtype; `out`: axes of the result.

        w: a layers.param.Matrix, or a plain array, which has no auxiliary arrays.

        If the result is added to the residual stream, its cotangent is gathered along the sequence once, for both
        matmuls of the backward pass. By default, the compiler gathers it for each.
        """
        if isinstance(w, Array):
            y = self.matmul(equation, x, w)
        else:
            multiply = partial(self.matmul, sharding=self._sharding(equation, w.axes(), out))
            y = w.product(multiply, equation, x, *out)
        if "seq_residual" in out:
            y = self._cotangent_as(y, tuple("seq" if name == "seq_residual" else name for name in out))
        return self.act(y, *out)

    def island(self, f: Callable, ins: Sequence[AxesTree], out: AxesTree) -> Callable:
        """f in a shard_map over all axes that are not manual yet: kernels and collectives run in islands.

        ins: for each argument, the logical axes of its arrays; out: those of the result.
        """
        free = tuple(free_axes())
        if not free:
            return f

        def is_axes(t: object) -> bool:
            return isinstance(t, tuple) and all(isinstance(name, str | None) for name in t)

        specs = [
            jax.tree.map(lambda axes: self.plan.compute.spec(axes, keep=free), tree, is_leaf=is_axes)
            for tree in (tuple(ins), out)
        ]
        # check_vma=True fails for differentiated islands (jax 0.11, 0.12): the transpose loses the vma of the outer
        # manual axes. Gradients through psum are therefore written by hand and not left to autodiff.
        return jax.shard_map(f, axis_names=set(free), in_specs=specs[0], out_specs=specs[1], check_vma=False)

    def per_token(self, f: Callable, x: Array, *weights: Array) -> Array:
        """f(x, *weights) for an f that acts on each position of the residual stream x [B, S, D] separately.

        weights: [D], or [copies, D] with a copy per device (see Plan.replicated_per_tensor_rank).
        """
        if weights[0].ndim == 1:
            return f(x, *weights)

        def local(x: Array, *copies: Array) -> Array:
            return f(x, *(copy[0] for copy in copies))

        residual = ("batch", "seq_residual", "embed")
        return self.island(local, (residual, *[("copies", "embed")] * len(weights)), residual)(x, *weights)

    def add_bias(self, y: Array, bias: Array) -> Array:
        """y [B, S, D] in the residual stream + bias [D] or [copies, D]."""
        return self.per_token(lambda y, bias: y + bias[None, None], y, bias)

    def zeros(self, shape: Sequence[int], dtype: jax.typing.DTypeLike, *axes: str | None) -> Array:
        """Zeros with this layout."""
        return self.act(jnp.zeros(shape, dtype), *axes)

    def free_axes(self, *names: str) -> tuple[str, ...]:
        """Free mesh axes of these logical axes: an island must psum over them for a full sum."""
        return self._axes_in(free_axes(), names)

    def manual_axes(self, *names: str) -> tuple[str, ...]:
        """Manual mesh axes of these logical axes."""
        return self._axes_in(manual_axes(), names)

    def sharded_axes(self, *names: str) -> tuple[str, ...]:
        """Mesh axes of these logical axes, manual or free."""
        return self._axes_in({**free_axes(), **manual_axes()}, names)

    def manual_devices(self, *names: str) -> int:
        """Number of devices along the manual mesh axes of these logical axes."""
        return devices_along(self.manual_axes(*names))

    def _axes_in(self, sizes: Mapping[str, int], names: Sequence[str]) -> tuple[str, ...]:
        """Mesh axes of these logical axes that have several devices according to `sizes`."""
        return tuple(axis for name in names for axis in self.plan.compute.mesh_axes(name) if sizes.get(axis, 1) > 1)

    def _sharding(self, equation: str, axes: LogicalAxes, out: Sequence[str | None]) -> LetterSharding:
        """The free mesh axes over which the letters of a product are sharded."""
        inputs, result = equation.split("->")
        named = [*zip(result, ["seq" if name == "seq_residual" else name for name in out], strict=True)]
        named += zip(inputs.split(",")[1], axes, strict=True)
        over = {letter: self.free_axes(name) for letter, name in named if name is not None}
        return tuple((letter, names) for letter, names in over.items() if names)

    def _gathered(self, w: Array, moves: Moves, axes: LogicalAxes) -> Array:
        def cast(x: Array, dtype: str | None) -> Array:
            return x.astype(dtype or x.dtype)

        @jax.custom_vjp
        def gather(w: Array) -> Array:
            gathered = self.island(lambda shard: gather_shards(cast(shard, self.gathered), moves), (axes,), axes)(w)
            return gathered.astype(w.dtype)

        def reduce(_: None, g: Array) -> tuple[Array]:
            shard = self.island(lambda part: reduce_shards(cast(part, self.reduced), moves), (axes,), axes)(g)
            return (shard.astype(g.dtype),)

        gather.defvjp(lambda w: (gather(w), None), reduce)
        return gather(w)

    def _cotangent_as(self, y: Array, axes: tuple[str | None, ...]) -> Array:
        @jax.custom_vjp
        def identity(y: Array) -> Array:
            return y

        identity.defvjp(lambda y: (y, None), lambda _, dy: (self.act(dy, *axes),))
        return identity(y)
