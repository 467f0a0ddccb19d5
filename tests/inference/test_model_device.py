"""Rows of a scheduler on a tiny model: penalties, scores of prompts, seeds and constraints."""

import json
from collections import abc
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import CHUNK, loaded, programs_of
from test_engine import Client, serve
from test_programs import HEADS, ROPE, decoder

from megajax.inference.admission import AnswerRules
from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.programs import Programs
from megajax.inference.request import Sampled, Sequence, Step
from megajax.inference.sampling.choose import Choosing
from megajax.inference.sampling.chooser import RowChooser, choosers, program_of
from megajax.inference.sampling.guide import Guides
from megajax.inference.sampling_settings import Sampling
from megajax.inference.scheduler import BlockPool, Scheduler
from megajax.inference.step_arrays import Bucket
from megajax.layers.param import bind

VOCABULARY, LENGTH, BLOCK, ROWS = 250, 32, 4, 3
PIECES = [*(bytes((value,)) for value in range(128)), *[None] * (VOCABULARY - 128)]
END = 249


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded(decoder(replace(HEADS, rope=ROPE)), {})


@pytest.fixture(scope="module")
def forward(model: LoadedModel) -> Any:
    """Logits of whole rows by the trainer's forward, float64 [S, V]: at every length from one compiled shape."""

    run = jax.jit(lambda weights, tokens: bind(model.model, weights)(tokens))

    def logits(tokens: abc.Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(model.weights, padded))[0, : len(tokens)].astype(np.float64)

    return logits


@pytest.fixture(scope="module")
def programs(model: LoadedModel) -> Programs:
    return programs_of(model, choosers(VOCABULARY), blocks=18)


def row(order: int, tokens: abc.Sequence[int], answer_tokens: int, seed: int = 0, **settings: Any) -> Sequence:
    item = Sampling(max_tokens=answer_tokens, **settings)
    return Sequence(
        order=(order, 0),
        tokens=list(tokens),
        limit=len(tokens) + answer_tokens,
        sampling=item,
        seed=seed,
        end_tokens=frozenset({END}),
        unscored=item.prompt_logprobs is not None,
        top=item.logprobs,
    )


def generate(programs: Programs, rows: abc.Sequence[Sequence], blocks: int = 18) -> dict[int, list[Sampled]]:
    """Runs the rows to their limits; results of each answer's tokens, by the row's order."""
    device = ModelDevice(programs, VOCABULARY)
    scheduler = Scheduler(BlockPool(blocks, BLOCK), rows=ROWS, chunk=CHUNK, tile=CHUNK, prefix_sharing=True)
    results: dict[int, list[Sampled]] = {item.order[0]: [] for item in rows}
    for item in rows:
        scheduler.add(item)
    while (step := scheduler.next()) is not None:
        started = device.start([step])
        started.choose()
        for (item, computed), result in zip(step.parts(), started.results()[0], strict=True):
            item.awaited -= computed == len(item.tokens)
            if computed < len(item.tokens):
                results[item.order[0]] += [result] if result.prompt else []
                continue
            results[item.order[0]].append(result)
            item.tokens.append(result.token)
            item.unscored = False
            if len(item.tokens) >= item.limit or result.token in item.end_tokens:
                scheduler.remove(item)
    return results


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def penalised(x: np.ndarray, tokens: abc.Sequence[int], prompt: int, item: Sampling) -> np.ndarray:
    x = x.copy()
    for token in set(tokens):
        x[token] = x[token] / item.repetition_penalty if x[token] > 0 else x[token] * item.repetition_penalty
    for token in tokens[prompt:]:
        x[token] -= item.frequency_penalty
    for token in set(tokens[prompt:]):
        x[token] -= item.presence_penalty
    return x


def prompts() -> list[list[int]]:
    """Three with a common prefix, which share blocks."""
    draw = np.random.default_rng(3)
    head = draw.integers(0, 40, 9).tolist()
    return [[*head, *draw.integers(0, 40, count).tolist()] for count in (1, 8, 3)]


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "repetition_penalty": 1.7, "frequency_penalty": 0.9, "presence_penalty": 0.4, "logprobs": 3},
    {"temperature": 0, "prompt_logprobs": 2, "logit_bias": {7: 2.5}, "min_tokens": 5},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "logprobs": 0},
)


def test_rows_follow_their_settings(programs: Programs, forward: Any) -> None:
    """Greedy rows with penalties and biases, against the trainer's forward; prompts' scores beside them."""
    rows = [
        row(number, prompt, count, seed=11, **settings)
        for number, (prompt, count, settings) in enumerate(zip(prompts(), (10, 6, 9), SETTINGS, strict=True))
    ]
    results = generate(programs, rows)
    for item, settings in zip(rows[:2], SETTINGS, strict=False):
        logits = forward(item.tokens)
        answers = [result for result in results[item.order[0]] if result.token >= 0][-item.generated :]
        for place, result in zip(range(item.prompt, len(item.tokens)), answers, strict=True):
            x = logits[place - 1].copy()
            scores = log_softmax(x)
            for token, bias in item.sampling.logit_bias.items():
                x[token] += bias
            x[END] = -np.inf if place - item.prompt < item.sampling.min_tokens else x[END]
            token = int(penalised(x, item.tokens[:place], item.prompt, item.sampling).argmax())
            assert item.tokens[place] == result.token == token
            np.testing.assert_allclose(result.logprob, scores[token], atol=1e-4)
            if settings.get("logprobs"):
                assert result.rank == 1 + (scores > scores[token]).sum()
                assert [id for id, _ in result.top] == np.argsort(-scores)[:3].tolist()
    prompt = [score for result in results[1] for score in result.prompt]
    scores = log_softmax(forward(rows[1].tokens))
    assert [score.token for score in prompt] == rows[1].tokens[1 : rows[1].prompt]
    for place, score in enumerate(prompt):
        np.testing.assert_allclose(score.logprob, scores[place, score.token], atol=1e-4)
        assert score.rank == 1 + (scores[place] > scores[place, score.token]).sum()
        np.testing.assert_allclose([logprob for _, logprob in score.top], -np.sort(-scores[place])[:2], atol=1e-4)


def test_preempted_rows_have_the_tokens_of_rows_alone(programs: Programs) -> None:
    """Few blocks: rows are computed again, with their penalties and random numbers."""
    settings = {"temperature": 0.8, "presence_penalty": 1.5, "repetition_penalty": 1.2}
    alone, rows = (
        [row(number, prompt, 12, seed=number, **settings) for number, prompt in enumerate(prompts())] for _ in range(2)
    )
    for item in alone:
        generate(programs, [item])
    generate(programs, rows, blocks=9)
    assert sum(item.preempted for item in rows) > 0
    assert [item.tokens for item in rows] == [item.tokens for item in alone]


def test_a_guided_request_writes_a_document(programs: Programs) -> None:
    """The model knows nothing of JSON, and a request without a guide runs beside it."""
    values = {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": values, "required": ["a", "b"], "additionalProperties": False}
    guides = Guides(lambda: PIECES, [END])
    engine = Engine(ModelDevice(programs, VOCABULARY), AnswerRules(end_tokens=[END], guide=guides.start, seed=1))
    # Blanks are as likely as other tokens for this model, so they are penalised.
    bias = dict.fromkeys(b" \n\t\r", -30.0)
    settings = {"guide": schema, "temperature": 1, "logit_bias": bias, "max_tokens": 22, "ignore_eos": False}
    guided = [Client(prompts()[0], **settings) for _ in range(3)]
    second_client = Client(prompts()[1], max_tokens=8, logprobs=0)
    serve(engine, *guided, second_client)
    assert len(second_client.answer.tokens) == 8
    for client in guided:
        text = bytes(client.answer.tokens[:-1])
        document = json.loads(text)
        assert client.answer.finish == "stop" and client.answer.tokens[-1] == END
        assert list(document) == ["a", "b"] and document["a"] in (1, 22) and document["b"] in (True, False)


@pytest.mark.parametrize(
    ("settings", "program"),
    [
        ({"temperature": 0}, Choosing.GREEDY),
        ({"temperature": 0, "top_p": 0.5, "seed": 3}, Choosing.GREEDY),
        ({}, Choosing.SAMPLED),
        ({"logprobs": 0}, Choosing.SAMPLED),
        ({"logprobs": 1}, Choosing.FULL),
        ({"temperature": 0, "prompt_logprobs": 0}, Choosing.GREEDY),
        ({"repetition_penalty": 1.1}, Choosing.FULL),
        ({"presence_penalty": -0.1}, Choosing.FULL),
        ({"frequency_penalty": 0.1}, Choosing.FULL),
        ({"logit_bias": {3: 1.0}}, Choosing.FULL),
        ({"min_tokens": 1}, Choosing.FULL),
    ],
)
def test_the_first_program_that_supports_a_row(settings: dict[str, Any], program: Choosing) -> None:
    assert program_of(row(0, [1, 2], 4, **settings)) == program


def test_one_program_for_all_rows_if_steps_are_invariant() -> None:
    assert [chooser.program for chooser in choosers(9)] == [Choosing.GREEDY, Choosing.SAMPLED, Choosing.FULL]
    assert [chooser.program for chooser in choosers(9, invariant=True)] == [Choosing.FULL]


def test_largest_requests_fit_the_arrays() -> None:
    """512 biases and 64 stop tokens that may not come yet."""
    item = row(0, [1], 4, min_tokens=2, logit_bias=dict.fromkeys(range(512), 1.0))
    item.slot = 0
    item.end_tokens = frozenset(range(1000, 1066))
    inputs = RowChooser(Choosing.FULL, 2000).inputs([Step([(item, 0)], [])], Bucket(2))
    assert inputs.edits is not None
    assert (inputs.edits.tokens[0] >= 0).sum() == 512 + 66
    assert (inputs.edits.tokens[1] < 0).all()
