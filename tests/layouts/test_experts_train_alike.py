"""Mixtures of experts train on every layout, and with every way to dispatch tokens, as on one device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_layouts_train_alike import assert_same_training
from tiny_runs import ONE, Trained, llama, train

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
CUT = ParallelConfig(data=2, expert=2, tensor=2)


def moe(router: RouterConfig, way: Any = "auto", *, recompute: Any = "selective", **dispatch: Any) -> DecoderConfig:
    model, repeats = llama(recompute), 4
    (block,) = model.stack.pattern
    mixture = MoEConfig(
        experts=EXPERTS,
        expert=GatedMLPConfig(ffn=16),
        router=router,
        shared=SHARED,
        dispatch=DispatchConfig(way=way, **dispatch),
    )
    return replace(model, stack=replace(model.stack, pattern=(replace(block, mlp=mixture),), repeats=repeats))


def check(model: DecoderConfig, parallel: ParallelConfig) -> None:
    """Losses, norms, and the gradients of the first step; the state of routers after the last."""
    (block,) = model.stack.pattern
    alike = replace(block, mlp=replace(block.mlp, dispatch=DispatchConfig()))
    plain = replace(model, recompute="selective", stack=replace(model.stack, pattern=(alike,)))
    # Losses that balance are of a microbatch; ROWS are 24.
    count = 2 if parallel.pipeline > 1 else 3
    expected, actual = train(plain, ONE, microbatches=count), train(model, parallel, microbatches=count)
    assert_same_training(actual, expected)
    for path, gradient in expected.gradients.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(actual.gradients[path], gradient, atol=1e-5 * scale, rtol=1e-4, err_msg=path)
    load = [np.sort(np.asarray(run.state.observed[LOAD]), axis=0) for run in (actual, expected)]
    np.testing.assert_allclose(load[0], load[1], rtol=1e-5, atol=1e-5)


LOAD = "stack.blocks.0.mlp.load.sum"
"""Biases and tokens of experts, of each layer."""


@pytest.mark.slow  # The default suite has routers and dispatch on four devices.
def test_first_step_over_data_and_experts():
    """The cheapest case: one step, without evaluation."""
    model, short = moe(DROPS, "capacity"), {"microbatches": 3, "steps": 1, "evaluated": False}
    actual, expected = train(model, DATA, **short), train(moe(DROPS), ONE, **short)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-5)
    for path, gradient in expected.gradients.items():
        tolerance = {"atol": 1e-5 * np.abs(gradient).max(), "rtol": 1e-4}
        np.testing.assert_allclose(actual.gradients[path], gradient, err_msg=path, **tolerance)


@pytest.mark.slow
def test_a_pipeline_with_sharded_experts():
    check(moe(LOSSES), PIPELINE)


@pytest.mark.slow
@pytest.mark.parametrize("router", [LOSSES, BIASED, DROPS], ids=["losses", "bias", "drops"])
@pytest.mark.parametrize("way", ["gather", "ragged", "capacity"])
def test_every_way(way, router):
    check(moe(router, way), DATA)


INTERLEAVED = replace(PIPELINE, schedule="interleaved", virtual_stages=2)
LAYOUTS = {
    "fsdp": FSDP,
    "zero1": replace(DATA, data_sharding="zero1"),
    "tensor": CUT,
    "sequence": SEQUENCE,
    "whole experts": replace(SEQUENCE, expert_tensor="whole"),
    "interleaved": INTERLEAVED,
    "interleaved, whole experts": replace(INTERLEAVED, sequence=True, expert_tensor="whole"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gather", "ragged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, way):
    check(moe(BIASED, way), LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sequence", "whole experts", "interleaved"])
def test_a_capacity_counts_the_tokens_of_all_devices(layout):
    check(moe(DROPS), LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputation_does_not_matter(recompute):
    check(moe(BIASED, recompute=recompute), DATA)


@pytest.mark.slow
def test_chunks_do_not_change_numbers():
    check(moe(LOSSES, "gather", chunks=2), DATA)


def shards(run: Trained, arrays: Any, path: str) -> int:
    array = arrays[path]
    return array.size // array.addressable_shards[0].data.size


@pytest.mark.slow
def test_weights_of_experts_and_their_moments_are_sharded():
    """Over `expert`, and also over `data` where the layout shards master weights or all weights."""
    path = "stack.blocks.0.mlp.experts.up"
    for parallel, weights, moments in ((LAYOUTS["zero1"], 8, 8), (FSDP, 8, 8), (DATA, 4, 4)):
        run = train(moe(BIASED, "gather"), parallel, microbatches=3)
        assert shards(run, run.state.params, path) == weights
        assert shards(run, run.state.optimizer["first_moment"], path) == moments
