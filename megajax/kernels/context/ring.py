"""Ring attention (Liu et al. 2023): keys and values go from device to device while each computes with what it holds.

In the backward pass the gradients of keys and values follow them around in float32, and arrive where they belong after
the last step.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.kernels.attention import AttentionDropout, Passes
from megajax.kernels.context.collectives import from_before
from megajax.kernels.context.merge import merged
from megajax.kernels.mask import Mask
from megajax.mesh.row_cut import RowCut


class _Held(NamedTuple):
    """The keys that a device holds in a step of the ring."""

    keys: Array
    values: Array
    segments: Array | None

    def passed_on(self, cut: RowCut, places: int) -> "_Held":
        """What the device so many places before holds."""
        segments = None if self.segments is None else from_before(cut, self.segments, places)
        return _Held(from_before(cut, self.keys, places), from_before(cut, self.values, places), segments)

    def mask(self, cut: RowCut, mask: Mask, source: int) -> Mask:
        """Of this device's queries on these keys, which come from the device `source` places before in the ring."""
        rank = (cut.rank() - source) % cut.devices
        index = mask.key_index if source == 0 else cut.local_index(self.keys.shape[1], rank)
        return mask._replace(key_index=index, key_segments=self.segments)


def sources(cut: RowCut, length: int, mask: Mask) -> list[int]:
    """How many places before a device are those whose keys it needs, from 0, itself, on.

    With a window, keys that no device needs are passed by: where it is no longer than a chunk, all but those of both
    neighbours. length: positions of a device. The same for all devices, which run one program.
    """
    if mask.window is None or not mask.causal:
        return list(range(cut.devices))
    chunks, size = cut.chunk_order().reshape(cut.devices, -1), length // cut.chunks

    def needed(source: int) -> bool:
        queries, keys = chunks[:, :, None], np.roll(chunks, source, axis=0)[:, None]
        # From the first query of a chunk back to the last key of an earlier one.
        nearest = (queries - keys - 1) * size + 1
        return bool(((keys <= queries) & (nearest <= mask.window)).any())

    return [source for source in range(cut.devices) if source == 0 or needed(source)]


def _together[S](sums: S, arriving: _Held) -> tuple[S, _Held]:
    """Ends a step of the ring. Without it the compiler runs all transfers first, and none beside a kernel."""
    return lax.optimization_barrier((sums, arriving))


def ring(cut: RowCut, own: Passes, arriving: Passes) -> Passes:
    """Attention of whole rows from a device's part of them.

    own: of a device's own keys; arriving: of those of another one. The same where a backend takes any mask.
    """

    def forward(
        q: Array, k: Array, v: Array, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array]:
        held, steps = _Held(k, v, mask.key_segments), sources(cut, k.shape[1], mask)
        sums: list[tuple[Array, Array]] = []
        for source, following in zip(steps, [*steps[1:], None], strict=True):
            coming = held if following is None else held.passed_on(cut, following - source)
            there, passes = held.mask(cut, mask, source), arriving if source else own
            new = passes.call_forward(q, held.keys, held.values, there, scale=scale, dropout=dropout)
            sums, held = _together([merged(*sums, new)], coming)
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
        held, saved, steps = _Held(k, v, mask.key_segments), (out, lse, dout), sources(cut, k.shape[1], mask)
        dq, *moving = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        last = 0
        for source, following in zip(steps, [*steps[1:], None], strict=True):
            coming = held if following is None else held.passed_on(cut, following - source)
            # The sums of the step before travel beside this step's kernel.
            moving = [from_before(cut, x, source - last) if source else x for x in moving]
            there, passes = held.mask(cut, mask, source), arriving if source else own
            new = passes.call_backward(q, held.keys, held.values, there, *saved, scale=scale, dropout=dropout)
            dq, *moving = (x + y.astype(jnp.float32) for x, y in zip((dq, *moving), new, strict=True))
            (dq, moving), held = _together((dq, moving), coming)
            last = source
        home = [x.astype(k.dtype) for x in moving]
        dk, dv = (from_before(cut, x, cut.devices - last) for x in home) if last else home
        return dq.astype(q.dtype), dk, dv

    return Passes(forward, backward, own.dropout)
