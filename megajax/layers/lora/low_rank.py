"""LoRA (Hu et al. 2021): an adapter adds scale * (x A) B to the product with a matrix. B starts at zero."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jax import Array

from megajax.kernels.grouped.capability import GroupedKernel, GroupedSizes, capable_grouped
from megajax.kernels.grouped.matmul import grouped_matmul
from megajax.mesh.layout import Layout, exact
from megajax.mesh.rules import LogicalAxes

RANK = "R"
"""The letter of the rank in einsum equations, which otherwise have lower-case letters."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """How an adapter computes. Hashable; its two matrices are leaves of the `Matrix` that it belongs to."""

    scale: float
    inputs: LogicalAxes
    """Logical axes of the inputs of the matrix."""
    rate: float = 0.0
    """Dropout rate of the adapter's input."""
    drop: Callable[..., Array] | None = field(default=None, compare=False)
    """(x, rate, logical axes of x) -> x after dropout; None for a deterministic forward pass."""

    def __call__(self, layout: Layout, equation: str, x: Array, a: Array, b: Array, *out: str | None) -> Array:
        """The adapter's term for einsum(equation, x, w), in x's dtype; never computed in 8 bits.

        a: [*inputs, rank]; b: [rank, *outputs]; out: logical axes of the result. The product of x and a is not sharded
        along the sequence by `tensor`, so none of the three gradients needs a sum over `tensor`.
        Raises ValueError if the equation does not sum over exactly the inputs.
        """
        first, second, result = equation.replace("->", ",").split(",")
        inputs, outputs = second[: len(self.inputs)], second[len(self.inputs) :]
        if {*inputs} != {*first} - {*result} or not {*outputs} <= {*result} - {*first}:
            raise ValueError(f"{equation} does not sum over the first {len(self.inputs)} dimensions of its matrix")
        axis_of = {letter: "seq" if axis == "seq_residual" else axis for letter, axis in zip(result, out, strict=True)}
        middle = [letter for letter in first if letter not in inputs]
        if self.drop is not None:
            x = self.drop(x, self.rate, (*[axis_of[letter] for letter in middle], *self.inputs))
        inner = exact(f"{first},{inputs}{RANK}->{''.join(middle)}{RANK}", x, a)
        inner = layout.act(inner, *[axis_of[letter] for letter in middle], "rank") * self.scale
        return exact(f"{''.join(middle)}{RANK},{RANK}{outputs}->{result}", inner, b)

    def grouped(self, x: Array, a: Array, b: Array, sizes: Array, kernel: GroupedKernel) -> Array:
        """The adapter's term for grouped_matmul(x, w, ...): x [T, K], a [E, K, rank], b [E, rank, N] -> [T, N].

        If the kernel does not support the rank, the next one that does is used.
        """
        for w in (a, b):
            kernel = capable_grouped(kernel, x.dtype.name, GroupedSizes(x.shape[0], *w.shape))
        return grouped_matmul(grouped_matmul(x, a, sizes, kernel) * self.scale, b, sizes, kernel)
