"""The interface of a model to gradient functions: embedding, layers and output of each section, and the loss.

B rows, S positions, D hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from megajax.batch import Params

type Rows = Any
"""The leaves of a microbatch: a batch's leaves without the leading dimension."""
type Sums = Any
"""The sums over microbatches that a head returns."""

type PerChunk = int | np.ndarray
"""One value for all chunks, or int32 [chunks] in the order of the model."""


class Place(NamedTuple):
    """The rows of a block's stacked weights in each unit: unit n has those from start + n * stride on."""

    block: int
    """Number of the stacked block; the paths of its weights start with it."""
    start: PerChunk
    """Counted from the first row of the chunk."""
    stride: int
    rows: int
    """Stored rows per chunk."""


class Span(NamedTuple):
    """Consecutive rows of stacked weights with the same recomputation policy."""

    units: int
    """Maximum number of calls of `unit` per chunk, summed over the spans of the same ring."""
    rows_per_unit: int
    """Rows per call: n."""
    unit: Callable[[Params, Params, Array, Array, Any], Array]
    """(rows of the stacked weights, common weights, numbers of the rows' first layers, x, context) -> x.

    Paths of weights begin with the number of the place, "0.": [n, ...] of each for n > 1.
    """
    unroll: int
    """Units per iteration of a loop over them."""
    places: Sequence[Place]
    layer: PerChunk | None
    """Number of the first layer; None if `LayerLoop.numbers` has the numbers of the rows."""
    counts: PerChunk
    """Number of calls of `unit` in this span."""
    ring: int
    """Spans with the same ring save residuals of the same kind, one after another."""
    kept_at: PerChunk
    """Index of the first unit's residuals in the ring."""


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
