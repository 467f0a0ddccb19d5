"""The interface of a model to gradient functions: for each section what is before the layers and they; and the loss.

B rows, S positions, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax import Array

from megajax.batch import Params

type Rows = Any
"""The leaves of a microbatch: those of a batch without the leading dimension."""
type Sums = Any
"""The sums that a head returns, over microbatches."""


class Span(NamedTuple):
    """Consecutive rows of stacked weights with the same recomputation policy."""

    units: int
    """Number of calls of `unit`."""
    rows_per_unit: int
    """Rows per call: n."""
    unit: Callable[[Params, Params, Array, Array, Any], Array]
    """(rows of the stacked weights, common weights, the rows' numbers, x, context) -> x; [n, ...] of each for n > 1."""
    unroll: int
    """Units per iteration of a loop over them."""
    start: int
    """Its first row, relative to the chunk."""
    uses: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Values by paths of stacked weights -> those of the weights that it uses."""


MEMORY = "memory"
"""Among the values that all layers of a section use: the output of the section before it, which is no weight."""


class StagedSection(NamedTuple):
    """A section divided at its stack. `shared`: the model's weights outside stacks; a pipeline shards some of them."""

    path: str
    """Of its stacked weights in the model, ending with a dot."""
    context: Callable[[Rows], Any]
    """rows -> the inputs of layers besides activations; not differentiated."""
    embed: Callable[[Params, Rows], Array]
    """(shared, rows) -> embeddings [B, S, D], computed by all stages jointly; equal on all, as is the cotangent."""
    enter: Callable[[Params, Array, Any, Array | None], Array]
    """(shared, embeddings, context, output of the section before it, if any) -> input of the first layer [B, S, D]."""
    spans: Sequence[Span]
    """The layers of a chunk."""
    common: Callable[[Params], Params]
    """shared -> the weights among them that every layer uses, by their paths in `shared`."""
    leave: Callable[[Params, Array, Any], Array] | None
    """(shared, output of the last layer, context) -> what the next section reads; None for the last section."""


class Staged(NamedTuple):
    """A model divided at its stacks."""

    sections: Sequence[StagedSection]
    """In the order in which they run."""
    head: Callable[..., tuple[Array, Sums]]
    """(shared, x, rows, scale=1.0) -> loss to differentiate [] and sums to report.

    scale: the loss scale, also in the cotangent; it does not change the loss. All P stages call it with the same x and
    a cotangent of scale / P; the sum of their gradients is the gradient.
    """
