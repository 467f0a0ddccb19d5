"""Losses of whole answers: their gradients equal those of a plain log-softmax, and all layouts agree."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_experts_train_alike import EXPERTS, moe
from tiny_runs import (
    LENGTH,
    ONE,
    QUICK,
    ROWS,
    assert_close,
    assert_same_step,
    build_program,
    by_plain_differentiation,
    differentiate,
    llama,
    place,
    rows,
    start,
    within,
)

from megajax.batch import Batch
from megajax.interop.weights.model_differences import differences
from megajax.layers.moe.config import CapacityConfig, RouterConfig
from megajax.layers.param import bind
from megajax.mesh.config import ParallelConfig
from megajax.models.answers.config import (
    AnswerDecoderConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ObjectiveConfig,
    ORPOConfig,
    with_objective,
)
from megajax.models.answers.objectives import TokenObjective

DPO = DPOConfig(beta=0.3, label_smoothing=0.1, length_weight=0.5, sft_weight=0.2)
KTO = KTOConfig(beta=0.5, desirable_weight=1.5)
GRPO = GRPOConfig(kl_weight=0.1, clip_high=0.28, entropy_weight=0.3)
GSPO = GRPOConfig(ratio="sequence", average="tokens")
REPLAY = GRPOConfig(router_replay="rollout")
CISPO = GRPOConfig(loss="cispo", clip_high=1.5, average="length", length=3)


def model(objective: ObjectiveConfig, repeats: int = 2) -> AnswerDecoderConfig:
    """With a soft cap of logits."""
    return with_objective(replace(llama(repeats=repeats), logit_cap=5.0), objective)


def answers(seed: int) -> Batch:
    """Rows of four documents with answers of one to three tokens: two pairs, or a judged group and one answer more."""
    batch, draw = rows(seed), np.random.default_rng(seed)
    document, place_in_document = np.divmod(np.arange(LENGTH, dtype=np.int32), LENGTH // 4)
    document, position = (np.tile(values, (ROWS, 1)) for values in (document, place_in_document))
    lengths = draw.integers(1, 4, (ROWS, 4))
    inside = position < lengths[np.arange(ROWS)[:, None], document]
    numbers = np.where(inside, document + 1, 0).astype(np.int32)
    # The last row has no second pair.
    numbers[-1, LENGTH // 2 :] = 0
    reference = draw.normal(-5, 1, (ROWS, LENGTH)).astype(np.float32)
    return batch | {
        "segment_ids": document,
        "positions": position,
        "loss_mask": (numbers > 0).astype(np.float32),
        "pairs": numbers,
        "judged": numbers,
        "answers": numbers,
        "advantage": draw.normal(0, 1, (ROWS, 4)).astype(np.float32)[np.arange(ROWS)[:, None], document],
        "old_log_p": draw.normal(-5.5, 0.5, (ROWS, LENGTH)).astype(np.float32),
        "reference": reference,
    }


@pytest.mark.parametrize(
    "objective",
    [DPO, *(pytest.param(other, marks=pytest.mark.slow) for other in (GRPO, ORPOConfig(), KTO, GSPO, CISPO))],
)
def test_gradients_equal_those_of_a_plain_log_softmax(objective: ObjectiveConfig) -> None:
    """Through the objective and the whole logits: without the second pass of the head, and without its weights."""
    program = build_program(model(objective, repeats=1), ONE, microbatches=2)

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


LAYOUTS = {
    "vocabulary over stages": ParallelConfig(pipeline=2, data=1, tensor=2),
    "cut rows": ParallelConfig(data=2, context=2, context_strategy="ring"),
    "fsdp": ParallelConfig(data=2, tensor=2, data_sharding="fsdp", sequence=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "objective", "average"),
    [
        ("vocabulary over stages", DPO, "tokens"),
        ("vocabulary over stages", KTO, "microbatches"),
        ("cut rows", DPO, "tokens"),
        ("cut rows", KTO, "tokens"),
        ("cut rows", GRPO, "tokens"),
        ("vocabulary over stages", GRPO, "microbatches"),
        ("fsdp", GSPO, "tokens"),
        ("fsdp", DPO, "tokens"),
    ],
)
def test_layouts_have_the_losses_and_gradients_of_one_device(
    layout: str, objective: ObjectiveConfig, average: str
) -> None:
    """With microbatches of the same rows: the KL baseline of KTO is a mean over a microbatch. Where each microbatch
    weighs the same, `data` is 1, because the rows of a group are a microbatch of their own."""
    options = {"microbatches": 2, "average": average, "draw": answers}
    assert_same_step(model(objective), LAYOUTS[layout], floor=1e-3, **options)


def replaying() -> AnswerDecoderConfig:
    """Two layers with experts, two without."""
    return with_objective(moe(RouterConfig(score="sigmoid", balance_rate=0.1), "ragged"), REPLAY)


def with_experts(seed: int) -> Batch:
    """Experts of some tokens, which differ from layer to layer."""
    shape = replaying().schema()["experts"].shape
    draw = np.random.default_rng(seed)
    experts = 1 + np.argsort(draw.normal(size=(ROWS, *shape[:2], EXPERTS)), axis=-1)[..., : shape[2]]
    given = draw.random((ROWS, shape[0], 1, 1)) < 0.8
    return answers(seed) | {"experts": (experts * given).astype(np.int16)}


def with_none(seed: int) -> Batch:
    """All experts are the routers' choice."""
    batch = with_experts(seed)
    return batch | {"experts": np.zeros_like(batch["experts"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data=2, expert=2, tensor=2, sequence=True),
        ParallelConfig(pipeline=2, virtual_stages=2, data=2, expert=2),
        ParallelConfig(data=1, context=2, context_strategy="ring", expert=2, data_sharding="fsdp"),
    ],
)
def test_given_experts_are_those_of_the_same_tokens_on_all_layouts(parallel: ParallelConfig) -> None:
    """Pipelines have them by the number of a layer, context groups by position; gradients reach the router."""
    expected = assert_same_step(replaying(), parallel, microbatches=2, draw=with_experts, tolerance=2e-5)
    free = differentiate(replaying(), ONE, microbatches=2, draw=with_none)
    assert abs(expected.loss - free.loss) > 1e-4 * abs(expected.loss)
    assert all(gradient.any() for gradient in expected.gradients.values())


@pytest.mark.parametrize(
    ("changes", "setting"), [({"label_smoothing": 0.1}, "label_smoothing"), ({"z_loss": 1e-4}, "z_loss")]
)
def test_problems(changes: dict[str, float], setting: str) -> None:
    problems = replace(model(DPO), **changes).problems()
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
    model = with_objective(llama() if routed is None else moe(routed), REPLAY)
    assert [problem.setting for problem in model.problems()] == [setting] * (setting is not None)
    assert ("experts" in model.schema()) and (routed is None) == (len(model.cache_leaves(1)) == 2)


def test_the_model_computes_the_same_as_without_the_objective() -> None:
    """So it starts from other weights, and is exported."""
    assert differences(model(DPO), replace(llama(), logit_cap=5.0)) == []
