"""Recurrences along rows that are cut over `context`: what a device needs to know of the positions before its own.

A device has M chunks of each row, in zigzag or one. A recurrence that is linear in its state needs, for each of them,
the state before its first position, and a causal convolution the last inputs before it. What a chunk does to any state
is known without the chunks before it: h -> kept h + added. So each device computes that pair for its own chunks, all
devices exchange the pairs, and each combines them for a part of the features, which gives the state before every chunk;
a second exchange takes these back (the same idea as sequence parallelism of Mamba-2, Dao and Gu 2024, section 8.2).

What a device sends for a layer and row, forward, for C devices, S positions of a device, I channels with a state of Z
elements each, G groups, bf16 inputs and float32 states:

| | elements | bytes at 131072 positions, C 8, I 8192, Z 128, G 8 |
|---|---|---|
| states before chunks (here) | 2 M I Z (C-1)/C, float32, and M K I (C-1) inputs of the convolution | 14 MiB + 1 MiB |
| channels for positions, as Megatron-LM does | S (2 I + 2 max(G, C) Z) (C-1)/C, bf16 | 504 MiB |

The states are fewer bytes where a chunk is longer than 2 Z positions, 256 here. No device needs whole rows, and any
number of heads, groups and channels does. The price is one more pass over the inputs, to sum up what chunks add.

B rows, S positions of a device, T of a row, L = S / M of a chunk, N heads or channels, F elements of the state of each.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from megajax.kernels.context.collectives import gather_rows, to_heads, to_positions
from megajax.kernels.selective_scan import compose_transitions
from megajax.kernels.ssd import runs_of
from megajax.mesh.sequence_sharding import SequenceSharding


@dataclass(frozen=True, slots=True)
class RowChunks:
    """The rows of a microbatch, with each chunk of a device as a row of its own: [B, S, ...] as [B M, L, ...].

    To be used in an island over every mesh axis. With whole rows everything is the identity.
    """

    sharding: SequenceSharding
    documents: Array | None
    """int32 [B, T]: number of the document of each position in its row, in the row's order; None: one document."""

    @classmethod
    def of(cls, sharding: SequenceSharding, segments: Array | None) -> "RowChunks":
        """segments: int32 [B, S], of a device's positions; None: rows are one document."""
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
        """int32 [B M, L]: number of the document of a device's positions; None: one document."""
        if self.documents is None or self.unsharded:
            return self.documents
        rows, pieces = self.documents.shape[0], self.sharding.devices * self.sharding.chunks
        local_runs = jnp.take(self.documents.reshape(rows, pieces, -1), self._local_chunks(), axis=1)
        return local_runs.reshape(rows * self.sharding.chunks, -1)

    def last_inputs(self, x: Array, reach: int) -> Array | None:
        """The inputs of a convolution before each chunk, [B M, reach, ...], zeros where another document has them.

        x: [B, S, ...]. None for whole rows: nothing is before them.
        """
        if self.unsharded:
            return None
        rows, count, length = x.shape[0], self.sharding.chunks, x.shape[1] // self.sharding.chunks
        # Of short chunks all positions, of others only the last. Then what stands before chunk n ends at n x tail.
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
        """The state before each chunk of a device, float32 [B M, N, F], from what each chunk does to a state.

        kept: float32 [B M, N, F or 1], 0 where a document starts behind the first position; added: float32 [B M, N, F].
        """
        everyone, size = replace(self.sharding, exchanging=self.sharding.devices), added.shape[-1]

        def by_row(x: Array) -> Array:
            """[B M, N, F] -> [B, M, F, N]."""
            return jnp.moveaxis(x.reshape(-1, self.sharding.chunks, *x.shape[1:]), 3, 2)

        def exchanged(x: Array) -> Array:
            """[B M, N, F] -> all chunks of the row in order, and a part of the elements, [B, C M, F / C, N]."""
            return to_heads(everyone, by_row(jnp.pad(x, ((0, 0), (0, 0), (0, -size % self.sharding.devices)))))

        decay = gather_rows(self.sharding, by_row(decay)) if decay.shape[-1] == 1 else exchanged(decay)
        added = exchanged(added)
        opens = self._opens(added.shape[:2])[..., None, None]
        after = lax.associative_scan(compose_transitions, (jnp.where(opens, 0, decay), added), axis=1)[1]
        before = jnp.pad(after[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
        before = to_positions(everyone, jnp.where(opens, 0, before))
        before = jnp.moveaxis(before, 2, 3)[..., :size]
        return before.reshape(-1, *before.shape[2:])

    def _local_chunks(self) -> Array:
        """int32 [M]: numbers in the row of a device's chunks."""
        order = jnp.asarray(self.sharding.chunk_order().reshape(self.sharding.devices, -1), jnp.int32)
        return order[self.sharding.rank()]

    def _opens(self, shape: tuple[int, ...]) -> Array:
        """bool [B, C M]: a document starts with the chunk's first position."""
        if self.documents is None:
            return jnp.zeros(shape, bool)
        chunks = self.documents.reshape(*shape, -1)
        return jnp.pad(chunks[:, 1:, 0] != chunks[:, :-1, -1], ((0, 0), (1, 0)))


def _before(x: Array, starts: Array, reach: int, filler: int) -> Array:
    """What x [B, T, ...] has before each start, [B, M, reach, ...]; `filler` before the first position."""
    padded = jnp.pad(x, ((0, 0), (reach, 0), *[(0, 0)] * (x.ndim - 2)), constant_values=filler)
    return jnp.take(padded, starts[:, None] + jnp.arange(reach)[None], axis=1)
