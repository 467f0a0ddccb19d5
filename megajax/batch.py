"""The pytrees that cross borders between data, models and training; importing this imports no jax."""

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
"""The leaf that the loader adds: uint32 [M, B], number of the row in the run's order. Random numbers derive from it."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What stands in the tokens of a row for each entry of another leaf, such as an image."""

    token: int
    count: int
    """Positions of one entry."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a batch, as a single row has it."""

    dtype: str
    shape: tuple[int, ...] = ()
    axes: tuple[str | None, ...] = ()
    """A logical axis for each dimension of `shape`."""
    below: int | None = None
    """Values are integers from 0 up to this; None: anything."""
    ignored: int | None = None
    """A value beyond `below` that is allowed too: positions with it do not count."""
    optional: bool = False
    """The model runs without it."""
    placeholder: Placeholder | None = None
    """Where the entries of the first dimension stand between tokens: what stands there in `tokens`, in their order."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a leaf of shape {self.shape} needs as many logical axes, got {self.axes}")

    @property
    def batch_axes(self) -> tuple[str | None, ...]:
        """Logical axes of the leaf in a batch, [M, B, ...]."""
        return (None, "batch", *self.axes)

    def positions(self) -> int:
        """Positions along the sequence, 1 for a leaf without one."""
        return next((size for size, axis in zip(self.shape, self.axes, strict=True) if axis == "seq"), 1)


type Schema = Mapping[str, Leaf]
"""The leaves of a batch by name."""


def batch_schema(reads: Schema, makes: Mapping[str, str]) -> dict[str, Leaf]:
    """The leaves of a run's batches: those that the model reads and the data makes, and `sample`.

    reads: of the model; makes: name -> dtype, of the data.
    """
    return {name: leaf for name, leaf in reads.items() if name in makes} | {SAMPLE: Leaf("uint32")}


class Loss(NamedTuple):
    """The loss of one microbatch; all float32, and [] but for metrics."""

    loss_sum: Array
    """Differentiated."""
    weight_sum: Array
    """What to divide the sum of loss_sum by."""
    metrics: Mapping[str, tuple[Array, Array]]
    """name -> (sum, weight) to report; `loss` is among them. Both [], or both [K] for the mean of K quotients, such as
    of classes; those whose weight is 0 do not count."""


class Grads(NamedTuple):
    """What a gradient function returns: sums over the global batch, never means."""

    loss_sum: Array
    """float32 []: what the gradients are the derivative of."""
    weight_sum: Array
    """float32 []: what to divide loss_sum and grads by."""
    grads: Params
    """float32, summed over tokens."""
    metrics: Mapping[str, tuple[Array, Array]]
    """name -> (sum, weight), float32: for reporting only. See `Loss`."""
    observed: Params
    """What layers observed, float32 by path; see megajax.mesh.observations."""
