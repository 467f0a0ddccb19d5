"""Every setting of a request at both edges of its limit."""

import math
from types import NoneType
from typing import Any

import pytest

from megajax.config.bounds import rules
from megajax.config.field_types import kinds
from megajax.inference.request import Sequence
from megajax.inference.sampling_settings import BIASES, NUMBERS, STOP_CHARACTERS, STOP_TOKENS, STOPS, Sampling


def wrong(**settings: Any) -> list[str]:
    return [problem.setting for problem in Sampling(**settings).problems()]


def alone(name: str, value: Any) -> dict[str, Any]:
    """The setting, with the settings that it requires."""
    beside: dict[str, Any] = {"min_tokens": {"max_tokens": 2**20}, "length_penalty": {"beams": 2}}
    return {**beside.get(name, {}), name: value}


@pytest.mark.parametrize("name", NUMBERS)
def test_both_edges_of_every_number(name: str) -> None:
    bounds: Any = next(rules(NUMBERS[name]))
    kind, step, more = (int, 1, 1) if int in kinds(NUMBERS[name]) else (float, 1e-9, 1e-6)
    least = max(bounds.at_least, bounds.above + step)
    beyond = (least - step, bounds.at_most + more)
    for value in (least, bounds.at_most, *beyond):
        assert wrong(**alone(name, kind(value))) == [name] * (value in beyond)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "5", [1], {}, math.nan, math.inf, -math.inf, 10**12, 10**400])
def test_other_types_and_nonfinite_numbers_are_refused(name: str, value: Any) -> None:
    if name == "seed" and value == 10**12:
        return
    assert wrong(**{name: value}) == [name]


@pytest.mark.parametrize("name", NUMBERS)
def test_only_optional_numbers_may_be_none(name: str) -> None:
    assert wrong(**{name: None}) == ([] if NoneType in kinds(NUMBERS[name]) else [name])


@pytest.mark.parametrize(
    ("name", "valid_value", "invalid_value"),
    [
        ("stop", ("a",) * STOPS, ("a",) * (STOPS + 1)),
        ("stop", ("a" * STOP_CHARACTERS,), ("a" * (STOP_CHARACTERS + 1),)),
        ("stop", (), ("",)),
        ("stop", ("a",), "a"),
        ("stop", ("a",), (1,)),
        ("stop_tokens", (0, 2**31 - 1), (-1,)),
        ("stop_tokens", (0,) * STOP_TOKENS, (0,) * (STOP_TOKENS + 1)),
        ("stop_tokens", (1,), (True,)),
        ("logprob_tokens", (), (0,) * 21),
        ("allowed_tokens", (0, 5), (-1,)),
        ("bad_tokens", ((0,) * 32,) * 128, ((0,),) * 129),
        ("bad_tokens", ((1, 2),), ((),)),
        ("bad_tokens", (), ((0,) * 33,)),
        ("bad_tokens", (), ((1, -1),)),
        ("logit_bias", {0: -100, 5: 100.0}, {0: 101}),
        ("logit_bias", dict.fromkeys(range(BIASES), 0.5), dict.fromkeys(range(BIASES + 1), 0.5)),
        ("logit_bias", {}, {"a": 1}),
        ("logit_bias", {}, {1: math.nan}),
        ("logit_bias", {}, [1]),
        ("ignore_eos", True, 1),
    ],
)
def test_invalid_numbers(name: str, valid_value: Any, invalid_value: Any) -> None:
    assert wrong(**{name: valid_value}) == []
    assert wrong(**{name: invalid_value}) == [name]


def test_settings_that_contradict_each_other() -> None:
    assert wrong(min_tokens=3, max_tokens=2) == ["min_tokens"]
    assert wrong(n=3, best_of=2) == ["best_of"]
    assert wrong(beams=4, best_of=4) == ["best_of"]
    assert wrong(beams=2, n=3) == ["n"]
    assert wrong(beams=3, n=3) == []
    unused: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    unused |= {"presence_penalty": 1.0, "logit_bias": {1: 1.0}, "guide": {}}
    assert wrong(beams=2, **unused) == list(unused)
    assert wrong(beams=2, temperature=0) == wrong(beams=2, temperature=1) == wrong(beams=2, length_penalty=0.5) == []
    assert wrong(length_penalty=0.5) == ["length_penalty"]
    assert wrong(guide={}, min_tokens=1, ignore_eos=True) == ["min_tokens", "ignore_eos"]
    assert wrong(guide={}, presence_penalty=1.0) == []
    assert wrong(logprob_tokens=(1, 2)) == wrong(logprob_tokens=(1, 2), logprobs=1) == ["logprob_tokens"]
    assert wrong(logprob_tokens=(1, 2), logprobs=2) == []


def test_messages_give_both_values_and_stay_short() -> None:
    (problem,) = Sampling(top_p=0).problems()
    assert str(problem) == "top_p: must be above 0 and at most 1, got 0"
    (problem,) = Sampling(max_tokens="9" * 10**6).problems()  # ty: ignore[invalid-argument-type]
    assert len(str(problem)) < 150


def test_bad_tokens() -> None:
    """What is forbidden depends on the last tokens of the answer, and never on the prompt."""
    sampling = Sampling(max_tokens=9, bad_tokens=((7,), (1, 2), (2, 3, 4)))
    row = Sequence(order=(0, 0), tokens=[1], limit=9, sampling=sampling)
    forbidden = [row.forbidden()]
    for token in (1, 2, 3, 4):
        row.tokens.append(token)
        forbidden.append(row.forbidden())
    assert forbidden == [{7}, {7, 2}, {7}, {7, 4}, {7}]
