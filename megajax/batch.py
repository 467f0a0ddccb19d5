"""The pytrees that data, models and training exchange. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

type Array = Any
type Params = Mapping[str, Array]

type Batch = Mapping[str, Array]
"""Leaves by name, each [M, B, ...]: microbatch, row, and the dimensions of a row. Inside a step [B, ...]."""

type Rows = Mapping[str, Array]
"""The leaves of one microbatch, [B, ...]."""

SAMPLE = "sample"
"""The leaf that the loader adds: uint32 [M, B], index of the row in the run's order. Random numbers derive from it."""


@dataclass(frozen=True, slots=True)
class Patches:
    """How an image of any size becomes patches: its sides become multiples of merge * side, close to its own ratio."""

    side: int
    """Pixels of a side of a square patch."""
    merge: int
    """Squares of patches with this side are one position of the text."""
    least: int
    """Smaller images are enlarged to this many patches, unless more than `most` would follow."""
    most: int
    """Maximum number of patches of an image; larger ones are reduced."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The tokens of a row that represent one entry of another leaf, such as an image."""

    token: int
    count: int
    """Number of positions of one entry; with `patches`, the maximum."""
    states: int = 1
    """States of the model's width that each position has."""
    patches: Patches | None = None
    """Entries are images of any size, whose patches [n, pixels] follow one another, and the leaf `grids` has their rows
    and columns; None: all entries are alike."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a batch, described for a single row."""

    dtype: str
    shape: tuple[int, ...] = ()
    axes: tuple[str | None, ...] = ()
    """A logical axis for each dimension of `shape`."""
    below: int | None = None
    """Values are integers in [0, below); None: no limits."""
    ignored: int | None = None
    """Another allowed value, outside of [0, below): positions with it do not count."""
    optional: bool = False
    """Whether the model runs without it."""
    loss_only: bool = False
    """Whether only the loss reads it: a forward pass without one runs without it."""
    placeholder: Placeholder | None = None
    """For entries of the first dimension that are placed between tokens: their placeholder in `tokens`, in order."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a leaf of shape {self.shape} needs one logical axis per dimension, got {self.axes}")

    @property
    def batch_axes(self) -> tuple[str | None, ...]:
        """Logical axes of the leaf in a batch, [M, B, ...]."""
        return (None, "batch", *self.axes)

    def positions(self) -> int:
        """Positions along the sequence; 1 for a leaf without a sequence axis."""
        return next((size for size, axis in zip(self.shape, self.axes, strict=True) if axis == "seq"), 1)


type Schema = Mapping[str, Leaf]
"""The leaves of a batch by name."""


def batch_schema(reads: Schema, makes: Mapping[str, str]) -> dict[str, Leaf]:
    """The leaves of a run's batches: those that the model reads and the data provides, and `sample`.

    reads: schema of the model; makes: name -> dtype of the data's leaves.
    """
    return {name: leaf for name, leaf in reads.items() if name in makes} | {SAMPLE: Leaf("uint32")}


class Loss(NamedTuple):
    """The loss of one microbatch; all arrays are float32, and scalars except for metrics."""

    loss_sum: Array
    """The differentiated sum."""
    weight_sum: Array
    """The divisor of loss_sum after summing over microbatches."""
    metrics: Mapping[str, tuple[Array, Array]]
    """name -> (sum, weight) to report, including `loss`. Both [], or both [K] for the mean of K quotients, such as one
    for each class; quotients with weight 0 do not count."""


class Grads(NamedTuple):
    """The result of a gradient function: sums over the global batch, never means."""

    loss_sum: Array
    """float32 []: the differentiated sum."""
    weight_sum: Array
    """float32 []: the divisor of loss_sum and grads."""
    grads: Params
    """float32, summed over tokens."""
    metrics: Mapping[str, tuple[Array, Array]]
    """name -> (sum, weight), float32: only for reporting. See `Loss`."""
    observed: Params
    """Observations of layers, float32 by path; see megajax.mesh.layer_observations."""
