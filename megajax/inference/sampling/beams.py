"""Beam search over the most likely continuations of each row, on the host.

It follows `transformers` 5 (GenerationMixin._beam_search with early_stopping=False): which continuations are kept,
which finish, and when to stop. The device gives the most likely tokens of each running row. Rows are copied by
sharing the full blocks of the cache, so a copy recomputes at most one block.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Beam(NamedTuple):
    """A running answer."""

    tokens: tuple[int, ...]
    logprob: float
    """Sum over its tokens."""
    parent: int
    """Number of the running answer of the previous step that it extends."""


class Finished(NamedTuple):
    """An answer that has ended."""

    tokens: tuple[int, ...]
    """Includes the token that ended it, if any."""
    logprob: float
    """Sum over its tokens."""
    score: float
    """logprob / len(tokens) ** length_penalty."""


@dataclass(kw_only=True)
class BeamSearch:
    """The beam search of one prompt.

    It starts with a running answer without tokens. `advance` extends the running answers by the most likely tokens,
    until `complete`. The answers are `best(count)`.
    """

    beams: int
    limit: int
    """Maximum number of tokens of an answer."""
    end_tokens: frozenset[int]
    """Tokens that end an answer."""
    length_penalty: float = 1.0
    """Above 0, longer answers score higher."""
    running: list[Beam] = field(default_factory=lambda: [Beam((), 0.0, 0)])
    """The most likely first."""
    finished: list[Finished] = field(default_factory=list)
    """At most `beams`, the highest score first."""
    complete: bool = False

    @property
    def candidate_count(self) -> int:
        """Most likely tokens that `advance` needs of each row."""
        return candidates_of(self.beams, self.end_tokens)

    def advance(self, tops: Sequence[Sequence[tuple[int, float]]], forbidden: Collection[int] = ()) -> list[Beam]:
        """Extend the running answers by a token each, and return them; empty when the search is complete.

        tops: for each of `running`, at least `candidate_count` of its most likely tokens, or the whole vocabulary, with
        log-probabilities, in descending order; forbidden: tokens that may not be chosen now.
        """
        candidates = [
            Beam((*beam.tokens, token), beam.logprob + logprob, number)
            for number, (beam, top) in enumerate(zip(self.running, tops, strict=True))
            for token, logprob in top
            if token not in forbidden
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        candidates = candidates[: self.candidate_count]
        # Candidates after the first `beams` only replace ended ones; they may not finish themselves.
        self._finish([beam for beam in candidates[: self.beams] if self._has_ended(beam)])
        self.running = [beam for beam in candidates if not self._has_ended(beam)][: self.beams]
        self.complete = not self.running or not self._can_improve()
        self.running = [] if self.complete else self.running
        return self.running

    def best(self, count: int) -> list[Finished]:
        """The finished answers with the highest scores; at most `beams`."""
        return self.finished[:count]

    def _has_ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self.end_tokens or len(beam.tokens) >= self.limit

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.length_penalty

    def _finish(self, beams: Sequence[Beam]) -> None:
        ended = [Finished(beam.tokens, beam.logprob, self._score(beam.logprob, len(beam.tokens))) for beam in beams]
        self.finished = sorted([*self.finished, *ended], key=lambda answer: -answer.score)[: self.beams]

    def _can_improve(self) -> bool:
        """Whether fewer than `beams` answers have finished, or the best running one beats the worst finished one."""
        if len(self.finished) < self.beams:
            return True
        best = self.running[0]
        return self._score(best.logprob, len(best.tokens)) > self.finished[-1].score


def candidates_of(beams: int, end_tokens: Collection[int]) -> int:
    """Number of continuations considered in a step: enough to continue even if all end tokens are among them."""
    return max(2, 1 + len(end_tokens)) * beams
