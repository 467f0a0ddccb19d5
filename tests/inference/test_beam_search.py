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


def test_one_beam_is_greedy() -> None:
    for seed in range(20):
        model, tokens = Table(seed), ()
        while len(tokens) < LIMIT and END not in tokens:
            tokens = (*tokens, int(model(tokens).argmax()))
        best = search(model, BeamSearch(beams=1, limit=LIMIT, end_tokens=frozenset({END}))).best(1)
        assert best[0].tokens == tokens


def test_forbidden_end_tokens_are_not_chosen() -> None:
    for seed in range(10):
        result = search(Table(seed), BeamSearch(beams=2, limit=LIMIT, end_tokens=frozenset({END})), forbidden_until=2)
        assert all(len(answer.tokens) > 2 and END not in answer.tokens[:2] for answer in result.finished)


def test_answers_equal_those_of_transformers() -> None:
    """32 settings on a model that is a table of the last two tokens. Neither library is among our dependencies."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ids, limit = 40, 10

    class Model(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.PretrainedConfig
        main_input_name = "input_ids"

        def __init__(self, table: np.ndarray):
            super().__init__(transformers.PretrainedConfig(vocab_size=ids, is_encoder_decoder=False))
            self.table = torch.nn.Parameter(torch.tensor(table, dtype=torch.float32))

        def forward(self, input_ids: object, **_: object) -> object:
            logits = self.table[input_ids] + self.table.roll(1, 0)[torch.roll(input_ids, 1, -1)]
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)

        def prepare_inputs_for_generation(self, input_ids: object, **_: object) -> dict:
            return {"input_ids": input_ids}

    settings = itertools.product((2, 4), (0.0, 0.6, 1.0, 2.0), ((0,), (0, 5)), (0, 3))
    for number, (beams, penalty, end_tokens, least) in enumerate(settings):
        table = np.random.default_rng(number).normal(size=(ids, ids)) * 1.3
        table[:, list(end_tokens)] += 1.5
        model = Model(table)
        prompt = torch.tensor([[3, 7]])
        out = model.generate(
            prompt, num_beams=beams, num_return_sequences=beams, max_new_tokens=limit, do_sample=False, use_cache=False,
            length_penalty=penalty, early_stopping=False, eos_token_id=list(end_tokens), pad_token_id=end_tokens[0],
            min_new_tokens=least or None, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip

        def top(tokens: tuple[int, ...], count: int, model: Model = model) -> list[tuple[int, float]]:
            with torch.no_grad():
                logits = model(torch.tensor([[3, 7, *tokens]])).logits[0, -1]
            values, order = torch.log_softmax(logits, -1).topk(count)
            return list(zip(order.tolist(), values.tolist(), strict=True))

        search = BeamSearch(beams=beams, limit=limit, end_tokens=frozenset(end_tokens), length_penalty=penalty)
        while not search.complete:
            forbidden = search.end_tokens if len(search.running[0].tokens) < least else ()
            search.advance([top(beam.tokens, search.candidate_count) for beam in search.running], forbidden)
        for row, score, answer in zip(out.sequences, out.sequences_scores, search.best(beams), strict=True):
            theirs = row[2:].tolist()
            assert tuple(theirs[: len(answer.tokens)]) == answer.tokens, (number, theirs, answer)
            assert math.isclose(float(score), answer.score, rel_tol=1e-4)
