"""The interface of a model to gradient functions: embedding, layers and output of each section, and the loss.

B rows, S positions, D hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array

from megajax.batch import Params
from megajax.layers.stack.spans import Span

type Rows = Any
"""The leaves of a microbatch: a batch's leaves without the leading dimension."""
type Sums = Any
"""The sums over microbatches that a head returns."""

MEMORY = "memory"
"""Key of the previous section's output among the values that all layers of a section use."""


class StagedSection(NamedTuple):
    """A section split at its stack. `shared`: the model's weights outside stacks; a pipeline shards some of them."""

    path: str
    """Path of its stacked weights in the model, ending with a dot."""
    context: Callable[[Rows], Any]
    """rows -> the inputs of layers other than activations; not differentiated."""
    embed: Callable[[Params, Rows], Array]
    """(shared, rows) -> embeddings [B, S, D], computed jointly by all stages; equal on all, as is the cotangent."""
    enter: Callable[[Params, Array, Any, Array | None], Array]
    """(shared, embeddings, context, output of the previous section, if any) -> input of the first layer [B, S, D]."""
    spans: Sequence[Span]
    """The layers of a chunk."""
    common: Callable[[Params], Params]
    """shared -> the weights that every layer uses, by their paths in `shared`."""
    leave: Callable[[Params, Array, Any], Array] | None
    """(shared, output of the last layer, context) -> input of the next section; None for the last section."""


class Staged(NamedTuple):
    """A model split at its stacks."""

    sections: Sequence[StagedSection]
    """In the order in which they run."""
    head: Callable[..., tuple[Array, Sums]]
    """(shared, x, rows, scale=1.0) -> loss to differentiate [] and sums to report.

    scale: the loss scale, also in the cotangent; it does not change the loss. All P stages call it with the same x and
    a cotangent of scale / P; the sum of their gradients is the gradient.
    """
