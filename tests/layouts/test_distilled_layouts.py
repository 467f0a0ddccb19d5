"""Distillation: gradients equal those of plain formulas on whole logits. tests/one_device.py has layouts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoders import DISTILLATION, TEACHER, distilled
from tiny_runs import ONE, QUICK, build_program, llama, place, rows, start, within

from megajax.interop.weights.model_differences import differences
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig


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
def test_problems(changes: dict[str, object], setting: str) -> None:
    assert [problem.setting for problem in replace(distilled(), **changes).problems()] == [setting]


def test_stages_are_refused() -> None:
    problems = distilled().parallel_problems(ParallelConfig(pipeline=2), 1)
    assert "teacher" in [problem.setting for problem in problems]


def test_the_student_computes_the_same_as_without_the_teacher() -> None:
    """So it starts from the weights of other models, and is exported as they are."""
    assert differences(distilled(), replace(llama(repeats=1), logit_cap=5.0)) == []
