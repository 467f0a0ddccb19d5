"""From a cut of rows and a backend to attention over whole rows."""

from megajax.kernels.attention import PASSES, Passes
from megajax.kernels.context.all_gather import all_gather
from megajax.kernels.context.all_to_all import all_to_all
from megajax.kernels.context.ring import ring
from megajax.mesh.row_cut import RowCut


def over_context(cut: RowCut, kernel: str) -> Passes:
    """The attention of a cut over several devices, with the signature of a backend on whole rows.

    q [B, S, N, H], k [B, S, K, H] and v [B, S, K, U] are a device's positions, and so are the indices and segments of
    the mask. kernel: name of the backend that computes the parts. To be called in an island over every mesh axis.
    """
    passes = PASSES[kernel]
    if cut.exchanging > 1:
        groups = cut.exchanged()
        return all_to_all(cut, _between(groups, passes) if groups.devices > 1 else passes)
    return _between(cut, passes)


def _between(cut: RowCut, passes: Passes) -> Passes:
    """Of devices that hold different positions of the same heads."""
    return (ring if "ring" in cut.strategy else all_gather)(cut, passes)
