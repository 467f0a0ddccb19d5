"""Mixtures of experts train on every layout, and with every way to dispatch tokens, as on one device."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from test_layouts_train_alike import assert_same_steps
from tiny_runs import ONE, build_program, llama, train, with_block

from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig, SharedExpertConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig

EXPERTS = 8
LOSSES = RouterConfig(aux_loss=0.01, row_loss=0.01, z_loss=0.001)
BIASED = RouterConfig(
    score="sigmoid", scale=1.5, groups=4, chosen_groups=1, balance_rate=0.01, global_loss=0.01, jitter=0.1
)
DROPS = RouterConfig(aux_loss=0.01, capacity=CapacityConfig(factor=0.7), jitter=0.1)
SHARED = SharedExpertConfig(mlp=GatedMLPConfig(ffn=16), gate=True)

DATA = ParallelConfig(data=2, expert=4, data_sharding="replicate")
FSDP = ParallelConfig(data=4, expert=2, data_sharding="fsdp")
PIPELINE = ParallelConfig(pipeline=2, data=1, expert=2, tensor=2)
SEQUENCE = ParallelConfig(data=2, expert=2, tensor=2, sequence=True)
TENSOR = ParallelConfig(data=2, expert=2, tensor=2)


def moe(router: RouterConfig, way: Any = "auto", *, recompute: Any = "selective", **dispatch: Any) -> DecoderConfig:
    mixture = MoEConfig(
        experts=EXPERTS,
        expert=GatedMLPConfig(ffn=16),
        router=router,
        shared=SHARED,
        dispatch=DispatchConfig(way=way, **dispatch),
    )
    return with_block(llama(recompute, repeats=4), mlp=mixture)


def check(model: DecoderConfig, parallel: ParallelConfig) -> None:
    """Losses, norms, and the gradients of the first step; the state of routers after the last."""
    plain = replace(with_block(model, mlp={"dispatch": DispatchConfig()}), recompute="selective")
    # Losses that balance are of a microbatch; ROWS are 24.
    count = 2 if parallel.pipeline > 1 else 3
    run = partial(train, microbatches=count, evaluated=parallel in (SEQUENCE, PIPELINE))
    expected, actual = run(plain, ONE), run(model, parallel)
    assert_same_steps(actual, expected)
    np.testing.assert_allclose(actual.evaluation, expected.evaluation, rtol=1e-4)
    for path, gradient in expected.gradients.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(actual.gradients[path], gradient, atol=1e-5 * scale, rtol=1e-4, err_msg=path)
    load = [np.sort(np.asarray(run.state.observed[LOAD]), axis=0) for run in (actual, expected)]
    np.testing.assert_allclose(load[0], load[1], rtol=1e-5, atol=1e-5)


LOAD = "stack.blocks.0.mlp.load.sum"
"""Biases and tokens of experts, of each layer."""


ZERO1 = replace(DATA, data_sharding="zero1")
WHOLE = replace(SEQUENCE, expert_tensor="whole")
INTERLEAVED = replace(PIPELINE, schedule="interleaved", virtual_stages=2)
CASES = {
    "losses, gather, chunks": (moe(LOSSES, "gather", chunks=2), DATA),
    "losses, capacity": (moe(LOSSES, "capacity"), SEQUENCE),
    "losses, ragged": (moe(LOSSES, "ragged"), FSDP),
    "losses, pipeline": (moe(LOSSES), PIPELINE),
    "bias, gather": (moe(BIASED, "gather"), TENSOR),
    "bias, gather, full recomputation": (moe(BIASED, "gather", recompute="full"), FSDP),
    "bias, ragged": (moe(BIASED, "ragged"), SEQUENCE),
    "bias, ragged, no recomputation": (moe(BIASED, "ragged", recompute="none"), ZERO1),
    "bias, capacity": (moe(BIASED, "capacity"), DATA),
    "bias, ragged, interleaved": (moe(BIASED, "ragged"), INTERLEAVED),
    "drops, gather": (moe(DROPS, "gather"), WHOLE),
    "drops, ragged": (moe(DROPS, "ragged"), DATA),
    "drops, capacity": (moe(DROPS, "capacity"), DATA),
    "drops, interleaved, whole experts": (moe(DROPS), replace(INTERLEAVED, sequence=True, expert_tensor="whole")),
}
"""Any router with any way to dispatch, and either with any sharding."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel"), CASES.values(), ids=CASES)
def test_experts_train_like_on_one_device(model: DecoderConfig, parallel: ParallelConfig) -> None:
    check(model, parallel)


def test_weights_of_experts_and_their_moments_are_sharded() -> None:
    """Over `expert`, and also over `data` where the layout shards master weights or all weights."""
    path = "stack.blocks.0.mlp.experts.up"
    for parallel, parts in ((ZERO1, 8), (FSDP, 8), (DATA, 4)):
        program = build_program(moe(BIASED, "gather"), parallel, microbatches=3)
        shape = program.declared[path].shape
        for shardings in (program.shardings.params, program.shardings.optimizer["first_moment"]):
            assert np.prod(shape) == parts * np.prod(shardings[path].shard_shape(shape))
