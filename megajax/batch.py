"""The few pytrees that cross borders between data, models and training."""

from collections.abc import Mapping
from typing import Any, NamedTuple

type Array = Any
type Params = Mapping[str, Array]


class LMBatch(NamedTuple):
    """A batch for language models; each leaf is [M, B, S] (microbatch, row, position) or, inside a step, [B, S].

    A NamedTuple (a pytree without jax) so that data can be prepared before jax is imported.
    """

    tokens: Array
    """int32, inputs."""
    labels: Array
    """int32, the token that follows each input."""
    loss_mask: Array
    """float32, weight of each label in the loss: 0 or 1."""
    positions: Array
    """int32, position of each token, as learned positions and RoPE see it."""
    segment_ids: Array
    """int32, number of the document within the row; tokens of different documents do not attend to each other."""
    sample: Array
    """uint32 [M, B]: number of the row in the run's sample order; random numbers are derived from it."""


class Grads(NamedTuple):
    """What a gradient function returns: sums over the global batch, never means."""

    loss_sum: Array
    """float32 []: what the gradients are the derivative of."""
    weight_sum: Array
    """float32 []: what to divide loss_sum and grads by."""
    grads: Params
    """float32, summed over tokens."""
    metrics: Mapping[str, tuple[Array, Array]]
    """name -> (sum, weight), float32 []: for reporting only."""
