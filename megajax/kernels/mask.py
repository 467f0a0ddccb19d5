"""Which keys a query sees. B rows, S queries, T keys."""

from typing import NamedTuple

from jax import Array


class Mask(NamedTuple):
    """Which keys a query sees: those at or before it in the row, in its window and in its document where it has any."""

    query_index: Array
    """int32 [S]: place of each query in its row."""
    key_index: Array
    """int32 [T]: place of each key in its row."""
    query_segments: Array | None
    """int32 [B, S], or None when a row is one document."""
    key_segments: Array | None
    """int32 [B, T]."""
    window: int | None = None
    """How many keys before its own a query sees: with 8 it sees 9 tokens; None for all."""
    causal: bool = True
    """No query sees keys after its own."""

    def visible(self) -> Array:
        """bool [B or 1, S, T]."""
        before = self.query_index[:, None] - self.key_index[None, :]
        seen = before >= 0 if self.causal else before == before
        seen = (seen if self.window is None else seen & (before <= self.window))[None]
        if self.query_segments is None or self.key_segments is None:
            return seen
        return seen & (self.query_segments[:, :, None] == self.key_segments[:, None, :])
