"""Matrix products of few-bit numbers: one differentiable product for all recipes.

A recipe rounds tensors and multiplies what it rounded. Each of the three products, of the forward pass and of the
gradients of x and w, rounds its operands from their wide values: blocks lie along the dimension that is summed over,
which differs. The products are those of an einsum, or of rows with the matrices of their groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.config.errors import UserError
from megajax.mesh.collectives import LetterSharding, combined_over
from megajax.mesh.layer_observations import Observed
from megajax.precision.blocks import amax_of

type Tensor = Literal["x", "w", "dy"]
type Result = Literal["y", "dx", "dw"]
"""What a product computes."""


class Letters(NamedTuple):
    """Letters of an einsum equation: dimensions of the operands and of the result."""

    first: str
    second: str
    out: str

    def summed(self) -> str:
        """Letters that the product sums over, in the order of the first operand."""
        return "".join(letter for letter in self.first if letter in self.second and letter not in self.out)

    def shared(self) -> str:
        """Letters of all three, in the order of the first operand."""
        return "".join(letter for letter in self.first if letter in self.second and letter in self.out)

    def result(self) -> str:
        """The letters of a result of `dot_general`."""
        unshared = [[n for n in term if n not in self.summed() + self.shared()] for term in (self.first, self.second)]
        return "".join([self.shared(), *unshared[0], *unshared[1]])

    def of(self, result: Result) -> "Letters":
        """The letters of one of the three products of this equation."""
        first, second, out = self
        return {"y": self, "dx": Letters(out, second, first), "dw": Letters(first, out, second)}[result]


@partial(jax.tree_util.register_dataclass, data_fields=("sizes", "of_rows"), meta_fields=("axes",))
@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows sorted by group, each to be multiplied by the matrix of its group, as recipes round them.

    T rows, E groups; rows [T, K], matrices [E, N, K]. A group has scales of its own, and blocks of rows begin at its
    first row: each group is rounded as if its product were computed alone.
    """

    sizes: Array
    """Rows of each group, int32 [E]."""
    of_rows: Array
    """Group of each row, int32 [T]; E for rows past the groups, which may hold anything."""
    axes: tuple[str, ...] = ()
    """Mesh axes that shard the columns of rows or matrices: largest magnitudes are over all of these devices."""

    @classmethod
    def of(cls, sizes: Array, rows: int, axes: tuple[str, ...] = ()) -> "RowGroups":
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        return cls(sizes, jnp.sum(jnp.arange(rows)[:, None] >= ends[None], axis=1, dtype=jnp.int32), axes)

    def aligned(self, x: Array, block: int) -> tuple[Array, "RowGroups"]:
        """Rows [T, K] with zeros after each group up to a multiple of `block` rows, [T', K], and their groups.

        So that blocks of rows hold rows of one group. T' is that of the worst case, in which each group needs padding.
        """
        if block == 1:
            return x, self
        number, rows = self.sizes.size, x.shape[0]
        most = rows + min(number, rows) * (block - 1)
        padded = RowGroups.of(-(-self.sizes // block) * block, -(-most // block) * block, self.axes)
        group = jnp.minimum(padded.of_rows, number - 1)
        row = jnp.arange(padded.of_rows.size) - (jnp.cumsum(padded.sizes) - padded.sizes)[group]
        source = row + (jnp.cumsum(self.sizes) - self.sizes)[group]
        source = jnp.where((padded.of_rows < number) & (row < self.sizes[group]), source, rows)
        return jnp.take(x, source, axis=0, mode="fill", fill_value=0), padded

    def amax(self, x: Array) -> Array:
        """Largest magnitudes of the rows [T, K] of each group, or of matrices [E, N, K]; float32 [E]."""
        sizes = amax_of(x, tuple(range(1, x.ndim))).astype(jnp.float32)
        if x.ndim == 2:
            number = jnp.arange(self.sizes.size)
            sizes = amax_of(jnp.where(self.of_rows[None] == number[:, None], sizes[None], 0), (1,))
        return combined_over(sizes, self.axes, "max") if self.axes else sizes

    def spread(self, values: Array, ndim: int) -> Array:
        """Numbers of groups [E] -> numbers for rows [T, 1] if ndim is 2, for matrices [E, 1, 1] if it is 3."""
        if ndim == 3:
            return values[:, None, None]
        return values[jnp.minimum(self.of_rows, values.size - 1)][:, None]

    def copies(self) -> int:
        """Devices along `axes`."""
        return lax.axis_size(self.axes) if self.axes else 1


class GroupedOperand(Protocol):
    """A rounded operand of a product of groups; a tree of arrays."""

    @property
    def factor(self) -> Array | None:
        """Factors on the results of groups, float32 [E]; None: 1."""
        ...

    def wide(self) -> Array:
        """The numbers without the factor, in a dtype that holds them exactly: rows [T, K], or matrices [E, N, K]."""
        ...

    def coded(self, *, of_weight: bool, hardware: bool) -> tuple[Array, Array]:
        """Codes and scales as `CodeProducts` takes them; of_weight: rows [K, T] of a product over rows."""
        ...


type Operands = tuple[Any, Any]
"""Rounded matrices of groups, for the result and for the gradient of rows."""


class GroupProducts(Protocol):
    """A kernel of products of groups: `megajax.kernels.grouped.matmul.Products`. Hashable."""

    @property
    def rows(self) -> Callable[..., Array]: ...
    @property
    def matrices(self) -> Callable[..., Array]: ...


class CodeProducts(Protocol):
    """A kernel of products of codes: `megajax.kernels.grouped.matmul.CodeProducts`. Hashable."""

    @property
    def rows(self) -> Callable[..., Array]: ...
    @property
    def matrices(self) -> Callable[..., Array]: ...
    @property
    def hardware(self) -> bool: ...
    @property
    def label(self) -> str: ...
    def fits(self, rows: int, inner: int, outer: int) -> bool: ...


CODE_BLOCK = 128
"""Groups begin at multiples of this in gradients of matrices by `CodeProducts`; its blocks have as many numbers, but
those of hardware."""
HARDWARE_BLOCK = 32
"""Numbers of a block with a scale that is a power of two, on GPUs that multiply such blocks."""


class Recipe[O](Protocol):
    """How operands are rounded and multiplied. Hashable. An operand, O, is a tree of arrays."""

    @property
    def multiple(self) -> int:
        """Sides of matrices are multiples of this."""
        ...

    def operand(
        self, tensor: Tensor, x: Array, term: str, letters: Letters, amax: Array | None, *, of_weight: bool = False
    ) -> O:
        """x rounded for a product. term: letters of x; letters: of the product; of_weight: it is w's gradient."""
        ...

    def product(self, letters: Letters, a: O, b: O, dtype: jnp.dtype, *, forward: bool) -> Array:
        """Product of two operands, as dtype."""
        ...

    @property
    def row_block(self) -> int:
        """In gradients of the matrices of groups, groups begin at multiples of this number of rows."""
        ...

    @property
    def exact(self) -> jnp.dtype:
        """The dtype that holds rounded numbers of groups exactly."""
        ...

    @property
    def codes(self) -> CodeProducts | None:
        """The device's kernel for this recipe's codes; None: numbers of groups are multiplied as `exact`."""
        ...

    def grouped_operand(
        self, tensor: Tensor, x: Array, groups: RowGroups, amax: Array | None, *, of_weight: bool = False
    ) -> GroupedOperand:
        """Rows [T, K], or matrices [E, N, K] of which K is summed over, rounded for a product of groups."""
        ...

    def on(self, sharding: LetterSharding | None) -> "Recipe[O]":
        """The recipe for arrays with this sharding over free mesh axes."""
        ...

    def observed(self, x: O, w: O, dy: O) -> Array:
        """What the auxiliary array observes: the amax of x, w and dy, float32 [3], for groups [E, 3]."""
        ...

    def beside(self) -> Mapping[str, Observed]:
        """The auxiliary arrays of a weight."""
        ...


@dataclass(frozen=True, slots=True)
class RoundedMatmul:
    """The matmul of a Layout with this recipe. Hashable."""

    recipe: Recipe

    def __call__(
        self, equation: str, x: Array, w: Array, amax: Array | None = None, *, sharding: LetterSharding | None = None
    ) -> Array:
        """einsum of an activation and a weight, in x's dtype, accumulated in float32; w's gradient has w's dtype.

        equation: "bsd,df->bsf" and the like; each letter is in two of the three terms, or in all.
        Saved for the backward pass: x as the gradient of w needs it, in few bits, and w itself. w is rounded again, so
        that a pipeline, whose stages hold the weights anyway, saves nothing of them.
        amax: auxiliary array of delayed scaling: of x, w and the result's gradient that scales are computed for,
        float32 [3]; its cotangent is what they were.
        sharding: of the letters over free mesh axes; None: unknown.

        Raises UserError where a matrix of weights has sides that are not multiples of the recipe's.
        """
        letters = terms(equation)
        self._refuse_odd_sides(equation, letters, x, w)
        return _multiply(self.recipe.on(sharding), _Einsum(letters), x, w, amax, None, None)

    def grouped(
        self,
        x: Array,
        w: Array,
        sizes: Array,
        kernel: Callable[[str], GroupProducts],
        amax: Array | None = None,
        *,
        axes: tuple[str, ...] = (),
        rounded: Operands | None = None,
    ) -> Array:
        """Each row times the matrix of its group, as `megajax.kernels.grouped.matmul.grouped_matmul`, in this recipe.

        Equal to a product of each group alone. Codes are multiplied by the recipe's kernel of codes if it supports the
        sizes; otherwise rounded numbers in a dtype that holds them exactly.
        kernel: dtype -> the kernel for rows of this dtype; amax: as above, float32 [E, 3]; axes: mesh axes that shard
        columns of rows or matrices, in an island; rounded: the matrices as a step has rounded them before, if it has.
        """
        letters = Letters("tk", "ekn", "etn")
        self._refuse_odd_sides("tk,ekn->tn", letters, x, w, groups="e")
        codes = self.recipe.codes
        fits = codes is not None and codes.fits(x.shape[0], *w.shape[1:])
        way = _InCodes(codes) if fits else _Grouped(kernel(self.recipe.exact.name))
        return _multiply(self.recipe, way, x, w, amax, RowGroups.of(sizes, x.shape[0], axes), rounded)

    def matrices(self, w: Array, amax: Array | None = None, *, axes: tuple[str, ...] = ()) -> Operands:
        """The matrices of groups [E, K, N] rounded for the result and for the gradient of rows; see `grouped`.

        They do not depend on rows, so a step with several microbatches makes them once.
        """
        groups = RowGroups.of(jnp.zeros(w.shape[0], jnp.int32), 0, axes)
        y, dx = (self.recipe.grouped_operand("w", matrices, groups, amax) for matrices in (w.mT, w))
        return y, dx

    def beside(self, shape: tuple[int, ...], axes: Sequence[str | None]) -> Mapping[str, Observed]:
        """The auxiliary arrays of a weight; those of experts have a row for each."""
        experts = tuple(size for size, name in zip(shape, axes, strict=True) if name == "expert")
        names = ("expert",) * len(experts)
        return {
            name: replace(declared, shape=(*experts, *declared.shape), axes=(*names, *declared.axes))
            for name, declared in self.recipe.beside().items()
        }

    def _refuse_odd_sides(self, equation: str, letters: Letters, x: Array, w: Array, groups: str = "") -> None:
        """groups: the letter of the matrices of a grouped product."""
        multiple, sides = self.recipe.multiple, {"in": 1, "out": 1}
        for letter, size in zip(letters.second, w.shape, strict=True):
            if letter not in letters.out:
                sides["in"] *= size
            elif letter not in (*letters.first, *groups):
                sides["out"] *= size
        odd = [f"{size} {name}" for name, size in sides.items() if size % multiple]
        if odd:
            raise UserError(
                f"precision.matmul: the product {equation} of {x.shape} and weights {w.shape} is {' and '.join(odd)}, "
                f"and it needs multiples of {multiple}.\nChange the model's sizes, or set precision.matmul=none."
            )


class Way(Protocol):
    """Which products are computed. Hashable."""

    def operand[O](
        self, recipe: Recipe[O], tensor: Tensor, x: Array, result: Result, amax: Array | None, groups: RowGroups | None
    ) -> O:
        """A tensor rounded for the product that computes `result`."""
        ...

    def product[O](
        self, recipe: Recipe[O], result: Result, a: O, b: O, dtype: jnp.dtype, groups: RowGroups | None
    ) -> Array:
        """The product of two operands."""
        ...


@dataclass(frozen=True, slots=True)
class _Einsum:
    """Products of an einsum equation."""

    letters: Letters

    def operand[O](
        self, recipe: Recipe[O], tensor: Tensor, x: Array, result: Result, amax: Array | None, groups: RowGroups | None
    ) -> O:
        del groups
        term = self.letters[("x", "w", "dy").index(tensor)]
        return recipe.operand(tensor, x, term, self.letters.of(result), amax, of_weight=result == "dw")

    def product[O](
        self, recipe: Recipe[O], result: Result, a: O, b: O, dtype: jnp.dtype, groups: RowGroups | None
    ) -> Array:
        del groups
        return recipe.product(self.letters.of(result), a, b, dtype, forward=result == "y")


class _OfGroups:
    """Products of rows with the matrices [E, K, N] of their groups."""

    __slots__ = ()

    def block(self, recipe: Recipe) -> int:
        """In gradients of matrices, groups begin at multiples of this number of rows."""
        raise NotImplementedError

    def multiplied(
        self, recipe: Recipe, result: Result, a: GroupedOperand, b: GroupedOperand, sizes: Array, dtype: jnp.dtype
    ) -> Array:
        """The product without the factors of operands."""
        raise NotImplementedError

    def operand(
        self, recipe: Recipe, tensor: Tensor, x: Array, result: Result, amax: Array | None, groups: RowGroups
    ) -> GroupedOperand:
        if tensor == "w":
            return recipe.grouped_operand(tensor, x.mT if result == "y" else x, groups, amax)
        rows, aligned = groups.aligned(x, self.block(recipe)) if result == "dw" else (x, groups)
        return recipe.grouped_operand(tensor, rows, aligned, amax, of_weight=result == "dw")

    def product(
        self, recipe: Recipe, result: Result, a: GroupedOperand, b: GroupedOperand, dtype: jnp.dtype, groups: RowGroups
    ) -> Array:
        block = self.block(recipe) if result == "dw" else 1
        sizes = -(-groups.sizes // block) * block
        y = self.multiplied(recipe, result, a, b, sizes, dtype if a.factor is None else jnp.dtype(jnp.float32))
        if a.factor is None or b.factor is None:
            return y
        return (y * groups.spread(a.factor * b.factor, y.ndim)).astype(dtype)


@dataclass(frozen=True, slots=True)
class _Grouped(_OfGroups):
    """In a dtype that holds the rounded numbers exactly."""

    kernel: GroupProducts

    def block(self, recipe: Recipe) -> int:
        return recipe.row_block

    def multiplied(
        self, recipe: Recipe, result: Result, a: GroupedOperand, b: GroupedOperand, sizes: Array, dtype: jnp.dtype
    ) -> Array:
        kernel = self.kernel.matrices if result == "dw" else partial(self.kernel.rows, transposed=True)
        with jax.default_matmul_precision("highest" if recipe.exact == jnp.float32 else None):
            return kernel(a.wide(), b.wide(), sizes, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _InCodes(_OfGroups):
    """Of codes."""

    kernel: CodeProducts

    def block(self, recipe: Recipe) -> int:
        del recipe
        return CODE_BLOCK

    def multiplied(
        self, recipe: Recipe, result: Result, a: GroupedOperand, b: GroupedOperand, sizes: Array, dtype: jnp.dtype
    ) -> Array:
        del recipe
        codes = [part for x in (a, b) for part in x.coded(of_weight=result == "dw", hardware=self.kernel.hardware)]
        return (self.kernel.matrices if result == "dw" else self.kernel.rows)(*codes, sizes, dtype=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    recipe: Recipe, way: Way, x: Array, w: Array, amax: Array | None, groups: RowGroups | None, rounded: Operands | None
) -> Array:
    return _forward(recipe, way, x, w, amax, groups, rounded)[0]


def _forward(
    recipe: Recipe, way: Way, x: Array, w: Array, amax: Array | None, groups: RowGroups | None, rounded: Operands | None
) -> tuple[Array, tuple]:
    operands = (
        way.operand(recipe, "x", x, "y", amax, groups),
        way.operand(recipe, "w", w.astype(x.dtype), "y", amax, groups) if rounded is None else rounded[0],
    )
    y = way.product(recipe, "y", *operands, x.dtype, groups)
    return y, (way.operand(recipe, "x", x, "dw", amax, groups), w, amax, groups, rounded)


def _backward(recipe: Recipe, way: Way, saved: tuple, dy: Array) -> tuple[Array, Array, Array | None, None, None]:
    x, w, amax, groups, rounded = saved
    small = (
        way.operand(recipe, "dy", dy, "dx", amax, groups),
        way.operand(recipe, "w", w.astype(dy.dtype), "dx", amax, groups) if rounded is None else rounded[1],
    )
    dx = way.product(recipe, "dx", *small, dy.dtype, groups)
    small_dy = way.operand(recipe, "dy", dy, "dw", amax, groups)
    dw = way.product(recipe, "dw", x, small_dy, w.dtype, groups)
    if amax is None:
        return dx, dw, None, None, None
    observed = recipe.observed(x, small[1], small[0])
    # Each device of `axes` observes the same, and an island adds up what its devices observe.
    return dx, dw, observed if groups is None else observed / groups.copies(), None, None


_multiply.defvjp(_forward, _backward)


def terms(equation: str) -> Letters:
    """ "bsd,df->bsf" -> ("bsd", "df", "bsf"). Raises ValueError if it is not a product of two tensors."""
    inputs, arrow, out = equation.partition("->")
    first, comma, second = inputs.partition(",")
    letters = Letters(first, second, out)
    joined = "".join(letters)
    repeated = any(len(set(term)) < len(term) for term in letters)
    if not (arrow and comma) or repeated or any(joined.count(letter) < 2 for letter in joined):
        raise ValueError(f"{equation!r} is not a product of two tensors")
    return letters


def in_order(y: Array, letters: Letters) -> Array:
    """A result of `dot_general` with the dimensions in the order of the equation."""
    result = letters.result()
    return y if letters.out == result else y.transpose([result.index(letter) for letter in letters.out])
