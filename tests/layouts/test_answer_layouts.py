"""Losses of whole answers and of distillation: gradients equal those of plain formulas on whole logits.

tests/one_device.py has layouts.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoders import DISTILLATION, OBJECTIVES, TEACHER, answering, answers, distilled, moe, replaying
from tiny_runs import (
    ONE,
    QUICK,
    assert_close,
    build_program,
    by_plain_differentiation,
    llama,
    place,
    rows,
    start,
    within,
)

from megajax.interop.weights.model_differences import differences
from megajax.layers.moe.config import CapacityConfig, RouterConfig
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.models.answers.config import with_objective
from megajax.models.answers.objectives import TokenObjective

DPO = OBJECTIVES["dpo"]


@pytest.mark.parametrize("objective", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_gradients_equal_those_of_a_plain_log_softmax(objective: str) -> None:
    """The plain gradients go through the objective and the whole logits, without a second pass of the head."""
    program = build_program(answering(OBJECTIVES[objective], repeats=1), ONE, microbatches=2)

    def plain(params, piece):
        module = bind(program.abstract, params)
        logits = module.logits(module.states(piece))
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), piece["labels"][..., None], -1)[..., 0]
        token = isinstance(module.objective, TokenObjective)
        entropy = jnp.sum(jax.scipy.special.entr(jax.nn.softmax(logits)), axis=-1)
        terms = module.objective(log_p, {**piece, "entropy": entropy} if token else piece)
        return terms.loss, terms

    with within(program):
        params, batch = start(program).params, place(program, answers(0))
        actual = jax.jit(program.grad_fn(), compiler_options=dict(QUICK))(params, batch, np.float32(4))
        (total, terms), gradients = by_plain_differentiation(plain, params, batch)
        evaluated = jax.device_get(program.eval_step(params, batch))
    np.testing.assert_allclose(actual.loss_sum, total, rtol=1e-5)
    assert actual.weight_sum == terms.weight
    assert actual.metrics.keys() == terms.metrics.keys() == evaluated.keys()
    for name, (expected, count) in terms.metrics.items():
        for sums in (actual.metrics[name], evaluated[name]):
            np.testing.assert_allclose(sums, (expected, count), rtol=1e-4, atol=1e-4, err_msg=name)
    assert_close({path: gradient / 4 for path, gradient in actual.grads.items()}, gradients, tolerance=1e-4)


@pytest.mark.parametrize(
    ("changes", "setting"), [({"label_smoothing": 0.1}, "label_smoothing"), ({"z_loss": 1e-4}, "z_loss")]
)
def test_problems(changes: dict[str, float], setting: str) -> None:
    problems = replace(answering(DPO), **changes).problems()
    assert [problem.setting for problem in problems] == [setting]


@pytest.mark.parametrize(
    ("routed", "setting"),
    [
        (RouterConfig(), None),
        (RouterConfig(capacity=CapacityConfig(factor=1.5)), "stack.pattern.0.mlp.router.capacity"),
        (RouterConfig(sinkhorn=True), "stack.pattern.0.mlp.router.sinkhorn"),
        (RouterConfig(force_balance=True), "stack.pattern.0.mlp.router.force_balance"),
        (None, "objective.router_replay"),
    ],
)
def test_routers_whose_choice_cannot_be_given(routed: RouterConfig | None, setting: str | None) -> None:
    model = with_objective(llama() if routed is None else moe(routed), replaying().objective)
    assert [problem.setting for problem in model.problems()] == [setting] * (setting is not None)
    assert ("experts" in model.schema()) and (routed is None) == (len(model.cache_leaves(1)) == 2)


def test_the_model_computes_the_same_as_without_the_objective() -> None:
    """So it starts from the weights of other models, and is exported as they are."""
    assert differences(answering(DPO), replace(llama(), logit_cap=5.0)) == []


@pytest.mark.slow
def test_gradients_equal_those_of_whole_logits() -> None:
    program = build_program(distilled(), ONE, microbatches=2)

    def plain(params, piece):
        module = bind(program.abstract, params)

        def logits(decoder):
            return decoder.logits(decoder.states(piece))

        student, teacher = logits(module), jax.lax.stop_gradient(logits(module.teacher))
        log_q, log_p = (jax.nn.log_softmax(z / DISTILLATION.temperature) for z in (student, teacher))
        p, q, b = jnp.exp(log_p), jnp.exp(log_q), DISTILLATION.mixture
        log_m = jnp.log(b * p + (1 - b) * q)
        divergence = (b * p * (log_p - log_m) + (1 - b) * q * (log_q - log_m)).sum(-1)
        entropy = -jnp.take_along_axis(jax.nn.log_softmax(student), piece["labels"][..., None], -1)[..., 0]
        losses = DISTILLATION.weight * divergence + DISTILLATION.label_weight * entropy
        mask = piece["loss_mask"]
        return (losses * mask).sum(), {"loss": (entropy * mask).sum(), "divergence": (divergence * mask).sum()}

    with within(program):
        params, batch = start(program).params, place(program, rows(0))
        actual = jax.jit(program.grad_fn(), compiler_options=dict(QUICK))(params, batch, np.float32(4))
        differentiated = jax.jit(jax.value_and_grad(plain, has_aux=True), compiler_options=dict(QUICK))
        pieces = (jax.tree.map(lambda leaf, number=number: leaf[number], batch) for number in range(2))
        (total, sums), gradients = jax.tree.map(jnp.add, *(differentiated(params, piece) for piece in pieces))
        evaluated = jax.device_get(program.eval_step(params, batch))
    np.testing.assert_allclose(actual.loss_sum, total, rtol=1e-5)
    for name, expected in sums.items():
        for metrics in (actual.metrics, evaluated):
            count = batch["loss_mask"].sum()
            np.testing.assert_allclose(metrics[name], (expected, count), rtol=1e-5, atol=1e-6 * count, err_msg=name)
    teachers = {path for path in gradients if path.startswith("teacher.")}
    assert teachers and {*actual.grads} == {*gradients} - teachers == {*program.optimizer.declared}
    for path in actual.grads:
        scale = np.abs(gradients[path]).max()
        np.testing.assert_allclose(actual.grads[path] / 4, gradients[path], atol=1e-5 * scale, err_msg=path)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"teacher": replace(TEACHER, vocabulary_size=300)}, "teacher.vocabulary_size"),
        ({"teacher": replace(TEACHER, sequence_length=8)}, "teacher.sequence_length"),
        ({"z_loss": 1e-4}, "z_loss"),
    ],
)
def test_problems_of_distillation(changes: dict[str, object], setting: str) -> None:
    assert [problem.setting for problem in replace(distilled(), **changes).problems()] == [setting]


def test_stages_are_refused_for_a_teacher() -> None:
    problems = distilled().parallel_problems(ParallelConfig(pipeline=2), 1)
    assert "teacher" in [problem.setting for problem in problems]


def test_the_student_computes_the_same_as_without_the_teacher() -> None:
    """So it starts from the weights of other models, and is exported as they are."""
    assert differences(distilled(), replace(llama(repeats=1), logit_cap=5.0)) == []
