"""Steps that start before the tokens of the previous one are known: the same answers as without."""

import random
from typing import Any

import numpy as np
import pytest
from compiled_steps import CHUNK, loaded, programs_of
from stand_in import StandIn, at_once, check, expected
from started_step import StandInStep
from test_engine import Client
from test_programs import LENGTH, MODELS, VOCABULARY

from megajax.inference.admission import AnswerRules
from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.request import Output
from megajax.inference.sampling.choose import Choosing
from megajax.inference.sampling.chooser import RowChooser, choosers


class Noted(StandIn):
    """Writes down what is called."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.calls: list[str] = []

    def start(self, work: Any) -> Any:
        step, number, calls = super().start(work), self.steps, self.calls
        calls.append(f"start {number}")

        class Step(StandInStep):
            def choose(self) -> None:
                calls.append(f"choose {number}")
                step.choose()

            def results(self) -> Any:
                calls.append(f"results {number}")
                return step.results()

        return Step(list)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_starts_before_the_results_of_the_previous_one(ahead: bool) -> None:
    device = Noted()
    engine = Engine(device, look_ahead=ahead)
    client = Client([1, 2], max_tokens=3)
    engine.submit(client.request)
    while engine.step():
        pass
    first, second, third = ([f"{call} {number}" for call in ("start", "choose", "results")] for number in (1, 2, 3))
    interleaved = [*first[:2], second[0], first[2], second[1], third[0], second[2], *third[1:]]
    # The last token is known to be the last one: no further step.
    assert device.calls == (interleaved if ahead else [*first, *second, *third])
    assert client.answer.finish == "length" and engine.statistics().steps_total == 3


def test_a_text_that_ends_early_costs_one_row_of_a_step() -> None:
    (alone,) = answers_of(StandIn(), [Client([1, 2], max_tokens=9)], ahead=False)
    device = StandIn()
    engine, client = Engine(device), Client([1, 2], max_tokens=9, stop_tokens=(alone.tokens[3],))
    engine.submit(client.request)
    while engine.step():
        check(engine.schedulers[0])
    assert client.answer.tokens == alone.tokens[:4] and client.answer.finish == "stop"
    assert device.steps == 5 and not engine.schedulers[0].pool.used


@pytest.mark.parametrize("seed", range(6))
def test_the_answers_of_random_loads_are_those_without_it(seed: int) -> None:
    """Few blocks, so that rows are preempted while their tokens are awaited; stop tokens, cancellations, beams."""
    settings: dict[str, Any] = {"rows": 4, "blocks": 12, "block": 4, "length": 40, "replicas": 1 + seed % 2}
    settings |= {"window": 5} if seed % 3 == 0 else {}
    requests = [clients(seed) for _ in range(2)]
    answers = [
        answers_of(StandIn(**settings), asked, ahead=ahead, seed=seed)
        for asked, ahead in zip(requests, (False, True), strict=True)
    ]
    assert answers[0] == answers[1] and len(answers[0]) > 20
    assert {answer.finish for answer in answers[0]} == {"stop", "length"}
    for client in requests[1]:
        if client.request.sampling.temperature == 0 and client.request.sampling.beams == 1:
            (first, *_), prompt = client.answers(), client.request.prompt
            assert list(first.tokens) == expected(prompt, len(first.tokens)), "requests do not change each other"


def clients(seed: int) -> list[Client]:
    draw, clients = random.Random(seed), []
    for _ in range(16):
        prompt = [draw.randrange(50) for _ in range(draw.randrange(1, 12))] if draw.random() < 0.7 else [5] * 9
        kind = draw.choice(
            [{}, {"temperature": 1.0}, {"beams": 2, "n": 2}, {"n": 3, "temperature": 1.0, "best_of": 4}, {"n": 2}]
        )
        stops = tuple(draw.sample(range(50), 3))
        clients.append(
            Client(prompt, max_tokens=draw.randrange(1, 25), seed=draw.randrange(99), stop_tokens=stops, **kind)
        )
    return clients


def answers_of(
    device: Any, clients: list[Client], *, ahead: bool, seed: int = 0, rules: AnswerRules | None = None
) -> list[Output]:
    """The answers to clients that come one after another, some of them beside one that is cancelled."""
    engine, draw, waiting = Engine(device, rules, look_ahead=ahead, queue=99), random.Random(seed), list(clients)
    while waiting or engine.requests:
        if waiting and draw.random() < 0.5:
            engine.submit(waiting.pop(0).request)
        if waiting and draw.random() < 0.1:
            cancelled = Client([3, 4, 5], max_tokens=20)
            engine.submit(cancelled.request)
            engine.step()
            engine.cancel(cancelled.request.identifier)
        engine.step()
        for scheduler in engine.schedulers:
            check(scheduler)
    assert not any(scheduler.pool.used for scheduler in engine.schedulers)
    return [answer._replace(shared=0, admitted=None) for client in clients for answer in client.answers()]


class Alternating:
    """A constraint: even tokens after odd ones, and odd ones after even ones."""

    def __init__(self, even: bool = True):
        self.even = even

    @property
    def mask(self) -> np.ndarray:
        return np.full(-(-VOCABULARY // 32), 0x55555555 if self.even else 0xAAAAAAAA, np.uint32)

    def after(self, token: int) -> "Alternating":
        assert token % 2 == (not self.even)
        return Alternating(not self.even)


@pytest.mark.parametrize(
    ("name", "tile", "sizes"),
    [
        pytest.param("llama", 4, {}, id="llama"),
        pytest.param("mamba 2", CHUNK, {}, id="mamba", marks=pytest.mark.slow),
        pytest.param("llama", 4, {"data": 2, "tensor": 2}, id="replicas", marks=pytest.mark.slow),
    ],
)
def test_a_model_continues_tokens_that_only_the_device_knows(name: str, tile: int, sizes: dict[str, int]) -> None:
    """Greedy and sampled rows, penalties, log-probabilities, guides, prompts in tiles, and preemption."""
    every: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 4},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 2},
        {"guide": {}, "ignore_eos": False},
        {"min_tokens": 5, "temperature": 0.7, "seed": 2, "top_k": 7},
        {"prompt_logprobs": 1},
    ]
    model, answers = loaded(MODELS[name], sizes), []
    compiled = programs_of(model, choosers(VOCABULARY, invariant=True), chunks=(CHUNK,), tile=tile, blocks=12)
    for ahead in (False, True):
        draw = np.random.default_rng(0)
        clients = [
            Client(draw.integers(0, VOCABULARY, 3 + 2 * number).tolist(), max_tokens=LENGTH, **settings)
            for number, settings in enumerate(every)
        ]
        device = ModelDevice(compiled, VOCABULARY)
        answers.append(
            answers_of(device, clients, ahead=ahead, rules=AnswerRules(guide=lambda guide: at_once(Alternating())))
        )
    assert all(isinstance(chooser, RowChooser) and chooser.program == Choosing.FULL for chooser in compiled.choosers)
    for before, after in zip(*answers, strict=True):
        assert before.tokens == after.tokens and len(before.tokens) > 5
        np.testing.assert_allclose(
            [score.logprob for score in before.scores], [score.logprob for score in after.scores], atol=1e-5
        )
