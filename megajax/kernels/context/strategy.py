"""From a cut of rows and a backend to attention over whole rows."""

from collections.abc import Mapping
from types import MappingProxyType

from megajax.kernels import cudnn
from megajax.kernels.attention import PASSES, Passes
from megajax.kernels.context.all_gather import all_gather
from megajax.kernels.context.all_to_all import all_to_all
from megajax.kernels.context.chunks import chunks_with_gathered_keys, two_squares
from megajax.kernels.context.ring import ring
from megajax.mesh.sequence_sharding import SequenceSharding

RECTANGLES: Mapping[str, Passes] = MappingProxyType(
    {"cudnn": Passes(cudnn.rectangle_forward, cudnn.rectangle_backward)}
)
"""What backends that know no positions compute of a chunk and the keys before it; see `Backend.positions`."""


def over_context(sharding: SequenceSharding, kernel: str) -> Passes:
    """The attention of a cut over several devices, with the signature of a backend on whole rows.

    q [B, S, N, H], k [B, S, K, H] and v [B, S, K, U] are a device's positions, and so are the indices and segments of
    the mask. kernel: name of the backend that computes the parts, which `kernels.capability` has to allow. To be called
    in an island over every mesh axis.
    """
    return over_devices(sharding, PASSES[kernel], RECTANGLES.get(kernel))


def over_devices(sharding: SequenceSharding, passes: Passes, rectangles: Passes | None) -> Passes:
    """As `over_context`, by a backend with rectangles where it knows no positions."""
    if sharding.exchanging > 1:
        groups = sharding.exchanged()
        return all_to_all(sharding, _between(groups, passes, rectangles) if groups.devices > 1 else passes)
    return _between(sharding, passes, rectangles)


def _between(sharding: SequenceSharding, passes: Passes, rectangles: Passes | None) -> Passes:
    """Of devices that hold different positions of the same heads."""
    if "ring" in sharding.strategy:
        return ring(sharding, passes, passes if rectangles is None else two_squares(passes))
    return (
        all_gather(sharding, passes) if rectangles is None else chunks_with_gathered_keys(sharding, passes, rectangles)
    )
