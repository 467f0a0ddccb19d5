"""Multiply-adds of a layer's forward pass, and the pairs of positions that the mask of attention leaves.

Importing this imports neither jax nor flax.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable


class VisibleKeys(NamedTuple):
    """The keys that a query sees by its position: a causal mask, a window of it, or a chunk of it."""

    causal: bool = False
    """A query sees no keys after its own position."""
    window: int | None = None
    """Number of keys before its own position that a query sees; None: all."""
    chunk: int | None = None
    """A query sees only the keys of its own chunk of this many positions; None: there are no chunks."""

    def pairs(self, tokens: Any) -> Any:
        """Pairs of a query and a key that it sees, in a document of so many tokens: a number, or an array of them."""
        if not self.causal:
            return tokens * tokens
        if self.chunk is not None:
            rest = tokens % self.chunk
            return tokens // self.chunk * (self.chunk * (self.chunk + 1) / 2) + rest * (rest + 1) / 2
        most = tokens
        if self.window is not None:  # the minimum of tokens and window + 1, for arrays too
            most = (tokens + self.window + 1 - abs(tokens - self.window - 1)) / 2
        return most * (most + 1) / 2 + (tokens - most) * most


class MultiplyAdds(NamedTuple):
    """Multiply-adds of a forward pass: of matmuls, scores, values and recurrences, without norms and softmax."""

    per_token: float
    per_pair: float = 0
    """Per pair of a query and a key that it sees."""
    visible: VisibleKeys = VisibleKeys()
    """Which pairs those are."""


@runtime_checkable
class CountedDifferently(Protocol):
    """A layer that Megatron-LM's throughput line counts in its own way."""

    def megatron_surplus(self, hidden: int) -> int:
        """Multiply-adds per token that it counts beyond `multiply_adds`; below 0: that it leaves out."""
        ...
