"""Distillation: gradients equal those of plain formulas on whole logits, and all layouts agree."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import LENGTH, ONE, QUICK, build_program, differentiate, gpt, llama, place, rows, start, within

from megajax.interop.weights.model_differences import differences
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.models.distilled.config import DistillationConfig, DistilledDecoderConfig, with_teacher

LOSS = DistillationConfig(mixture=0.3, temperature=2.0, weight=0.7, label_weight=0.4)
TEACHER = replace(gpt("selective", repeats=1), hidden=48, sequence_length=LENGTH + 2, logit_cap=3.0)


def model(loss: DistillationConfig = LOSS) -> DistilledDecoderConfig:
    """A student with capped logits, and a wider teacher of another kind, with dropout that must not act."""
    return with_teacher(replace(llama(repeats=1), logit_cap=5.0), TEACHER, loss)


@pytest.mark.slow
def test_gradients_equal_those_of_whole_logits() -> None:
    program = build_program(model(), ONE, microbatches=2)

    def plain(params, piece):
        module = bind(program.abstract, params)

        def logits(decoder):
            return decoder.logits(decoder.states(piece))

        student, teacher = logits(module), jax.lax.stop_gradient(logits(module.teacher))
        log_q, log_p = (jax.nn.log_softmax(z / LOSS.temperature) for z in (student, teacher))
        p, q, b = jnp.exp(log_p), jnp.exp(log_q), LOSS.mixture
        log_m = jnp.log(b * p + (1 - b) * q)
        divergence = (b * p * (log_p - log_m) + (1 - b) * q * (log_q - log_m)).sum(-1)
        entropy = -jnp.take_along_axis(jax.nn.log_softmax(student), piece["labels"][..., None], -1)[..., 0]
        losses = LOSS.weight * divergence + LOSS.label_weight * entropy
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


LAYOUTS = {
    "tensor": ParallelConfig(data=1, tensor=2, sequence=True),
    "cut rows": ParallelConfig(data=2, context=2, context_strategy="ring"),
    "fsdp": ParallelConfig(data=2, tensor=2, data_sharding="fsdp", sequence=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_losses_and_gradients_of_one_device(layout: str) -> None:
    run = partial(differentiate, model(), microbatches=2)
    expected, actual = run(ONE), run(LAYOUTS[layout])
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    for path, gradient in expected.gradients.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(actual.gradients[path], gradient, atol=1e-5 * scale, err_msg=path)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"teacher": replace(TEACHER, vocabulary_size=300)}, "teacher.vocabulary_size"),
        ({"teacher": replace(TEACHER, sequence_length=8)}, "teacher.sequence_length"),
        ({"z_loss": 1e-4}, "z_loss"),
    ],
)
def test_problems(changes: dict[str, object], setting: str) -> None:
    assert [problem.setting for problem in replace(model(), **changes).problems()] == [setting]


def test_stages_are_refused() -> None:
    problems = model().parallel_problems(ParallelConfig(pipeline=2), 1)
    assert "teacher" in [problem.setting for problem in problems]


def test_the_student_computes_the_same_as_without_the_teacher() -> None:
    """So it starts from other weights, and is exported."""
    assert differences(model(), replace(llama(repeats=1), logit_cap=5.0)) == []
