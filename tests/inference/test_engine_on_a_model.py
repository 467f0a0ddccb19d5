"""The engine on a tiny model: tokens of the trainer's forward under preemption, and no compile after the warm-up."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import CHUNK, loaded, programs_of, whole_logits
from test_engine import Client, demand_equal, serve
from test_programs import HEADS, LENGTH, MODELS, ROPE, VOCABULARY, decoder, padded

from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel
from megajax.inference.sampling.choose import Choosing
from megajax.inference.sampling.chooser import choosers
from megajax.models.decoder.config import DecoderConfig

LLAMA = decoder(replace(HEADS, rope=ROPE))
WINDOWS = decoder(replace(HEADS, rope=ROPE, window=5), replace(HEADS, rope=ROPE, window=3))


def device_of(model: LoadedModel, blocks: int, programs: Choosing) -> ModelDevice:
    """A device whose steps are compiled for the settings up to these."""
    compiled = programs_of(model, choosers(VOCABULARY)[: programs + 1], chunks=(0, CHUNK), blocks=blocks)
    assert len(list(compiled.compile())) == compiled.count == 2 + programs + 1
    return ModelDevice(compiled, VOCABULARY)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded(LLAMA, {})


@pytest.fixture(scope="module")
def full(llama: LoadedModel) -> ModelDevice:
    """A device for requests of all settings. Its engines begin with an empty cache."""
    return device_of(llama, 24, Choosing.FULL)


def demand_greedy(model: LoadedModel, clients: list[Client]) -> None:
    """Each token is the most likely one of a forward pass over the whole row, which is compiled for all rows."""
    rows = padded([*client.request.prompt, *client.answer.tokens] for client in clients)
    best = whole_logits(model, rows)[..., :VOCABULARY].argmax(-1)
    for row, client in zip(best, clients, strict=True):
        first = len(client.request.prompt) - 1
        assert row[first : first + len(client.answer.tokens)].tolist() == list(client.answer.tokens)
        assert client.answer.finish == "length" and first + len(client.answer.tokens) == LENGTH - 1


@pytest.mark.parametrize(
    ("cfg", "sizes"),
    [
        pytest.param(LLAMA, {}, id="llama"),
        pytest.param(LLAMA, {"data": 2, "tensor": 2}, id="replicas", marks=pytest.mark.slow),
    ],
)
def test_few_blocks_many_long_requests(cfg: DecoderConfig, sizes: dict[str, int], compiled: list[str]) -> None:
    """Rows are preempted and share prefixes: all have the tokens of a forward pass of the row alone."""
    model, replicas = loaded(cfg, sizes), sizes.get("data", 1)
    draw = np.random.default_rng(1)
    head = draw.integers(0, VOCABULARY, 9).tolist()
    prompts = [[*head, *draw.integers(0, VOCABULARY, draw.integers(1, 6)).tolist()] for _ in range(8 * replicas)]
    clients = [Client(prompt, max_tokens=LENGTH) for prompt in prompts]
    engine = Engine(device_of(model, 12, Choosing.GREEDY))
    assert compiled
    compiled.clear()
    serve(engine, *clients)
    assert compiled == []
    statistics = engine.statistics()
    assert statistics.preemptions_total > 3
    assert (statistics.shared_tokens_total > 30) == engine.device.prefix_sharing
    demand_greedy(model, clients)


def test_log_probabilities_of_listed_tokens(llama: LoadedModel, full: ModelDevice) -> None:
    """They are those of a forward pass at every token of an answer, in the order in which the tokens are listed."""
    listed = 249, 3, 77
    client = Client([5, 17, 200], max_tokens=3, temperature=0, logprobs=3, logprob_tokens=listed)
    serve(Engine(full), client)
    row = padded([[*client.request.prompt, *client.answer.tokens]])
    logprobs = jax.nn.log_softmax(whole_logits(llama, row)[0, :, :VOCABULARY])
    for place, score in enumerate(client.answer.scores, start=2):
        assert [token for token, _ in score.top] == list(listed)
        np.testing.assert_allclose([logprob for _, logprob in score.top], logprobs[place, list(listed)], atol=1e-4)


def test_rollouts_have_the_log_probabilities_of_the_trainer(llama: LoadedModel, full: ModelDevice) -> None:
    """Token ids in; tokens and log-probabilities of more answers than rows out, at a temperature."""
    prompt = [5, 17, 200, 3, 3, 91, 12]
    client = Client(prompt, max_tokens=8, temperature=1.3, top_p=0.9, seed=3, n=20, logprobs=0)
    engine = Engine(full)
    serve(engine, client)
    answers = client.answers()
    rows = padded([*prompt, *answer.tokens] for answer in answers)
    logprobs = np.asarray(jax.nn.log_softmax(whole_logits(llama, rows)[..., :VOCABULARY]))
    for row, answer, expected in zip(rows, answers, logprobs, strict=True):
        at = np.arange(len(prompt) - 1, len(prompt) + 7)
        np.testing.assert_allclose([score.logprob for score in answer.scores], expected[at, row[at + 1]], atol=1e-5)
        assert [score.token for score in answer.scores] == list(answer.tokens)
    assert len({answer.tokens for answer in answers}) > 10
    assert engine.statistics().prompt_tokens_total == 7 + 19 * 3


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("mamba 2", {}, id="mamba 2"),
        pytest.param("mamba 1", {"data": 2, "tensor": 2}, id="replicas", marks=pytest.mark.slow),
    ],
)
def test_prompts_that_begin_from_a_state(name: str, sizes: dict[str, int]) -> None:
    """The answers of an engine without snapshots, to equal prompts at the same time, and to prompts that part."""
    model, head = loaded(MODELS[name], sizes), [5, 17, 200, 3, 3, 91, 12, 8, 44]
    tails = [1, 2], [1, 2], [9, 7, 7, 7], [4], [9, 7, 7, 6], [1, 2, 3, 4, 5]
    prompts = [[*head, *tail] for tail in tails]
    answers = {}
    for snapshots in (0, 2):
        shared, choices = choosers(VOCABULARY), {"max_tokens": 6, "logprobs": 0}
        programs = programs_of(model, shared, chunks=(0, CHUNK), blocks=20, snapshots=snapshots)
        engine = Engine(ModelDevice(programs, VOCABULARY))
        clients = [Client(prompt, **choices) for prompt in prompts * 2]
        serve(engine, *clients)
        answers[snapshots] = clients
        assert (engine.statistics().shared_tokens_total > 40) == (snapshots > 0)
    demand_equal(answers[0], answers[2])


def test_blocks_behind_windows_are_freed() -> None:
    """Three rows of 32 tokens in nine blocks of 4: without windows they take 24."""
    model = loaded(WINDOWS, {})
    compiled = programs_of(model, choosers(VOCABULARY)[:1], chunks=(0, CHUNK), blocks=9)
    device = ModelDevice(compiled, VOCABULARY)
    assert device.window == 5
    assert ModelDevice(programs_of(loaded(MODELS["segments"], {}), (), blocks=9), VOCABULARY).window is None
    prompts = [[number, 7, *range(10 * number, 10 * number + 9)] for number in range(6)]
    clients = [Client(prompt, max_tokens=LENGTH) for prompt in prompts]
    engine = Engine(device)
    serve(engine, *clients)
    assert engine.statistics().preemptions_total == 0
    demand_greedy(model, clients)


def test_allowed_tokens_and_sequences_that_are_not(llama: LoadedModel, full: ModelDevice) -> None:
    """Each token is the most likely one of a forward pass among those that are left."""
    prompt = [5, 17, 200]

    def answer(**settings: Any) -> tuple[int, ...]:
        client = Client(prompt, max_tokens=9, temperature=0, ignore_eos=True, **settings)
        serve(Engine(full), client)
        return client.answer.tokens

    usual = answer()
    bad = (usual[:1], usual[2:4], usual[4:7], (1, 2, 3))
    allowed = tuple(range(0, VOCABULARY, 7))
    answers = answer(bad_tokens=bad), answer(allowed_tokens=allowed), answer(allowed_tokens=(9, 14), bad_tokens=((9,),))
    logits = whole_logits(llama, padded([*prompt, *tokens] for tokens in answers))[..., :VOCABULARY]
    for place in range(9):
        before = answers[0][:place]
        left = logits[0, 2 + place].copy()
        left[[tokens[-1] for tokens in bad if before[place + 1 - len(tokens) :] == tokens[:-1]]] = -np.inf
        assert answers[0][place] == left.argmax()
        assert answers[1][place] == max(allowed, key=lambda token: logits[1, 2 + place, token])
    assert answers[2] == (14,) * 9
    assert answers[0] != usual
