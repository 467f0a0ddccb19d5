"""Beam search against all answers of a tiny vocabulary, and against `transformers` if it is installed."""

import itertools
import math

import numpy as np
import pytest

from megajax.inference.sampling.beams import BeamSearch

IDS, LIMIT, END = 4, 4, 0


class Table:
    """A model as a table: log-probabilities after each text of up to LIMIT tokens."""

    def __init__(self, seed: int, ids: int = IDS):
        self.generator, self.ids, self.rows = np.random.default_rng(seed), ids, {}

    def __call__(self, tokens: tuple[int, ...]) -> np.ndarray:
        if tokens not in self.rows:
            x = self.generator.normal(size=self.ids) * 1.5
            self.rows[tokens] = x - np.log(np.exp(x).sum())
        return self.rows[tokens]

    def top(self, tokens: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        row = self(tokens)
        return [(token, float(row[token])) for token in np.argsort(-row, kind="stable")[:count].tolist()]


def search(model: Table, search: BeamSearch, forbidden_until: int = 0) -> BeamSearch:
    while not search.complete:
        forbidden = search.end_tokens if len(search.running[0].tokens) < forbidden_until else ()
        before = search.running
        after = search.advance([model.top(beam.tokens, search.candidate_count) for beam in before], forbidden)
        assert all(beam.tokens[:-1] == before[beam.parent].tokens for beam in after)
    return search


def answers(model: Table, length_penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """All complete answers, by their scores."""
    every = []
    for length in range(1, LIMIT + 1):
        for tokens in itertools.product(range(IDS), repeat=length):
            if END in tokens[:-1] or (length < LIMIT and tokens[-1] != END):
                continue
            total = sum(model(tokens[:place])[token] for place, token in enumerate(tokens))
            every.append((total / length**length_penalty, tokens))
    return sorted(every, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0, 2.0])
def test_a_beam_of_all_answers_finds_the_best_ones(length_penalty: float) -> None:
    """There are as many beams as texts, so none is ever dropped."""
    for seed in range(10):
        model = Table(seed)
        wide = BeamSearch(beams=IDS**LIMIT, limit=LIMIT, end_tokens=frozenset({END}), length_penalty=length_penalty)
        best = search(model, wide).best(3)
        for answer, (score, tokens) in zip(best, answers(model, length_penalty), strict=False):
            assert answer.tokens == tokens
            assert math.isclose(answer.score, score, rel_tol=1e-12)


def test_forbidden_end_tokens_are_not_chosen() -> None:
    for seed in range(10):
        result = search(Table(seed), BeamSearch(beams=2, limit=LIMIT, end_tokens=frozenset({END})), forbidden_until=2)
        assert all(len(answer.tokens) > 2 and END not in answer.tokens[:2] for answer in result.finished)
