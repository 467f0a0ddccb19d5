"""Matrix products of few-bit numbers: one differentiable product for all recipes.

A recipe rounds tensors and multiplies what it rounded. Each of the three products, of the forward pass and of the
gradients of x and w, rounds its operands from their wide values: blocks lie along the dimension that is summed over,
which differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from megajax.config.errors import UserError
from megajax.mesh.layer_observations import Observed
from megajax.mesh.sharded_product import LetterSharding

type Tensor = Literal["x", "w", "dy"]


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


class Recipe(Protocol):
    """How operands are rounded and multiplied. Hashable. An operand is a tree of arrays."""

    @property
    def multiple(self) -> int:
        """Sides of matrices are multiples of this."""
        ...

    def operand(
        self, tensor: Tensor, x: Array, term: str, letters: Letters, amax: Array | None, *, of_weight: bool = False
    ) -> Any:
        """x rounded for a product. term: letters of x; letters: of the product; of_weight: it is w's gradient."""
        ...

    def product(self, letters: Letters, a: Any, b: Any, dtype: jnp.dtype, *, forward: bool) -> Array:
        """Product of two operands, as dtype."""
        ...

    def on(self, sharding: LetterSharding | None) -> "Recipe":
        """The recipe for arrays with this sharding over free mesh axes."""
        ...

    def observed(self, x: Any, w: Any, dy: Any) -> Array:
        """What the auxiliary array observes: the amax of x, w and dy, float32 [3]."""
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
        return _multiply(self.recipe.on(sharding), letters, x, w, amax)

    def beside(self, shape: tuple[int, ...], axes: Sequence[str | None]) -> Mapping[str, Observed]:
        """The auxiliary arrays of a weight."""
        del shape, axes
        return self.recipe.beside()

    def _refuse_odd_sides(self, equation: str, letters: Letters, x: Array, w: Array) -> None:
        multiple, sides = self.recipe.multiple, {"in": 1, "out": 1}
        for letter, size in zip(letters.second, w.shape, strict=True):
            if letter not in letters.out:
                sides["in"] *= size
            elif letter not in letters.first:
                sides["out"] *= size
        odd = [f"{size} {name}" for name, size in sides.items() if size % multiple]
        if odd:
            raise UserError(
                f"precision.matmul: the product {equation} of {x.shape} and weights {w.shape} is {' and '.join(odd)}, "
                f"and it needs multiples of {multiple}.\nChange the model's sizes, or set precision.matmul=none."
            )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(recipe: Recipe, letters: Letters, x: Array, w: Array, amax: Array | None) -> Array:
    return _forward(recipe, letters, x, w, amax)[0]


def _forward(recipe: Recipe, letters: Letters, x: Array, w: Array, amax: Array | None) -> tuple[Array, tuple]:
    first, second, out = letters
    operands = (
        recipe.operand("x", x, first, letters, amax),
        recipe.operand("w", w.astype(x.dtype), second, letters, amax),
    )
    y = recipe.product(letters, *operands, x.dtype, forward=True)
    return y, (recipe.operand("x", x, first, Letters(first, out, second), amax, of_weight=True), w, amax)


def _backward(recipe: Recipe, letters: Letters, saved: tuple, dy: Array) -> tuple[Array, Array, Array | None]:
    (x, w, amax), (first, second, out) = saved, letters
    to_x, to_w = Letters(out, second, first), Letters(first, out, second)
    small = recipe.operand("dy", dy, out, to_x, amax), recipe.operand("w", w.astype(dy.dtype), second, to_x, amax)
    dx = recipe.product(to_x, *small, dy.dtype, forward=False)
    small_dy = recipe.operand("dy", dy, out, to_w, amax, of_weight=True)
    dw = recipe.product(to_w, x, small_dy, w.dtype, forward=False)
    return dx, dw, None if amax is None else recipe.observed(x, small[1], small[0])


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
