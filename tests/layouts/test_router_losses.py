"""Gradients of router losses are the coefficients times those of means over the routed positions.

Matrices that write to the residual stream are zero here, so routers read normalised embeddings, and their gradients are
those of their losses alone: in float64 they have a closed form.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from tiny_decoders import answers
from tiny_runs import LENGTH, ONE, QUICK, ROWS, build_program, in_order, llama, place, rows, start, with_block, within

from megajax.batch import Batch
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import CapacityConfig, MoEConfig, RouterConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.answers.config import DPOConfig, with_objective
from megajax.models.decoder.config import DecoderConfig, PredictionConfig
from megajax.training.program import Program

EXPERTS, CHOSEN, MICROBATCHES, EPSILON = 8, 2, 2, 1e-5
COEFFICIENTS = {"aux": 0.3, "row": 0.5, "z": 0.02}
ROUTER, GAIN = "stack.blocks.0.mlp.router", "stack.blocks.0.mlp_norm.gain"
BEFORE_RESIDUAL = ("mixer.output", "mlp.experts.down")


def mixture(prediction: int = 0, **router: Any) -> DecoderConfig:
    """Two layers of experts, and heads of multi-token prediction."""
    coefficients = {f"{name}_loss": value for name, value in COEFFICIENTS.items()}
    mlp = MoEConfig(
        experts=EXPERTS, top_k=CHOSEN, expert=GatedMLPConfig(ffn=16), router=RouterConfig(**coefficients, **router)
    )
    model = with_block(llama(), mlp=mlp)
    return replace(model, prediction=PredictionConfig(depth=prediction)) if prediction else model


def batch_of(labels: str, weight: float) -> Batch:
    """Rows that end with padding of different lengths, and the weights of their labels."""
    batch = rows()
    text = np.random.default_rng(3).integers(LENGTH // 4, LENGTH + 1, (ROWS, 1))
    padding = np.arange(LENGTH) >= text
    counts = ~padding if labels == "all" else np.arange(LENGTH) == text - 1
    return {**batch, "padding": padding, "loss_mask": (counts * weight).astype(np.float32)}


class Result(NamedTuple):
    """Mean gradients by path, layers in order, and the weights that the inputs of routers follow from."""

    gradients: dict[str, np.ndarray]
    embeddings: np.ndarray
    gain: np.ndarray
    router: np.ndarray


@cache
def compiled(model: DecoderConfig, parallel: ParallelConfig, average: str) -> tuple[Program, dict[str, Any], Any]:
    """(the program, its weights, the gradients of a step)."""
    program = build_program(model, parallel, microbatches=MICROBATCHES, average=average, isolated=False)
    with within(program):
        inputs = dict(start(program).inputs)
        inputs |= {path: w * 0 for path, w in inputs.items() if path.endswith(BEFORE_RESIDUAL)}
        lowered = jax.jit(program.grad_fn()).lower(inputs, program.batch_like(), np.float32(1))
        return program, inputs, lowered.compile(compiler_options=dict(QUICK))


def differentiated(model: DecoderConfig, parallel: ParallelConfig, average: str, batch: Batch) -> Result:
    """The gradients of a step."""
    program, inputs, gradients_of = compiled(model, parallel, average)
    with within(program):
        grads = jax.device_get(gradients_of(inputs, place(program, batch), np.float32(4)))  # a loss scale
    ordered, _ = in_order(program, {path: inputs[path] for path in (GAIN, ROUTER)})
    gradients, _ = in_order(program, grads.grads)
    scaled = {path: gradient / (4 * float(grads.weight_sum)) for path, gradient in gradients.items()}
    return Result(scaled, np.asarray(inputs["tokens"]), ordered[GAIN], ordered[ROUTER])


def closed_form(result: Result, batch: Batch) -> np.ndarray:
    """The gradient of the routers [L, D, E] in float64: of losses of microbatches, by their routed positions."""
    x = result.embeddings.astype(np.float64)[batch["tokens"]]
    real = ~batch["padding"]
    gradients = []
    for gain, router in zip(result.gain.astype(np.float64), result.router.astype(np.float64), strict=True):
        h = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON) * gain
        logits = h @ router
        exponentials = np.exp(logits - logits.max(-1, keepdims=True))
        p = exponentials / exponentials.sum(-1, keepdims=True)
        partition = np.log(exponentials.sum(-1)) + logits.max(-1)
        best = np.argsort(-p, axis=-1)[..., :CHOSEN]
        hot = (np.eye(EXPERTS)[best].sum(-2)) * real[..., None]  # [B, S, E]
        dlogits = np.zeros_like(p)
        for first in range(0, ROWS, ROWS // MICROBATCHES):
            part = slice(first, first + ROWS // MICROBATCHES)
            of_microbatch = hot[part].sum((0, 1)) / real[part].sum()
            of_rows = hot[part].sum(1) / real[part].sum(1)[:, None]
            dp = COEFFICIENTS["aux"] * of_microbatch[None] + COEFFICIENTS["row"] * of_rows
            dp = EXPERTS / CHOSEN * np.broadcast_to(dp[:, None], p[part].shape)
            dlogits[part] = p[part] * (dp - (p[part] * dp).sum(-1, keepdims=True))
        dlogits += COEFFICIENTS["z"] * 2 * partition[..., None] * p
        dlogits *= real[..., None] / real.sum()
        gradients.append(np.einsum("bsd,bse->de", h, dlogits))
    return np.stack(gradients)


def check(result: Result, batch: Batch) -> None:
    expected = closed_form(result, batch)
    np.testing.assert_allclose(result.gradients[ROUTER], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


PROGRAMS = {
    "one device": (ONE, "tokens"),
    "expert 2, tensor 2, sequence": (ParallelConfig(data=1, expert=2, tensor=2, sequence=True), "tokens"),
    "pipeline 2, data 2, means": (ParallelConfig(pipeline=2, data=2), "microbatches"),
    "context 2": (ParallelConfig(data=1, context=2), "tokens"),
}
SLOW = ("expert 2, tensor 2, sequence", "pipeline 2, data 2, means", "context 2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PROGRAMS])
def test_a_router_loss_is_a_mean_over_routed_positions(name: str) -> None:
    """It does not depend on which labels count, or on what they weigh."""
    for labels, weight in (("all", 1.0), ("answers", 1.0), ("answers", 0.01)):
        batch = batch_of(labels, weight)
        check(differentiated(mixture(), *PROGRAMS[name], batch), batch)


def test_router_losses_beside_a_loss_of_answers():
    batch = {**answers(0), "padding": batch_of("all", 1.0)["padding"]}
    result = differentiated(with_objective(mixture(), DPOConfig()), ONE, "tokens", batch)
    check(result, batch)


def test_dropped_tokens_count_in_a_router_loss():
    batch = batch_of("answers", 0.01)
    result = differentiated(mixture(capacity=CapacityConfig(factor=0.5)), ONE, "tokens", batch)
    check(result, batch)


@pytest.mark.slow
def test_the_router_of_a_prediction_head_has_the_same_strength_for_all_weights_of_labels():
    path, parallel = "predictions.0.block.mlp.router", ParallelConfig(pipeline=2, data=1)
    first, second = (
        differentiated(mixture(prediction=1), parallel, "tokens", batch_of("answers", weight)).gradients[path]
        for weight in (1.0, 0.01)
    )
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5 * np.abs(first).max())
