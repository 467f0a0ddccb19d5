"""Training with label smoothing and z-loss: gradients, metrics, and equality of all layouts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import (
    ONE,
    QUICK,
    VOCABULARY,
    assert_close,
    build_program,
    by_plain_differentiation,
    llama,
    place,
    rows,
    start,
    train,
    within,
)

from megajax.config.compose import problems_of
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import PredictionConfig

SMOOTHING, Z = 0.1, 1e-2
MODEL = replace(llama(), label_smoothing=SMOOTHING, z_loss=Z)


def token_terms(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """[B, S] each."""
    log_p, log_z = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, -1)
    at_label = jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    rest = SMOOTHING / (VOCABULARY - 1)
    smoothed = -(1 - SMOOTHING) * at_label - rest * (log_p.sum(-1) - at_label)
    return {"loss": -at_label, "smoothed_loss": smoothed, "z_loss": Z * log_z**2}


@pytest.mark.parametrize("average", ["tokens", pytest.param("microbatches", marks=pytest.mark.slow)])
def test_gradients_and_metrics_equal_those_of_a_plain_log_softmax(average):
    program = build_program(MODEL, ONE, microbatches=2, average=average, isolated=False)

    def plain(params, piece):
        model = bind(program.abstract, params)
        logits = model.logits(model.states(piece))
        terms = {name: jnp.sum(x * piece["loss_mask"]) for name, x in token_terms(logits, piece["labels"]).items()}
        share = 1 / jnp.sum(piece["loss_mask"]) if average == "microbatches" else 1.0
        return (terms["smoothed_loss"] + terms["z_loss"]) * share, terms

    with within(program):
        params, batch = start(program).params, place(program, rows())
        actual = jax.jit(program.grad_fn(), compiler_options=dict(QUICK))(params, batch, np.float32(4))
        (total, sums), gradients = by_plain_differentiation(plain, params, batch)
        evaluated = jax.device_get(program.eval_step(params, batch)["loss"])
    np.testing.assert_allclose(actual.loss_sum, total, rtol=1e-5)
    assert actual.metrics.keys() == sums.keys()
    for name, expected in sums.items():
        np.testing.assert_allclose(actual.metrics[name][0], expected, rtol=1e-5, err_msg=name)
        assert actual.metrics[name][1] == batch["loss_mask"].sum()
    np.testing.assert_allclose(evaluated[0], sums["loss"], rtol=1e-5)
    assert_close({path: gradient / 4 for path, gradient in actual.grads.items()}, gradients, tolerance=1e-4)


@pytest.mark.slow
def test_layouts_that_shard_the_vocabulary_have_the_same_losses():
    model = replace(MODEL, prediction=PredictionConfig(weight=0.3))
    parallel = ParallelConfig(pipeline=2, data=2, tensor=2, sequence=True)
    expected, actual = (train(model, layout, microbatches=3, steps=1, evaluated=False) for layout in (ONE, parallel))
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-5)
    assert_close(actual.gradients, expected.gradients, floor=1e-3)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"label_smoothing": 0.1, "vocabulary_size": 1}, "label_smoothing"),
        ({"z_loss": -1e-4}, "z_loss"),
        ({"z_loss": float("inf")}, "z_loss"),
    ],
)
def test_problems(changes, setting):
    assert [problem.setting for problem in problems_of(replace(llama(), **changes))] == [setting]
