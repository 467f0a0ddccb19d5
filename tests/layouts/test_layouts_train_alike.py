"""The same config has the same losses on every layout: with masked labels, isolated documents and dropout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, ROWS, VOCABULARY, Trained, differentiate, gpt, llama, rows, train

from megajax.mesh.config import ParallelConfig


def on(data: int, tensor: int, sharding: str = "zero1", *, sequence: bool = False) -> ParallelConfig:
    return ParallelConfig(data=data, tensor=tensor, data_sharding=sharding, sequence=sequence)


def name(value: object) -> str:
    if isinstance(value, ParallelConfig):
        sequence = "-sequence" if value.sequence else ""
        return f"data{value.data}-tensor{value.tensor}-{value.data_sharding}{sequence}"
    return str(value)


def assert_same_training(actual: Trained, expected: Trained, *, rtol: float = 1e-4, first: float = 1e-5) -> None:
    """Losses and gradient norms of every step, the first with smaller tolerances, and the evaluation after the last."""
    assert actual.tokens == expected.tokens
    assert_same_steps(actual, expected, rtol=rtol, first=first)
    np.testing.assert_allclose(actual.evaluation, expected.evaluation, rtol=rtol)


def assert_same_steps(actual: Trained, expected: Trained, *, rtol: float = 1e-4, first: float = 1e-5) -> None:
    for values, reference in ((actual.losses, expected.losses), (actual.norms, expected.norms)):
        np.testing.assert_allclose(values[0], reference[0], rtol=first)
        np.testing.assert_allclose(values, reference, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parallel", "microbatches"),
    [
        (gpt("selective"), on(2, 1, "replicate"), 2),
        (llama(), on(2, 2, "fsdp", sequence=True), 2),
        (gpt("selective"), on(4, 2), 1),
        (llama(), on(1, 2, sequence=True), 1),
    ],
    ids=name,
)
def test_evaluates_after_training_like_one_device(model, parallel, microbatches):
    """Every way to shard weights; test_layouts_matrix.py has any two settings of a layout, without evaluation."""
    assert_same_training(train(model, parallel, microbatches=microbatches), train(model, ONE, microbatches=4))


def test_the_run_learns_and_starts_at_the_expected_loss():
    """This keeps the comparisons above meaningful: losses change, and the first is that of uniform guessing."""
    actual = train(llama(), ONE, microbatches=4)
    assert abs(actual.losses[0] - np.log(VOCABULARY)) < 0.1
    assert actual.losses[2] < actual.losses[1] < actual.losses[0] - 0.05
    assert actual.tokens == rows(1)["loss_mask"].sum() < ROWS * LENGTH


PARTS = {"recompute": ("norm", "activation", "mlp"), "recompute_layers": 1, "offload": ("query_key_value", "residual")}
"""Of some layers, some of them in host memory."""
TOGETHER = {"recompute": "full", "layers_per_checkpoint": 2, "offload": ("input",)}
"""Two layers, their input in host memory."""
UNROLLED = {"recompute": "selective", "unroll": None}
PIPELINE = ParallelConfig(pipeline=2, data=1, tensor=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "parallel"),
    [(PARTS, ONE), (PARTS, PIPELINE), (TOGETHER, ONE), (TOGETHER, PIPELINE), (UNROLLED, PIPELINE)],
    ids=["parts", "parts, pipeline", "two layers together", "two layers together, pipeline", "no loop, pipeline"],
)
def test_saved_tensors_do_not_change_numbers(changes, parallel):
    model = llama("none", repeats=4)
    assert_same_training(train(replace(model, **changes), parallel, microbatches=4), train(model, ONE, microbatches=4))


def test_evaluation_is_the_training_loss_without_dropout():
    """test_layouts_matrix.py checks that training uses dropout."""
    plain = train(llama(), ONE, microbatches=4)
    np.testing.assert_allclose(plain.before, plain.losses[0], rtol=1e-6)
    dropped, undropped = (train(gpt(dropout=rate), ONE, microbatches=4, steps=0) for rate in (0.1, 0.0))
    assert dropped.before == undropped.before


def test_isolation_of_documents_has_an_effect():
    isolated, open_rows = (train(llama(), ONE, microbatches=4, steps=0, isolated=flag) for flag in (True, False))
    assert abs(open_rows.before / isolated.before - 1) > 1e-6


@pytest.mark.slow
def test_the_mean_of_microbatches_means_weighs_tokens_differently():
    """The reported loss is the tokens' mean either way; test_layouts_matrix.py has layouts with both averages."""
    means, tokens = (differentiate(llama(), microbatches=4, average=a) for a in ("microbatches", "tokens"))
    np.testing.assert_allclose(means.loss, tokens.loss, rtol=1e-6)
    norms = [np.sqrt(sum(np.square(g).sum() for g in run.gradients.values())) for run in (means, tokens)]
    assert abs(norms[0] / norms[1] - 1) > 1e-3


@pytest.mark.slow
def test_a_float32_residual_stream_passes_through_a_pipeline():
    model = replace(llama("selective", repeats=4), residual="float32")
    parallel = ParallelConfig(pipeline=2, data=1, tensor=2)
    staged, expected = (train(model, p, microbatches=4, compute="bfloat16") for p in (parallel, ONE))
    np.testing.assert_allclose(staged.losses, expected.losses, rtol=2e-3)
    low = train(replace(model, residual="compute"), ONE, microbatches=4, compute="bfloat16")
    assert not np.array_equal(low.losses, expected.losses)


def test_bfloat16_computes_in_low_precision_and_stores_in_high():
    """Before training; test_layouts_matrix.py has the steps."""
    low = train(llama(), ONE, microbatches=4, steps=0, compute="bfloat16")
    high = train(llama(), ONE, microbatches=4)
    np.testing.assert_allclose(low.before, high.before, rtol=2e-3)
    assert low.before != high.before
    state = low.program.state_like()
    arrays = jax.tree.leaves((state.params, [state.optimizer[name] for name in ("first_moment", "second_moment")]))
    assert {leaf.dtype for leaf in arrays} == {jnp.dtype("float32")}
