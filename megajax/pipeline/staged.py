"""A model as gradient functions see it: what comes before the layers, the layers, and the loss.

B rows, S positions, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import Array

from megajax.batch import Params

type Rows = Any
"""The leaves of a microbatch: those of a batch without the leading dimension."""
type Sums = Any
"""What a head reports, summed over microbatches."""


class Span(NamedTuple):
    """Consecutive rows of stacked weights that save the same for the backward pass."""

    units: int
    """How often `unit` is applied."""
    rows_per_unit: int
    """Rows that each application uses: n."""
    unit: Callable[[Params, Params, Array, Array, Any], Array]
    """(rows of the stacked weights, common weights, the rows' numbers, x, context) -> x; [n, ...] of each for n > 1."""
    unroll: int
    """Units written out in each turn of a loop over them."""
    start: int
    """Its first row, counted from the first one of the chunk."""
    uses: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Values by paths of stacked weights -> those of the weights whose rows it takes."""


class Staged(NamedTuple):
    """A model cut at its stack. `shared` are the weights outside the stack; in a pipeline, each stage has its share."""

    context: Callable[[Rows], Any]
    """rows -> what layers know of them besides activations; not differentiated."""
    embed: Callable[[Params, Rows], Array]
    """(shared, rows) -> embeddings [B, S, D], by all stages together; the same on all of them, as is the cotangent."""
    enter: Callable[[Params, Array, Any], Array]
    """(shared, embeddings, context) -> input of the first layer [B, S, D]."""
    spans: Sequence[Span]
    """The layers of a chunk."""
    common: Callable[[Params], Params]
    """shared -> those of them that every layer uses; by their paths in `shared`."""
    head: Callable[..., tuple[Array, Sums]]
    """(shared, x, rows, scale=1.0) -> loss to differentiate [] and what to report.

    scale: of the loss, which the cotangent has too; it changes no value. All P stages call it with the same x and a
    cotangent of scale / P. What they make of it adds up to the gradient.
    """
