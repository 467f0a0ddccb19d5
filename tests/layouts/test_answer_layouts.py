"""Losses of whole answers: their gradients equal those of a plain log-softmax. tests/one_device.py has layouts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoders import OBJECTIVES, answering, answers, moe, replaying
from tiny_runs import ONE, QUICK, assert_close, build_program, by_plain_differentiation, llama, place, start, within

from megajax.interop.weights.model_differences import differences
from megajax.layers.moe.config import CapacityConfig, RouterConfig
from megajax.layers.param import bind
from megajax.models.answers.config import with_objective
from megajax.models.answers.objectives import TokenObjective

DPO = OBJECTIVES["dpo"]


@pytest.mark.parametrize(
    "objective",
    [name if name == "dpo" else pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES],
)
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
