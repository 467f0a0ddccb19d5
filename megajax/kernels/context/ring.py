"""Ring attention (Liu et al. 2023): keys and values move from device to device while each device attends to the ones it
holds.

In the backward pass, the gradients of keys and values travel with them in float32 and return to their own device after
the last step.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.kernels.attention.attention import Passes, merge_parts
from megajax.kernels.attention.dropout import AttentionDropout
from megajax.kernels.attention.mask import Mask
from megajax.kernels.context.collectives import from_before, gather_devices
from megajax.mesh.zigzag_order import SequenceSharding


class _Ring(NamedTuple):
    """The ring as one device sees it."""

    sharding: SequenceSharding
    mask: Mask
    segments: Array | None
    """int32 [B, T]: segments of the keys of all devices, device by device."""
    steps: list[int]
    """`sources`."""

    @classmethod
    def of(cls, sharding: SequenceSharding, mask: Mask, length: int) -> "_Ring":
        """length: positions of a device."""
        segments = None if mask.key_segments is None else gather_devices(sharding, mask.key_segments)
        return cls(sharding, mask, segments, sources(sharding, length, mask))

    def turns(self) -> Iterator[tuple[int, int, int]]:
        """For each step: the source of its keys, and how many places keys and then sums move after it."""
        for source, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            last = following is None
            yield source, 0 if last else following - source, (self.sharding.devices if last else following) - source

    def mask_of(self, source: int, length: int) -> Mask:
        """The mask of this device's queries over the keys of the device `source` places before it in the ring."""
        if source == 0:
            return self.mask
        rank, ids = (self.sharding.rank() - source) % self.sharding.devices, None
        if self.segments is not None:
            ids = lax.dynamic_slice_in_dim(self.segments, rank * length, length, axis=1)
        return self.mask._replace(key_index=self.sharding.local_index(length, rank), key_segments=ids)


def sources(sharding: SequenceSharding, length: int, mask: Mask) -> list[int]:
    """The devices whose keys a device needs, as distances before it in the ring; 0 is the device itself.

    With a window, devices whose keys no query sees are skipped: for a window no longer than a chunk, all but the two
    neighbours. length: positions per device. The list is the same for all devices, because they run one program.
    """
    if mask.window is None or not mask.causal:
        return list(range(sharding.devices))
    chunks, size = sharding.chunk_order().reshape(sharding.devices, -1), length // sharding.chunks

    def needed(source: int) -> bool:
        queries, keys = chunks[:, :, None], np.roll(chunks, source, axis=0)[:, None]
        # From the first query of a chunk back to the last key of an earlier one.
        nearest = (queries - keys - 1) * size + 1
        return bool(((keys <= queries) & (nearest <= mask.window)).any())

    return [source for source in range(sharding.devices) if source == 0 or needed(source)]


def _end_step[S](sums: S, coming: Array) -> tuple[S, Array]:
    """Ends a step of the ring. Without it the compiler runs all transfers first, so that none overlaps a kernel."""
    return lax.optimization_barrier((sums, coming))


def ring(sharding: SequenceSharding, local: Passes, remote: Passes) -> Passes:
    """Attention over whole rows, computed from each device's shard.

    local: for a device's own keys; remote: for those of another device. The same for a backend that takes any mask.
    """

    def forward(
        q: Array, k: Array, v: Array, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array]:
        around, size, length = _Ring.of(sharding, mask, k.shape[1]), k.shape[3], k.shape[1]
        # One transfer for both, because the scheduler limits the number of transfers in flight.
        kv = jnp.concatenate([k, v], axis=3)
        sums: list[tuple[Array, Array]] = []
        for source, next_keys, _ in around.turns():
            coming = from_before(sharding, kv, next_keys) if next_keys else kv
            passes, source_mask = remote if source else local, around.mask_of(source, length)
            new = passes.with_arguments(dropout=dropout).forward(
                q, kv[..., :size], kv[..., size:], source_mask, scale=scale
            )
            sums, kv = _end_step([merge_parts(*sums, new)], coming)
        ((out, lse),) = sums
        return out.astype(q.dtype), lse

    def backward(
        q: Array, k: Array, v: Array, mask: Mask, *saved: Array, scale: float, dropout: AttentionDropout | None = None
    ) -> tuple[Array, Array, Array]:
        around, size, length = _Ring.of(sharding, mask, k.shape[1]), k.shape[3], k.shape[1]
        kv = jnp.concatenate([k, v], axis=3)
        dq, moving, way = jnp.zeros(q.shape, jnp.float32), jnp.zeros(kv.shape, jnp.float32), 0
        for source, next_keys, next_sums in around.turns():
            coming = from_before(sharding, kv, next_keys) if next_keys else kv
            # The sums of the previous step move while this step's kernel runs.
            moving = from_before(sharding, moving, way) if way else moving
            passes, source_mask = remote if source else local, around.mask_of(source, length)
            keys = kv[..., :size], kv[..., size:]
            new = passes.with_arguments(dropout=dropout).backward(q, *keys, source_mask, *saved, scale=scale)
            new_q, *keyed = (x.astype(jnp.float32) for x in new)
            (dq, moving), kv = _end_step((dq + new_q, moving + jnp.concatenate(keyed, axis=3)), coming)
            way = next_sums
        home = moving.astype(k.dtype)
        home = from_before(sharding, home, way) if way < sharding.devices else home
        return dq.astype(q.dtype), home[..., :size], home[..., size:]

    return Passes(forward, backward, local.dropout)
