"""Losses, norms and every gradient on eight devices equal those of one device: the cases of tests/one_device.py.

`python -m benchmarks layouts --devices=cpu:8` prints how far each case is off.
"""

from dataclasses import replace
from itertools import combinations

import jax
import numpy as np
import pytest
from families import TOLERANCE
from one_device import QUICKEST, SLOW, Case, check, difference
from tiny_runs import LENGTH, ONE, ROWS, VOCABULARY, differentiate, gpt, llama, rows, train

DENSE = ("llama", "gpt")
"""Families whose cases have any two settings of a layout together."""


@pytest.fixture(autouse=True)
def small_memory():
    """Drops compiled programs, each of which is used once; results of one device stay."""
    yield
    jax.clear_caches()


@pytest.mark.parametrize("case", QUICKEST, ids=lambda case: case.line)
def test_a_case_equals_one_device(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.line)
def test_every_case_equals_one_device(case: Case) -> None:
    check(case)


IMPOSSIBLE = {
    frozenset(pair)
    for pair in (
        (("chunks", True), ("schedule", "1f1b")),
        (("chunks", True), ("microbatches", "fewer than stages")),
        (("chunks", True), ("microbatches", "uneven")),
        (("schedule", "interleaved"), ("microbatches", "fewer than stages")),
        (("schedule", "interleaved"), ("microbatches", "uneven")),
        (("schedule", "gpipe"), ("no wait", True)),
        # Groups of devices have copies of what is sharded.
        (("sharding", "replicate"), ("groups", True)),
    )
}
"""Settings that exclude each other."""


def test_any_two_settings_occur_together() -> None:
    cases = QUICKEST + SLOW
    assert len({case.line for case in cases}) == len(cases)
    dense = [case for case in cases if case.line.split()[0] in DENSE]
    occur = {frozenset(two) for case in dense for two in combinations(case.values.items(), 2)}
    values = {value for case in dense for value in case.values.items()}
    every = {frozenset((a, b)) for a, b in combinations(values, 2) if a[0] != b[0]}
    assert every - occur == IMPOSSIBLE
    always = {value for case in dense if case in QUICKEST for value in case.values.items()}
    assert always >= {("schedule", "gpipe"), ("schedule", "interleaved"), ("sharding", "zero1"), ("stages", 3)}
    assert always >= {("sequence", True), ("gpt", True), ("means", True), ("open", True)}


def test_a_difference_is_detected() -> None:
    """This keeps the comparison meaningful: one element of one gradient, one loss, a padding row, a count."""
    case = next(case for case in QUICKEST if case.line.startswith("gpt"))
    expected, family = case.on_one_device(), case.family
    assert not difference(expected, expected, family).problems(family)
    for path in expected.gradients:
        perturbed = {name: g.copy() for name, g in expected.gradients.items()}
        perturbed[path].flat[np.abs(perturbed[path]).argmax()] *= 1 + 1e-4
        off = difference(replace(expected, gradients=perturbed), expected, family)
        if not path.endswith(family.unseen):
            assert off.weight == path and off.problems(family).keys() == {"gradient"}
        perturbed[path].flat[0] = np.nan
        off = difference(replace(expected, gradients=perturbed), expected, family)
        assert off.weight == path and off.problems(family).keys() == {"gradient"}
    for changed, name in (
        (replace(expected, means={**expected.means, "loss": expected.loss * 1.0001}), "loss"),
        (replace(expected, norm=np.nan), "norm"),
        (replace(expected, padding=1e-30), "padding"),
    ):
        assert name in difference(changed, expected, family).problems(family)
    count = {"load.sum": np.array([3.0, 4.0])}
    counted = replace(expected, observed=count), replace(expected, observed={"load.sum": np.array([3.0, 5.0])})
    assert difference(*counted, family).problems(family).keys() == {"observed"}


def test_the_run_learns_and_starts_at_the_expected_loss() -> None:
    """This keeps the comparisons meaningful: losses change, and the first is that of uniform guessing."""
    actual = train(llama(), microbatches=4)
    assert abs(actual.losses[0] - np.log(VOCABULARY)) < 0.1
    np.testing.assert_allclose(actual.before, actual.losses[0], rtol=1e-6)
    assert actual.losses[2] < actual.losses[1] < actual.losses[0] - 0.05
    assert actual.tokens == rows(1)["loss_mask"].sum() < ROWS * LENGTH


@pytest.mark.slow
def test_evaluation_is_the_training_loss_without_dropout() -> None:
    case = next(case for case in QUICKEST if case.line.startswith("gpt"))
    assert "open" in case.words, "as is evaluated here"
    dropped, undropped = (
        train(gpt(repeats=8, dropout=rate), ONE, microbatches=4, steps=0, isolated=False) for rate in (0.1, 0.0)
    )
    assert dropped.before == undropped.before
    assert abs(dropped.before / case.on_one_device().losses[0] - 1) > TOLERANCE, "training has dropout"


@pytest.mark.slow
def test_the_mean_of_microbatches_means_weighs_tokens_differently() -> None:
    """The reported loss is the tokens' mean either way."""
    means, tokens = (differentiate(llama(), microbatches=4, average=a) for a in ("microbatches", "tokens"))
    np.testing.assert_allclose(means.loss, tokens.loss, rtol=1e-6)
    assert abs(means.norm / tokens.norm - 1) > 1e-3


@pytest.mark.slow
def test_a_float32_residual_stream_has_an_effect() -> None:
    losses = [
        train(replace(llama(), residual=residual), microbatches=4, compute="bfloat16", evaluated=False).losses
        for residual in ("float32", "compute")
    ]
    assert not np.array_equal(*losses)


@pytest.mark.slow
def test_adapters_alone_have_gradients_and_reduce_the_loss() -> None:
    actual = Case("lora steps=3").on_one_device()
    assert actual.losses[-1] < actual.losses[0]
    for family in ("lora", "dora", "lora-experts"):
        gradients = Case(family).on_one_device().gradients
        assert all(".lora_" in path and gradient.any() for path, gradient in gradients.items())
