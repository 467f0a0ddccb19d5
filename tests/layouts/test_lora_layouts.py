"""Adapters trained on any layout equal those of one device: losses, and every gradient."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import ONE, assert_close, gpt, llama, train

from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig, PredictionConfig

LORA = LoRAConfig(rank=4, alpha=8.0)


def adapted(model: DecoderConfig, **changes: object) -> DecoderConfig:
    return replace(model, lora=replace(LORA, **changes))


def experts() -> DecoderConfig:
    """A llama with experts in its second block, and a head that predicts further ahead."""
    model = llama(repeats=1)
    (block,) = model.stack.pattern
    mixture = replace(block, mlp=MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=16)))
    stack = replace(model.stack, pattern=(block, mixture))
    return replace(model, stack=stack, prediction=PredictionConfig(block=block))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (adapted(llama(), dropout=0.2), ParallelConfig(data=2, tensor=2, data_sharding="fsdp", sequence=True)),
        (adapted(llama(repeats=3), dropout=0.2), ParallelConfig(data=2, pipeline=2, layers=(1, 2))),
        (adapted(llama(), dropout=0.2), ParallelConfig(data=1, tensor=8)),
        (adapted(gpt("selective"), rank_stabilized=True), ParallelConfig(data=4, data_sharding="zero1")),
        (adapted(llama(), decomposed=True), ParallelConfig(data=2, tensor=4, data_sharding="fsdp", sequence=True)),
        (adapted(llama(repeats=3), decomposed=True), ParallelConfig(data=2, pipeline=2, tensor=2, layers=(1, 2))),
        (adapted(llama(), decomposed=True), ParallelConfig(data=2, context=2, tensor=2, data_sharding="zero1")),
        (adapted(experts()), ParallelConfig(data=2, expert=2, data_sharding="fsdp")),
        (adapted(experts()), ParallelConfig(data=1, expert=2, tensor=2, expert_tensor="whole", sequence=True)),
    ],
    ids=[
        "fsdp",
        "pipeline",
        "copied heads",
        "zero1",
        "dora fsdp",
        "dora pipeline",
        "dora context",
        "expert fsdp",
        "whole experts",
    ],
)
def test_losses_equal_those_of_one_device(model: DecoderConfig, parallel: ParallelConfig) -> None:
    options = {"microbatches": 4 if parallel.pipeline > 1 else 2, "evaluated": False}
    actual, expected = train(model, parallel, **options), train(model, ONE, **options)
    np.testing.assert_allclose(actual.losses[0], expected.losses[0], rtol=1e-5)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-4)
    assert actual.padding == 0 and all(".lora_" in path for path in actual.gradients)
    assert all(gradient.any() for gradient in expected.gradients.values())
    assert_close(actual.gradients, expected.gradients)


@pytest.mark.slow
def test_adapters_alone_reduce_the_loss() -> None:
    actual = train(adapted(llama(), dropout=0.2), ONE, microbatches=2, evaluated=False)
    assert actual.losses[-1] < actual.losses[0]
