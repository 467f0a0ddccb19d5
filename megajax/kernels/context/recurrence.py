"""Recurrences along rows sharded over `context`: the states and inputs before each chunk of a device.

A device holds M chunks of each row: one, or several in zigzag order. For each chunk, a recurrence that is linear in its
state needs the state before the first position, and a causal convolution needs the last inputs before it. The effect of
a chunk on a state does not depend on the chunks before it: h -> decay * h + added. So each device computes this pair
for its own chunks, all devices exchange the pairs, and each device combines them for a part of the features, which
gives the state before every chunk. A second exchange returns these states to the devices of the chunks (the idea of
sequence parallelism in Mamba-2, Dao and Gu 2024, section 8.2).

Bytes that a device sends per layer and row in the forward pass, for C devices, S positions per device, I channels with
a state of Z elements each, G groups, bf16 inputs and float32 states:

| | elements | bytes at 131072 positions, C 8, I 8192, Z 128, G 8 |
|---|---|---|
| states before chunks (here) | 2 M I Z (C-1)/C, float32, and M K I (C-1) inputs of the convolution | 14 MiB + 1 MiB |
| the same for states [K, V] of a delta net | M N K (K + 2 V) (C-1)/C, float32 | 10.5 MiB for 32 heads of 128 x 128 |
| channels for positions, as Megatron-LM does | S (2 I + 2 max(G, C) Z) (C-1)/C, bf16 | 504 MiB |

The states are fewer bytes if a chunk is longer than 2 Z positions, 256 here. No device needs whole rows, and any
number of heads, groups and channels works. The cost is one more pass over the inputs, to compute what chunks add.

B rows, S positions of a device, T of a row, L = S / M of a chunk, N heads or channels, F elements of the state of each.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.context.collectives import gather_rows, to_heads, to_positions
from megajax.kernels.ssm.chunks import runs_of
from megajax.kernels.ssm.selective_scan import compose_transitions
from megajax.mesh.zigzag_order import SequenceSharding


@dataclass(frozen=True, slots=True)
class RowChunks:
    """The rows of a microbatch, split into one row per chunk of a device: [B, S, ...] as [B M, L, ...].

    Used in an island over every mesh axis. For unsharded rows all methods are the identity.
    """

    sharding: SequenceSharding
    documents: Array | None
    """int32 [B, T]: number of each position's document in its row, in the row's order; None: one document."""

    @classmethod
    def of(cls, sharding: SequenceSharding, segments: Array | None) -> "RowChunks":
        """segments: int32 [B, S] of a device's positions; None: a row is one document."""
        if segments is None:
            return cls(sharding, None)
        return cls(sharding, runs_of(gather_rows(sharding, segments) if sharding.devices > 1 else segments))

    @property
    def unsharded(self) -> bool:
        """Whether each device has whole rows."""
        return self.sharding.devices == 1

    def split_chunks(self, x: Array) -> Array:
        """[B, S, ...] -> [B M, L, ...]."""
        count = self.sharding.chunks if not self.unsharded else 1
        return x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])

    def join_chunks(self, x: Array) -> Array:
        """The inverse of `split_chunks`."""
        count = self.sharding.chunks if not self.unsharded else 1
        return x.reshape(x.shape[0] // count, x.shape[1] * count, *x.shape[2:])

    def runs(self) -> Array | None:
        """int32 [B M, L]: document number of each of a device's positions; None: one document."""
        if self.documents is None or self.unsharded:
            return self.documents
        rows, pieces = self.documents.shape[0], self.sharding.devices * self.sharding.chunks
        local_runs = jnp.take(self.documents.reshape(rows, pieces, -1), self._local_chunks(), axis=1)
        return local_runs.reshape(rows * self.sharding.chunks, -1)

    def last_inputs(self, x: Array, reach: int) -> Array | None:
        """The inputs of a convolution before each chunk, [B M, reach, ...]; zeros for inputs of another document.

        x: [B, S, ...]. None for unsharded rows, which have nothing before them.
        """
        if self.unsharded:
            return None
        rows, count, length = x.shape[0], self.sharding.chunks, x.shape[1] // self.sharding.chunks
        # All positions of short chunks, the last ones of long chunks: the inputs before chunk n then end at n * tail.
        tail = min(reach, length)
        tails = x.reshape(rows, count, length, *x.shape[2:])[:, :, length - tail :]
        tails = gather_rows(self.sharding, tails.reshape(rows, count * tail, *x.shape[2:]))
        before = _before(tails, self._local_chunks() * tail, reach, 0)
        if self.documents is not None:
            starts = self._local_chunks() * length
            same_document = (
                _before(self.documents, starts, reach, -1) == jnp.take(self.documents, starts, axis=1)[..., None]
            )
            before = jnp.where(same_document.reshape(*same_document.shape, *[1] * (x.ndim - 2)), before, 0)
        return before.reshape(rows * count, reach, *x.shape[2:])

    def first_states(self, decay: Array, added: Array) -> Array:
        """The state before each chunk of a device, float32 [B M, N, F], from the transition of each chunk.

        decay: float32 [B M, N, F or 1], 0 if a document starts after the first position; added: float32 [B M, N, F].
        """
        everyone, size = replace(self.sharding, exchanging=self.sharding.devices), added.shape[-1]

        def by_row(x: Array) -> Array:
            """[B M, N, F] -> [B, M, F, N]."""
            return jnp.moveaxis(x.reshape(-1, self.sharding.chunks, *x.shape[1:]), 3, 2)

        def exchanged(x: Array) -> Array:
            """[B M, N, F] -> all chunks of the row in order, with a part of the elements, [B, C M, F / C, N]."""
            return to_heads(everyone, by_row(jnp.pad(x, ((0, 0), (0, 0), (0, -size % self.sharding.devices)))))

        decay = gather_rows(self.sharding, by_row(decay)) if decay.shape[-1] == 1 else exchanged(decay)
        added = exchanged(added)
        opens = self._opens(added.shape[:2])[..., None, None]
        after = lax.associative_scan(compose_transitions, (jnp.where(opens, 0, decay), added), axis=1)[1]
        before = jnp.pad(after[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
        before = to_positions(everyone, jnp.where(opens, 0, before))
        before = jnp.moveaxis(before, 2, 3)[..., :size]
        return before.reshape(-1, *before.shape[2:])

    def first_matrices(self, transition: Array, added: Array) -> Array:
        """The state before each chunk of a device, float32 [B M, N, K, V], for h -> transition h + added.

        transition: float32 [B M, N, K, K], 0 if a document starts after the first position; added: float32
        [B M, N, K, V]. Devices exchange chunks for heads, and combine the transitions of a head in turn.
        """
        everyone, heads = replace(self.sharding, exchanging=self.sharding.devices), added.shape[1]

        def exchanged(x: Array) -> Array:
            """[B M, N, ...] -> all chunks of the row in order, with a part of the heads, [C M, B, N / C, ...]."""
            x = jnp.pad(x, ((0, 0), (0, -heads % self.sharding.devices), (0, 0), (0, 0)))
            return jnp.moveaxis(to_heads(everyone, x.reshape(-1, self.sharding.chunks, *x.shape[1:])), 1, 0)

        def advance(state: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            opens, transition, added = at
            state = jnp.where(opens[:, None, None, None], 0, state)
            return jnp.einsum("bnkl,bnlv->bnkv", transition, state, precision=lax.Precision.HIGHEST) + added, state

        transition, added = exchanged(transition), exchanged(added)
        opens = self._opens((added.shape[1], added.shape[0])).T
        _, before = lax.scan(advance, jnp.zeros_like(added[0]), (opens, transition, added))
        before = to_positions(everyone, jnp.moveaxis(before, 0, 1))
        return before.reshape(-1, *before.shape[2:])[:, :heads]

    def _local_chunks(self) -> Array:
        """int32 [M]: numbers of a device's chunks in the row."""
        order = jnp.asarray(self.sharding.chunk_order().reshape(self.sharding.devices, -1), jnp.int32)
        return order[self.sharding.rank()]

    def _opens(self, shape: tuple[int, ...]) -> Array:
        """bool [B, C M]: whether a document starts at the chunk's first position."""
        if self.documents is None:
            return jnp.zeros(shape, bool)
        chunks = self.documents.reshape(*shape, -1)
        return jnp.pad(chunks[:, 1:, 0] != chunks[:, :-1, -1], ((0, 0), (1, 0)))


def _before(x: Array, starts: Array, reach: int, filler: int) -> Array:
    """The `reach` elements of x [B, T, ...] before each start, [B, M, reach, ...]; `filler` before the row."""
    padded = jnp.pad(x, ((0, 0), (reach, 0), *[(0, 0)] * (x.ndim - 2)), constant_values=filler)
    return jnp.take(padded, starts[:, None] + jnp.arange(reach)[None], axis=1)
