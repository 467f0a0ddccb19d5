"""Mixtures of experts that start from the weights of a dense run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_jobs import model, run_config
from tiny_runs import with_block
from user_errors import user_error

from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.job.notebook import set_up
from megajax.job.start.resume import checkpoint_meta
from megajax.job.start.weights import InitialWeights
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.moe.upcycling import derived, weight_sum
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.training.config import BatchConfig
from megajax.training.run_config import RunConfig
from megajax.training.session import Run

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 16), dtype=np.int32)


def with_mlp(mlp: Any) -> DecoderConfig:
    return with_block(model(dropout=0.0), mlp=mlp)


def experts(number: int, top_k: int, ffn: int, **router: Any) -> DecoderConfig:
    router = RouterConfig(**router)
    return with_mlp(MoEConfig(experts=number, top_k=top_k, expert=GatedMLPConfig(ffn=ffn), router=router))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A dense run's folder with a checkpoint of step 1, and its logits."""
    folder = tmp_path_factory.mktemp("dense")
    run = set_up(run_config(folder, model=with_mlp(GatedMLPConfig(ffn=32))), devices=jax.devices()[:1])
    with CheckpointManager(CheckpointConfig(), folder / "checkpoints") as manager:
        manager.save(1, run.state, checkpoint_meta(run.parts, ""))
    return folder, np.asarray(run.model(TOKENS))


def started(folder: Path, moe: DecoderConfig, parallel: ParallelConfig | None = None) -> tuple[Run, list[str]]:
    """A run before its first step, and its messages."""
    checkpoint = CheckpointConfig(weights=(WeightsConfig(run=folder),))
    changes: dict[str, Any] = {"checkpoint": checkpoint, "parallel": parallel or ParallelConfig(data=1)}
    if parallel is not None:
        moe, changes["batch"] = replace(moe, recompute="selective"), BatchConfig(global_size=8, micro_size=2)
    cfg: RunConfig = run_config(model=moe, **changes)
    messages: list[str] = []
    devices = jax.devices()[: 1 if parallel is None else 4]
    return set_up(cfg, devices=devices, start=InitialWeights(cfg.checkpoint.weights, messages.append)), messages


def test_copies_of_a_dense_layer_compute_the_same(dense: tuple[Path, np.ndarray]) -> None:
    run, messages = started(dense[0], experts(4, 2, 32))
    assert messages[0].endswith("step 1, 3 of them experts from dense layers")
    np.testing.assert_allclose(np.asarray(run.model(TOKENS)), dense[1], rtol=0, atol=1e-5)
    router = np.asarray(run.state.params["stack.blocks.0.mlp.router"])
    assert router.std() > 0 and len(np.unique(router)) == router.size


GRANULAR = experts(8, 4, 16, score="sigmoid", scale=2.5)
"""Two experts make a dense layer; a token passes two such groups."""


@pytest.mark.slow
def test_parts_of_a_dense_layer_together_compute_the_same(dense: tuple[Path, np.ndarray]) -> None:
    run, _ = started(dense[0], GRANULAR)
    np.testing.assert_allclose(np.asarray(run.model(TOKENS)), dense[1], rtol=0, atol=1e-5)
    router = np.asarray(run.state.params["stack.blocks.0.mlp.router"])
    np.testing.assert_array_equal(router[..., ::2], router[..., 1::2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [ParallelConfig(data=1, expert=2, tensor=2), ParallelConfig(data=1, expert=2, pipeline=2)]
)
def test_several_devices_have_the_same_weights(dense: tuple[Path, np.ndarray], parallel: ParallelConfig) -> None:
    single, sharded = (started(dense[0], GRANULAR, layout)[0].state.params for layout in (None, parallel))
    for path, weight in single.items():
        np.testing.assert_array_equal(np.asarray(sharded[path]), np.asarray(weight), err_msg=path)


def test_both_sizes_that_do_not_fit_are_named(dense: tuple[Path, np.ndarray]) -> None:
    with user_error():
        started(dense[0], experts(4, 2, 24))
    stored = {"gate": (2, 16, 32), "up": (2, 16, 32), "down": (2, 32, 16)}
    for cfg, problem in {
        experts(8, 3, 16): "top_k=3 is no multiple of the 2 experts that make a dense layer: ffn=32 there, 16 here",
        experts(5, 2, 16): "experts=5 is no multiple of the 2 experts that make a dense layer: ffn=32 there, 16 here",
    }.items():
        rule = derived(cfg.stack.pattern[0].mlp, "experts.up", stored)
        assert rule is not None and rule.problem == problem


def dense_layer(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """relu(x up + bias) down + bias."""
    inner = np.maximum(x @ weights["up"] + weights["up_bias"], 0)
    return inner @ weights["down"] + weights["down_bias"]


@pytest.mark.parametrize("normalise", ["chosen", "all"])
def test_biases_and_all_scores_are_compensated(normalise: str) -> None:
    """Outputs of a group of three, each weighted as by a router with logits of zero."""
    cfg = MoEConfig(
        experts=6,
        top_k=3,
        expert=DenseMLPConfig(ffn=4, bias=True, activation="relu"),
        router=RouterConfig(normalise=normalise, scale=1.5),
    )
    rng = np.random.default_rng(0)
    shapes = {"up": (1, 5, 12), "up_bias": (1, 12), "down": (1, 12, 5), "down_bias": (1, 5)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    copies = {}
    for name in shapes:
        rule = derived(cfg, f"experts.{name}", shapes)
        assert rule is not None and rule.source == name and rule.made_shape(1)[:2] == (1, 6)
        copies[name] = np.asarray(rule.make(jax.numpy.asarray(weights[name], "float32")))[0]
    x = rng.normal(size=(7, 5))
    expected_weight = weight_sum(cfg) / cfg.top_k
    outputs = sum(
        expected_weight * dense_layer(x, {name: w[expert] for name, w in copies.items()}) for expert in (3, 4, 5)
    )
    np.testing.assert_allclose(
        outputs, dense_layer(x, {name: w[0] for name, w in weights.items()}), rtol=1e-5, atol=1e-5
    )


def test_weights_without_a_dense_counterpart_are_absent() -> None:
    cfg = MoEConfig(experts=4, top_k=2, expert=GatedMLPConfig(ffn=8))
    shapes = {"gate": (2, 4, 8), "up": (2, 4, 8), "down": (2, 8, 4)}
    assert derived(cfg, "shared.up", shapes) is None
    assert derived(cfg, "experts.up", {}) is None
    assert derived(replace(cfg, latent=2), "experts.up", shapes) is None
    missing = derived(cfg, "experts.gate", {name: shape for name, shape in shapes.items() if name != "gate"})
    assert missing is not None and "no gate; it has down, up" in missing.problem
