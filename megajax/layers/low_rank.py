"""What low-rank adapters do to the product with a matrix: LoRA adds a term, DoRA also scales the outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes, capable_grouped
from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.mesh.layout import Layout, exact
from megajax.mesh.sharding_rules import LogicalAxes

RANK = "R"
"""The letter of the rank in einsum equations, which otherwise have lower-case letters."""
SMALLEST_SQUARE = 1e-30
"""Least square of a norm: outputs of a matrix of zeros, such as padding of stacks, have no norm to divide by."""
LORA_A, LORA_B, MAGNITUDE = ".lora_a", ".lora_b", ".lora_magnitude"
"""Suffixes of the paths of an adapter's weights, after the path of the adapted matrix."""
ADAPTERS = (LORA_A, LORA_B, MAGNITUDE)


@dataclass(frozen=True, slots=True)
class LowRank:
    """How a low-rank adapter (LoRA, Hu et al. 2021) computes: it adds scale * (x A) B to the product with a matrix.

    Hashable; A and B, which starts at zero, are leaves of the `Matrix` that it belongs to.
    """

    scale: float
    inputs: LogicalAxes
    """Logical axes of the inputs of the matrix."""
    rate: float = 0.0
    """Dropout rate of the adapter's input."""
    drop: Callable[..., Array] | None = field(default=None, compare=False)
    """(x, rate, logical axes of x) -> x after dropout; None for a deterministic forward pass."""
    choose: Callable[[Array], Array] | None = field(default=None, compare=False)
    """Product of x and A [T, ..., rank] -> the product with zeros in the columns that a token does not use; None: all
    tokens use all columns."""

    def adapted(
        self,
        layout: Layout,
        equation: str,
        x: Array,
        product: Callable[[Array], Array],
        matrix: Callable[[], Array],
        leaves: Mapping[str, Array],
        *out: str | None,
    ) -> Array:
        """einsum(equation, x, w) of the adapted matrix w, in x's dtype.

        product: of an input and the matrix without the adapter, by its recipe; matrix: makes that matrix as an array;
        leaves: the weights of the adapter, by suffix; out: logical axes of the result.
        """
        del matrix
        return product(x) + self(layout, equation, x, leaves[LORA_A], leaves[LORA_B], *out)

    def __call__(self, layout: Layout, equation: str, x: Array, a: Array, b: Array, *out: str | None) -> Array:
        """The adapter's term for einsum(equation, x, w), in x's dtype; never computed in 8 bits.

        a: [*inputs, rank]; b: [rank, *outputs]; out: logical axes of the result. The product of x and a is not sharded
        along the sequence by `tensor`, so none of the three gradients needs a sum over `tensor`.
        An equation may also sum over some outputs, as a product with the transposed matrix: then x is multiplied by b
        first. Raises ValueError for other equations.
        """
        first, second, result = equation.replace("->", ",").split(",")
        inputs, outputs = second[: len(self.inputs)], second[len(self.inputs) :]
        summed, (down, up) = {*first} - {*result}, (f"{inputs}{RANK}", f"{RANK}{outputs}")
        if summed and summed <= {*outputs} and self.drop is None:
            (down, up), (a, b) = (up, down), (b, a)
        elif summed != {*inputs}:
            raise ValueError(f"{equation} does not sum over the first {len(self.inputs)} dimensions of its matrix")
        axis_of = {letter: "seq" if axis == "seq_residual" else axis for letter, axis in zip(result, out, strict=True)}
        middle = [letter for letter in first if letter not in summed]
        if self.drop is not None:
            x = self.drop(x, self.rate, (*[axis_of[letter] for letter in middle], *self.inputs))
        inner = exact(f"{first},{down}->{''.join(middle)}{RANK}", x, a)
        inner = layout.act(inner, *[axis_of[letter] for letter in middle], "rank") * self.scale
        inner = inner if self.choose is None else self.choose(inner)
        return exact(f"{''.join(middle)}{RANK},{up}->{result}", inner, b)

    def grouped(self, x: Array, a: Array, b: Array, sizes: Array, kernel: GroupedKernel) -> Array:
        """The adapter's term for grouped_matmul(x, w, ...): x [T, K], a [E, K, rank], b [E, rank, N] -> [T, N].

        If the kernel does not support the rank, the next one that does is used.
        """
        for w in (a, b):
            kernel = capable_grouped(kernel, x.dtype.name, GroupedSizes(x.shape[0], *w.shape))
        return grouped_matmul(grouped_matmul(x, a, sizes, kernel) * self.scale, b, sizes, kernel)


@dataclass(frozen=True, slots=True)
class Decomposed(LowRank):
    """DoRA (Liu et al. 2024): each output of v = w + scale * A B is divided by its norm over the inputs and multiplied
    by a trained magnitude. In gradients the norm is a constant, as in section 4.3 of the paper.

    The leaf holds the magnitude less the norm of w, so it starts at zero whatever w is.
    """

    def adapted(
        self,
        layout: Layout,
        equation: str,
        x: Array,
        product: Callable[[Array], Array],
        matrix: Callable[[], Array],
        leaves: Mapping[str, Array],
        *out: str | None,
    ) -> Array:
        # In the dtype of products, as the matrix that x is multiplied by.
        factor = self.factor(matrix().astype(x.dtype), leaves[LORA_A], leaves[LORA_B], leaves[MAGNITUDE])
        first, second, result = equation.replace("->", ",").split(",")
        outputs = second[len(self.inputs) :]

        def scaled(y: Array, letters: str) -> Array:
            order = [outputs.index(letter) for letter in letters if letter in outputs]
            sizes = [size if letter in outputs else 1 for letter, size in zip(letters, y.shape, strict=True)]
            return (y.astype(jnp.float32) * factor.transpose(order).reshape(sizes)).astype(y.dtype)

        # slots=True makes the class anew, which super() without arguments does not know.
        if {*outputs} <= {*result}:
            return scaled(LowRank.adapted(self, layout, equation, x, product, matrix, leaves, *out), result)
        return LowRank.adapted(self, layout, equation, scaled(x, first), product, matrix, leaves, *out)

    def factor(self, w: Array, a: Array, b: Array, change: Array) -> Array:
        """Magnitude over norm of v, float32 [*outputs]. Exactly 1 if B and the change are zero.

        The squares of v = w + scale * A B are summed without v: ||w||^2 + 2 scale (w' A) B + scale^2 B' (A' A) B.
        """
        inputs = tuple(range(len(self.inputs)))
        w, a, b = lax.stop_gradient((w, a.astype(w.dtype), b.astype(jnp.float32)))
        square = jnp.maximum(jnp.sum(jnp.square(w.astype(jnp.float32)), axis=inputs), SMALLEST_SQUARE)
        mixed, gram = (
            jnp.tensordot(a, other, axes=(inputs, inputs), preferred_element_type=jnp.float32) for other in (w, a)
        )
        added = jnp.sum((2 * self.scale * mixed + self.scale**2 * jnp.tensordot(gram, b, axes=1)) * b, axis=0)
        ratio = jnp.maximum(1 + added / square, SMALLEST_SQUARE)
        return (1 + change.astype(jnp.float32) / jnp.sqrt(square)) / jnp.sqrt(ratio)
