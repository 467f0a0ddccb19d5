"""The attention mask. B rows, S queries, T keys."""

from typing import NamedTuple

from jax import Array


class Mask(NamedTuple):
    """The keys that each query sees; causal, window and segments each restrict them if set."""

    query_index: Array
    """int32 [S]: position of each query in its row."""
    key_index: Array
    """int32 [T]: position of each key in its row."""
    query_segments: Array | None
    """int32 [B, S], or None when a row is one document."""
    key_segments: Array | None
    """int32 [B, T]."""
    window: int | None = None
    """Number of keys before its own position that a query sees: 8 means 9 tokens. None: all."""
    causal: bool = True
    """A query sees no keys after its own position."""
    padded: bool = False
    """Keys of segment 0 are padding, which no query sees; all other keys belong to one text."""

    def visible(self) -> Array:
        """bool [B or 1, S, T]."""
        distance = self.query_index[:, None] - self.key_index[None, :]
        visible = distance >= 0 if self.causal else distance == distance
        visible = (visible if self.window is None else visible & (distance <= self.window))[None]
        if self.query_segments is None or self.key_segments is None:
            return visible
        if self.padded:
            return visible & (self.key_segments != 0)[:, None, :]
        return visible & (self.query_segments[:, :, None] == self.key_segments[:, None, :])
