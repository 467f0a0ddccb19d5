"""Ring attention (Liu et al. 2023): keys and values go from device to device while each computes with what it holds.

In the backward pass the gradients of keys and values follow them around in float32, and arrive where they belong after
the last step.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.attention import AttentionDropout, Passes
from megajax.kernels.context.collectives import from_previous
from megajax.kernels.context.merge import merged
from megajax.kernels.mask import Mask
from megajax.mesh.row_cut import RowCut


class _Held(NamedTuple):
    """The keys that a device holds in a step of the ring."""

    keys: Array
    values: Array
    segments: Array | None

    def passed_on(self, cut: RowCut) -> "_Held":
        """What the device before holds."""
        segments = None if self.segments is None else from_previous(cut, self.segments)
        return _Held(from_previous(cut, self.keys), from_previous(cut, self.values), segments)

    def mask(self, cut: RowCut, mask: Mask, step: int) -> Mask:
        """Of this device's queries on these keys, which come from the device `step` places before in the ring."""
        source = (cut.rank() - step) % cut.devices
        index = mask.key_index if step == 0 else cut.local_index(self.keys.shape[1], source)
        return mask._replace(key_index=index, key_segments=self.segments)


def _together[S](sums: S, arriving: _Held) -> tuple[S, _Held]:
    """Ends a step of the ring. Without it the compiler runs all transfers first, and none beside a kernel."""
    return lax.optimization_barrier((sums, arriving))


def ring(cut: RowCut, passes: Passes) -> Passes:
    """Attention of whole rows from a device's part of them, by a backend that takes any mask."""

    def forward(
        q: Array, k: Array, v: Array, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array]:
        held = _Held(k, v, mask.key_segments)
        sums: list[tuple[Array, Array]] = []
        for step in range(cut.devices):
            arriving = held.passed_on(cut) if step + 1 < cut.devices else held
            there = held.mask(cut, mask, step)
            new = passes.call_forward(q, held.keys, held.values, there, scale=scale, dropout=dropout)
            sums, held = _together([merged(*sums, new)], arriving)
        ((out, lse),) = sums
        return out.astype(q.dtype), lse

    def backward(
        q: Array,
        k: Array,
        v: Array,
        mask: Mask,
        out: Array,
        lse: Array,
        dout: Array,
        *,
        scale: float,
        dropout: AttentionDropout | None = None,
    ) -> tuple[Array, Array, Array]:
        held, saved = _Held(k, v, mask.key_segments), (out, lse, dout)
        dq, *moving = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        for step in range(cut.devices):
            arriving = held.passed_on(cut) if step + 1 < cut.devices else held
            # The sums of the step before travel beside this step's kernel.
            moving = [from_previous(cut, x) if step else x for x in moving]
            there = held.mask(cut, mask, step)
            new = passes.call_backward(q, held.keys, held.values, there, *saved, scale=scale, dropout=dropout)
            dq, *moving = (x + y.astype(jnp.float32) for x, y in zip((dq, *moving), new, strict=True))
            (dq, moving), held = _together((dq, moving), arriving)
        dk, dv = (from_previous(cut, x.astype(k.dtype)) for x in moving)
        return dq.astype(q.dtype), dk, dv

    return Passes(forward, backward, passes.dropout)
