"""Which rows of stacked weights the layers of a model use: shared by stacks, gradient functions and pipelines."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from jax import Array

from megajax.batch import Params
from megajax.layers.context import Context

type Unit = Callable[[Params, Params, Array, Array, Context], Array]
"""(weights, shared weights of the stack, numbers, x, ctx) -> x: repeats that are differentiated together.

weights: one row of each for one repeat, [n, ...] for n, by the place of the block in the pattern and the path in it:
"0.mixer.query"; numbers: int32 [] or [n], the first layer of each repeat. A single row is indexed outside: indexed
inside, it would be saved as an intermediate result rather than as an argument.
"""

type PerChunk = int | np.ndarray
"""Equal in all chunks of a pipeline, or int32 [chunks] in the order of the model."""


class BlockRows(NamedTuple):
    """Rows of the stacked weights for a block of a pattern: unit n has the rows from start + n * stride."""

    block: int
    """Number of the stacked block."""
    start: PerChunk
    """Counted from the first row of the chunk."""
    stride: int
    rows: int
    """Rows of a chunk."""


class Segment(NamedTuple):
    """Consecutive layers whose blocks repeat a pattern."""

    blocks: tuple[int, ...]
    """The pattern: numbers of stacked blocks."""
    repeats: int
    layer: int
    """Number of the first layer."""
    starts: tuple[int, ...]
    """For each block of the pattern, the row of the first layer."""

    def places(self, begin: int = 0, repeats: int = 1) -> tuple[BlockRows, ...]:
        """Rows of the units from repeat `begin`, with this many repeats each."""
        counts = [self.blocks.count(block) for block in self.blocks]
        return tuple(
            BlockRows(block, start + begin * count, repeats * count, self.repeats)
            for block, start, count in zip(self.blocks, self.starts, counts, strict=True)
        )


class Span(NamedTuple):
    """Consecutive repeats with one save policy."""

    units: int
    """How often `unit` is applied: the maximum over chunks."""
    repeats: int
    """Repeats per unit."""
    unit: Unit
    unroll: int
    """Units per iteration of the compiled loop."""
    places: tuple[BlockRows, ...]
    """For each block of the pattern."""
    layer: PerChunk | None
    """Number of the first layer; None: given by the row of the first weight."""
    counts: PerChunk
    """How often each chunk applies `unit`."""
    ring: int = 0
    """Spans in different chunks with equal rings share the buffer of saved tensors."""
    kept_at: PerChunk = 0
    """Index of the first unit in that buffer."""

    def part(self, begin: int, end: int) -> "Span":
        """Units [begin, end), where every chunk has as many units."""
        places = tuple(place._replace(start=place.start + begin * place.stride) for place in self.places)
        layer = None if self.layer is None else self.layer + begin * self.repeats * len(self.places)
        size, kept_at = end - begin, self.kept_at + begin
        unroll = max(1, min(self.unroll, size))
        return self._replace(units=size, counts=size, unroll=unroll, places=places, layer=layer, kept_at=kept_at)

    def used(self, stacked: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Path in a unit -> (path of the stacked weight, number of the place), of the weights that a unit uses."""
        paths = {}
        for path in stacked:
            block, _, rest = path.partition(".")
            for number, place in enumerate(self.places):
                if place.block == int(block):
                    paths[f"{number}.{rest}"] = path, number
        return paths
