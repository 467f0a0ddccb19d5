"""Five steps and all gradients on eight devices, in combinations of every dimension of a layout, against one device's.

`python -m benchmarks layouts --devices=cpu:8` prints the whole matrix.
"""

from itertools import chain

import jax
import numpy as np
import pytest
from combinations import COMBINATIONS, QUICKEST, TOLERANCE, Combination, difference, pairs, unseen
from tiny_runs import ONE, Trained, gpt, llama, train

from megajax.mesh.config import ParallelConfig


@pytest.fixture(autouse=True)
def small_memory():
    """Drops compiled programs, each of which is used once."""
    yield
    jax.clear_caches()


def compare(combination: Combination) -> None:
    actual = difference(combination.run(), combination.on_one_device())
    assert max(actual.loss, actual.norm, actual.gradient) <= TOLERANCE, actual
    assert actual.padding == 0, actual


@pytest.mark.parametrize("combination", QUICKEST, ids=lambda combination: combination.name)
def test_trains_like_one_device(combination: Combination) -> None:
    compare(combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c not in QUICKEST], ids=lambda c: c.name)
def test_every_pair_trains_like_one_device(combination: Combination) -> None:
    compare(combination)


def possible(first: tuple[str, object], second: tuple[str, object]) -> bool:
    """Whether a combination on eight devices can have these two values of two dimensions."""
    (a, x), (b, y) = sorted((first, second), key=lambda value: str(value[0]))
    sizes = {"pipeline", "data", "tensor", "context"}
    if {a, b} <= sizes:
        return x * y <= 8
    match a, x, b, y:
        case (_, _, "pipeline", 1):
            return a not in {"virtual stages", "schedule", "loss wait", "microbatches", "cut"}
        case ("pipeline", 1, _, _):
            return b not in {"virtual stages", "schedule", "loss wait", "microbatches", "cut"}
        # These need devices of data or context, and of tensor; without them they have no effect.
        case ("pipeline", 8, "sequence" | "sharding", _) | ("sequence", _, "tensor", 1):
            return False
        # Groups of devices of data have copies of what is sharded.
        case ("groups", _, "sharding", "replicate") | ("data", 1, "groups", _) | ("groups", _, "pipeline", 8):
            return False
        # 24 layers or more.
        case ("pipeline", 8, "virtual stages", 3):
            return False
        case ("recompute", "none", "sharding", "fsdp") | ("loss wait", _, "schedule", "gpipe"):
            return False
        case ("schedule", "interleaved", "virtual stages", 1) | ("schedule", "1f1b", "virtual stages", 2 | 3):
            return False
        case ("microbatches", "fewer than stages" | "uneven", "virtual stages", 2 | 3):
            return False
        case ("microbatches", "fewer than stages" | "uneven", "schedule", "interleaved"):
            return False
    return True


def test_any_two_values_occur_together() -> None:
    assert len(COMBINATIONS) >= 24
    assert len({combination.name for combination in COMBINATIONS}) == len(COMBINATIONS)
    occur = {frozenset(actual) for combination in COMBINATIONS for actual in pairs(combination)}
    values = sorted({value for combination in COMBINATIONS for value in combination.values.items()}, key=str)
    possible_pairs = {frozenset((a, b)) for a in values for b in values if a[0] < b[0] and possible(a, b)}
    assert possible_pairs - occur == set()
    assert occur - possible_pairs == set(), "possible() denies what there is"
    always = {value for combination in QUICKEST for value in combination.values.items()}
    assert always >= {("schedule", "gpipe"), ("schedule", "interleaved"), ("sharding", "zero1"), ("pipeline", 4)}
    assert always >= {("sequence", True), ("tied", True), ("tied", False), ("dropout", True)}


def test_training_uses_dropout_and_evaluation_does_not() -> None:
    """On one device, on the rows of the first step; test_layouts_train_alike.py has that evaluation has no dropout."""
    combination = next(combination for combination in QUICKEST if combination.model == "gpt")
    evaluated = train(gpt(repeats=combination.repeats), microbatches=4, steps=0, isolated=combination.isolated)
    assert combination.average == "tokens" and abs(evaluated.before / combination.on_one_device().losses[0] - 1) > 1e-5


def test_a_difference_is_detected() -> None:
    """This keeps the comparison above meaningful: one gradient's element, one loss, a padding row."""
    combination = next(combination for combination in QUICKEST if combination.model == "gpt")
    expected = combination.on_one_device()

    def but(**changes: object) -> Trained:
        return Trained(**{name: getattr(expected, name) for name in expected.__dataclass_fields__} | changes)

    for path in expected.gradients:
        perturbed = {name: g.copy() for name, g in expected.gradients.items()}
        perturbed[path].flat[np.abs(perturbed[path]).argmax()] *= 1 + 1e-4
        if path not in unseen(combination.config()):
            assert difference(but(gradients=perturbed), expected).weight == path
            assert difference(but(gradients=perturbed), expected).gradient > TOLERANCE
        perturbed[path].flat[0] = np.nan
        assert np.isnan(difference(but(gradients=perturbed), expected).gradient)
    assert difference(but(losses=expected.losses * np.array([1, 1, 1, 1, 1.0001])), expected).loss > TOLERANCE
    assert difference(expected, expected).gradient < TOLERANCE


def stages(count: int, *, data: int = 1, tensor: int = 1, **settings: object) -> ParallelConfig:
    return ParallelConfig(pipeline=count, data=data, tensor=tensor, **settings)


@pytest.mark.parametrize(
    ("model", "parallel", "microbatches"),
    [
        (gpt(repeats=5), stages(2, data=2, schedule="interleaved", virtual_stages=2, layers=(1, 2, 1, 1)), 6),
        pytest.param(llama(repeats=5), stages(4, tensor=2, sequence=True), 3, marks=pytest.mark.slow),
    ],
    ids=["interleaved-zero1-stated", "1f1b-sequence-uneven"],
)
def test_evaluates_like_one_device(model, parallel, microbatches) -> None:
    """Before any step, on two batches of rows."""
    actual, expected = (
        train(model, on, microbatches=count, steps=0) for on, count in ((parallel, microbatches), (ONE, 4))
    )
    assert actual.tokens == expected.tokens
    np.testing.assert_allclose([actual.before, actual.evaluation], [expected.before, expected.evaluation], rtol=1e-6)


@pytest.mark.slow
def test_bfloat16_computes_in_low_precision_on_a_layout() -> None:
    """At most as far from float32 as one device in bfloat16; the weights and their gradients stay float32."""
    parallel = stages(2, tensor=2, sequence=True, data=2, schedule="interleaved", virtual_stages=2, loss_wait=0)
    low, expected, exact = (
        train(llama(repeats=8), on, microbatches=4, compute=compute, evaluated=False)
        for on, compute in ((parallel, "bfloat16"), (ONE, "bfloat16"), (ONE, "float32"))
    )
    np.testing.assert_allclose(low.losses, expected.losses, rtol=2e-3)
    np.testing.assert_allclose(low.norms[0], exact.norms[0], rtol=2e-3)
    for path, g in exact.gradients.items():
        errors = [np.linalg.norm(run.gradients[path] - g) / np.linalg.norm(g) for run in (low, expected)]
        assert 1e-4 < errors[0] < 0.05, path
        assert errors[0] < 1.5 * errors[1], path
    assert {leaf.dtype for leaf in chain(low.gradients.values(), low.state.params.values())} == {np.dtype("float32")}
