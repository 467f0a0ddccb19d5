"""Which tokens a text that follows a grammar may go on with.

The tokens' bytes form a trie, stored as arrays in breadth-first order. A mask walks it level by level, all branches at
once, and follows only those that the automaton allows. Masks are kept by the automaton's state.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megajax.inference.sampling.grammar import DEAD, Automaton, Grammar

MASKS = 4096
"""Masks that a guide keeps."""


class TokenTrie:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, pieces: Sequence[bytes | None]):
        """pieces: bytes of each token [V]; None or empty for those that stand for no text, which are never allowed."""
        self.pieces = tuple(pieces)
        lengths = np.asarray([len(piece or b"") for piece in pieces], np.int64)
        tokens = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
        text = np.frombuffer(b"".join(pieces[token] or b"" for token in tokens.tolist()), np.uint8)
        starts = np.cumsum(lengths[tokens]) - lengths[tokens]
        self.node = np.full(len(pieces), -1, np.int64)
        """Of each token."""
        values, firsts, counts = [np.zeros(1, np.uint8)], [], []
        above, nodes, size = np.zeros(len(tokens), np.int64), 1, 1
        for depth in range(int(lengths.max(initial=0))):
            # Tokens are sorted by length, so those that reach this depth come first.
            longer = int(np.count_nonzero(lengths[tokens] > depth))
            keys, inverse = np.unique(above[:longer] * 256 + text[starts[:longer] + depth], return_inverse=True)
            children = np.bincount(keys // 256 - (nodes - size), minlength=size)
            firsts.append(nodes + np.cumsum(children) - children)
            counts.append(children)
            values.append((keys % 256).astype(np.uint8))
            above = nodes + inverse
            ended = lengths[tokens[:longer]] == depth + 1
            self.node[tokens[:longer][ended]] = above[ended]
            nodes, size = nodes + len(keys), len(keys)
        firsts.append(np.zeros(size, np.int64))
        counts.append(np.zeros(size, np.int64))
        self.value, self.first, self.count = np.concatenate(values), np.concatenate(firsts), np.concatenate(counts)

    def reached(self, automaton: Automaton, state: int) -> np.ndarray:
        """bool [nodes]: whether the automaton can read the bytes that lead to a node, from this state."""
        out = np.zeros(len(self.value), bool)
        nodes, states = np.zeros(1, np.int64), np.full(1, state, np.int32)
        while len(nodes):
            counts = self.count[nodes]
            before = np.cumsum(counts) - counts
            children = np.repeat(self.first[nodes] - before, counts) + np.arange(counts.sum())
            states = automaton.step(np.repeat(states, counts), self.value[children])
            nodes, states = children[states != DEAD], states[states != DEAD]
            out[nodes] = True
        return out


class Guide:
    """A grammar for the tokens of a vocabulary. Shared by all rows with the same grammar."""

    def __init__(self, grammar: Grammar, trie: TokenTrie, ends: Collection[int]):
        """ends: tokens that end a text; they are allowed exactly where it is complete."""
        self.automaton, self.trie, self.ends = Automaton(grammar), trie, tuple(ends)
        self._masks: dict[int, np.ndarray] = {}

    def start(self) -> "Guided":
        """The state of an empty text."""
        return Guided(self, 0)

    def mask(self, state: int) -> np.ndarray:
        """uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 is set where token i is allowed."""
        if state not in self._masks:
            if len(self._masks) >= MASKS:
                self._masks.pop(next(iter(self._masks)))
            self._masks[state] = self._built(state)
        return self._masks[state]

    def _built(self, state: int) -> np.ndarray:
        node = self.trie.node
        allowed = np.zeros(-(-len(node) // 32) * 32, bool)
        allowed[: len(node)] = self.trie.reached(self.automaton, state)[node] & (node >= 0)
        allowed[list(self.ends)] = self.automaton.accepts(state)
        return np.packbits(allowed, bitorder="little").view("<u4")


@dataclass(frozen=True)
class Guided:
    """How far a row's text has followed its guide. Immutable, so that copies of rows share it."""

    guide: Guide
    state: int

    @cached_property
    def complete(self) -> bool:
        """Whether the text is a whole document."""
        return self.guide.automaton.accepts(self.state)

    @property
    def mask(self) -> np.ndarray:
        """Allowed next tokens, uint32 [ceil(V / 32)]."""
        return self.guide.mask(self.state)

    def after(self, token: int) -> "Guided":
        """With one token more; an end changes nothing. Raises ValueError for a token that the mask does not allow."""
        if token in self.guide.ends:
            return self
        state = self.guide.automaton.read(self.state, self.guide.trie.pieces[token] or b"")
        if state == DEAD:
            raise ValueError(f"token {token} does not follow the grammar")
        return Guided(self.guide, state)
