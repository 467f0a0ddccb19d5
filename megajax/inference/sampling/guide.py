"""Which tokens a text that follows a grammar may go on with.

The tokens' bytes form a trie, stored as arrays in breadth-first order. A mask walks it level by level, all branches at
once, and follows only those that the automaton allows. Masks are kept by the automaton's state.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from megajax.config.errors import UserError
from megajax.inference.sampling.grammar import DEAD, STATES, Automaton, Grammar
from megajax.inference.sampling.json_schema import schema_grammar
from megajax.inference.sampling.regular_expression import regular_expression
from megajax.tokenizers.base import Tokenizer

MASKS, GUIDES = 512, 32
"""Masks that a guide keeps, and guides that are kept."""


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
        self._lock = Lock()

    def at(self, state: int) -> "Guided":
        """The state of a text; 0: of an empty one. Raises UserError if the grammar is too large (see `Automaton`)."""
        # A server checks requests in its own thread.
        with self._lock:
            return Guided(self, state, self._mask(state))

    def read(self, state: int, token: int) -> int:
        """The state after another token. Raises ValueError for one that is impossible, UserError as `at`."""
        with self._lock:
            after = self.automaton.read(state, self.trie.pieces[token] or b"")
        if after == DEAD:
            raise ValueError(f"token {token} does not follow the grammar")
        return after

    def _mask(self, state: int) -> np.ndarray:
        mask = self._masks.pop(state, None)
        if len(self._masks) >= MASKS:
            self._masks.pop(next(iter(self._masks)))
        # The last ones that were used are kept.
        self._masks[state] = self._built(state) if mask is None else mask
        return self._masks[state]

    def _built(self, state: int) -> np.ndarray:
        node = self.trie.node
        allowed = np.zeros(-(-len(node) // 32) * 32, bool)
        allowed[: len(node)] = self.trie.reached(self.automaton, state)[node] & (node >= 0)
        allowed[list(self.ends)] = self.automaton.accepts(state)
        return np.packbits(allowed, bitorder="little").view("<u4")


@dataclass(frozen=True, slots=True)
class Guided:
    """How far a row's text has followed its guide. Immutable, so that copies of rows share it."""

    guide: Guide
    state: int
    mask: np.ndarray
    """Allowed next tokens, uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 is set where token i is allowed."""

    @property
    def complete(self) -> bool:
        """Whether the text is a whole document."""
        return self.guide.automaton.accepts(self.state)

    def after(self, token: int) -> "Guided":
        """With one token more; an end changes nothing.

        Raises ValueError for a token that the mask does not allow, UserError as `Guide.at`.
        """
        if token in self.guide.ends:
            return self
        return self.guide.at(self.guide.read(self.state, token))


class Guides:
    """Makes the guides of requests: `Engine(guide=Guides(...))`."""

    def __init__(self, pieces: Callable[[], Sequence[bytes | None]], ends: Collection[int]):
        """pieces: gives those of the vocabulary, for a `TokenTrie`. ends: tokens that end a text."""
        self._pieces, self._ends = pieces, ends
        self._guides: dict[str, Guide] = {}

    @cached_property
    def _trie(self) -> TokenTrie:
        return TokenTrie(self._pieces())

    def __call__(self, guide: Any) -> Guided:
        """The state of an empty text. guide: a JSON schema, or a regular expression as a string.

        Raises UserError for one that is malformed, or not supported.
        """
        try:
            key = json.dumps(guide)
            kept = self._guides.pop(key, None)
            if kept is None or kept.automaton.states > STATES // 4:
                grammar = regular_expression(guide) if isinstance(guide, str) else schema_grammar(guide)
                kept = Guide(grammar, self._trie, self._ends)
        except RecursionError:
            raise UserError("the guide is nested too deeply") from None
        except UnicodeEncodeError:
            raise UserError("the guide has half of a surrogate pair, which is not a character") from None
        except TypeError as error:
            raise UserError(f"the guide is neither a JSON schema nor a regular expression: {error}") from None
        while len(self._guides) >= GUIDES:
            self._guides.pop(next(iter(self._guides)))
        self._guides[key] = kept
        return kept.at(0)


def token_pieces(tokenizer: Tokenizer, vocabulary: int) -> list[bytes | None]:
    """The bytes of each token below `vocabulary`; None for those that stand for no text, or not for whole characters.

    Of a tokenizer without a table of bytes, a token's text is what it adds behind a letter.
    """
    special = {tokenizer.eod, tokenizer.pad, *tokenizer.specials.values(), *tokenizer.sentinels}
    known = range(min(vocabulary, tokenizer.vocabulary_size))
    if tokenizer.table:
        pieces = [None if token in special else tokenizer.table[token] for token in known]
    else:
        before = tokenizer.encode("a").tolist()
        start = tokenizer.decode(before)
        pieces = [None if token in special else _added(tokenizer, before, start, token) for token in known]
    return [*pieces, *[None] * (vocabulary - len(pieces))]


def _added(tokenizer: Tokenizer, before: Sequence[int], start: str, token: int) -> bytes | None:
    try:
        text = tokenizer.decode([*before, token])
    except UserError:
        return None
    added = text[len(start) :] if text.startswith(start) else ""
    return None if not added or "\N{REPLACEMENT CHARACTER}" in added else added.encode()
