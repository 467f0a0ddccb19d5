"""Attention over sharded rows by the strategy of their sharding and a backend."""

from collections.abc import Mapping
from types import MappingProxyType

from megajax.kernels.attention import cudnn
from megajax.kernels.attention.attention import Passes, passes_of
from megajax.kernels.context.all_to_all import all_to_all
from megajax.kernels.context.gathered import all_gather, chunks_with_gathered_keys, two_squares
from megajax.kernels.context.ring import ring
from megajax.mesh.zigzag_order import SequenceSharding

RECTANGLES: Mapping[str, Passes] = MappingProxyType(
    {"cudnn": Passes(cudnn.rectangle_forward, cudnn.rectangle_backward)}
)
"""Attention of a chunk to the keys before it, for backends without position arguments; see `Backend.positions`."""


def over_context(sharding: SequenceSharding, kernel: str, cap: float | None = None) -> Passes:
    """Attention over rows sharded over several devices, with the signature of a backend.

    q [B, S, N, H], k [B, S, K, H], v [B, S, K, U], and the indices and segments of the mask are those of a device's
    positions. kernel: name of the backend that computes the parts; `kernels.capability` must allow it. cap: soft
    cap of scores. Call the result in an island over every mesh axis.
    """
    return over_devices(sharding, passes_of(kernel, cap), RECTANGLES.get(kernel))


def over_devices(sharding: SequenceSharding, passes: Passes, rectangles: Passes | None) -> Passes:
    """`over_context` with the passes of a backend. rectangles: None for a backend with position arguments."""
    if sharding.exchanging > 1:
        groups = sharding.exchanged()
        return all_to_all(sharding, _between(groups, passes, rectangles) if groups.devices > 1 else passes)
    return _between(sharding, passes, rectangles)


def _between(sharding: SequenceSharding, passes: Passes, rectangles: Passes | None) -> Passes:
    """Attention between devices that hold different positions of the same heads."""
    if "ring" in sharding.strategy:
        return ring(sharding, passes, passes if rectangles is None else two_squares(passes))
    return (
        all_gather(sharding, passes) if rectangles is None else chunks_with_gathered_keys(sharding, passes, rectangles)
    )
