"""The interface of a model to gradient functions: for each section what is before the layers and they; and the loss.

B rows, S positions, D hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from megajax.batch import Params

type Rows = Any
"""The leaves of a microbatch: those of a batch without the leading dimension."""
type Sums = Any
"""The sums that a head returns, over microbatches."""


type PerChunk = int | np.ndarray
"""The same in every chunk, or int32 [chunks] by their order in the model."""


class Place(NamedTuple):
    """The rows that a block of a unit has of its stacked weights: of unit n those from start + n * stride on."""

    block: int
    """Number of the stacked block, which the paths of its weights begin with."""
    start: PerChunk
    """Counted from the first row of the chunk."""
    stride: int
    rows: int
    """Stored rows of each chunk."""


class Span(NamedTuple):
    """Consecutive rows of stacked weights with the same recomputation policy."""

    units: int
    """Number of calls of `unit`; the most of any chunk, of all spans of the same ring together."""
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
    """Number of the first layer; None where `LayerLoop.numbers` has those of the rows."""
    counts: PerChunk
    """Number of calls of `unit` here."""
    ring: int
    """Spans with the same one save the same kind of residuals, and keep them one after another."""
    kept_at: PerChunk
    """Place of the first unit's residuals in the ring."""


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
