"""Runs that start from other weights: linear probe, other classes, another image size, another pipeline."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from run_folder import lines
from small_jobs import run_config
from user_errors import user_error

from megajax.checkpoint.boxes import box_of
from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.checkpoint.reader import CheckpointReader
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.data.images.config import MockImagesConfig, MockMasksConfig
from megajax.job.job import train
from megajax.job.notebook import set_up
from megajax.job.start.resume import checkpoint_meta
from megajax.job.start.weights import InitialWeights
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.vision.module import interpolation_matrix
from megajax.models.vit.config import ClassifierConfig, SegmenterConfig, ViTConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.precision.config import Fp8DelayedConfig, PrecisionConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig
from megajax.training.session import Run

BLOCK = BlockConfig(
    mixer=AttentionConfig(heads=2, bias=True, causal=False), mlp=DenseMLPConfig(ffn=32), norm=LayerNormConfig()
)


def vit(size: int = 8, classes: int = 10) -> ViTConfig:
    return ViTConfig(
        hidden=16,
        stack=StackConfig(pattern=(BLOCK,), repeats=2),
        height=size,
        width=size,
        patch=4,
        head=ClassifierConfig(classes=classes),
    )


def job(folder: Path, model: ViTConfig | None = None, **changes: Any) -> RunConfig:
    schedule = ScheduleConfig(lr=1e-2)
    settings = {"model": model or vit(), "data": MockImagesConfig(), "schedule": schedule, "steps": 1} | changes
    return run_config(folder, **{"evaluation": EvaluationConfig(batches=0), **settings})


@pytest.mark.slow
def test_the_iou_of_a_segmentation_is_logged(tmp_path: Path) -> None:
    model = replace(vit(), head=SegmenterConfig(classes=10))
    cfg = job(tmp_path, model, data=MockMasksConfig(), evaluation=EvaluationConfig(batches=1, at_end=True))
    assert train(cfg) == 0
    assert [line.get("split") for line in lines(tmp_path)] == [None, "validation", "test"]
    assert all(0 <= line[name] <= 1 for line in lines(tmp_path) for name in ("iou", "accuracy"))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("pretrained")
    run = set_up(job(folder), devices=jax.devices()[:1])
    with CheckpointManager(CheckpointConfig(), folder / "checkpoints") as manager:
        manager.save(1, run.state, checkpoint_meta(run.parts, ""))
    return folder


def started(cfg: RunConfig) -> tuple[Run, list[str]]:
    """A run before its first step, and its messages."""
    messages: list[str] = []
    return set_up(
        cfg, devices=jax.devices()[:1], start=InitialWeights(cfg.checkpoint.weights, messages.append)
    ), messages


def stored(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The weights of a checkpoint."""

    def read(step: StoredArrays) -> dict[str, np.ndarray]:
        shapes = {name: array.shape for name, array in step.arrays.items() if name.startswith("params.")}
        return {name.removeprefix("params."): step.read(name, box_of((), shape)) for name, shape in shapes.items()}

    return CheckpointReader(folder / "checkpoints").use_arrays(step, read)


def weights(folder: Path, *fresh: str) -> CheckpointConfig:
    return CheckpointConfig(weights=(WeightsConfig(run=folder, fresh=fresh),))


def test_scales_of_earlier_steps_begin_anew_beside_loaded_weights(pretrained: Path, tmp_path: Path) -> None:
    precision, batch = PrecisionConfig(matmul=Fp8DelayedConfig()), BatchConfig(global_size=16, micro_size=16)
    run, _ = started(job(tmp_path, precision=precision, batch=batch, checkpoint=weights(pretrained)))
    assert run.state.observed and not any(np.asarray(history).any() for history in run.state.observed.values())
    for path, weight in stored(pretrained, 1).items():
        np.testing.assert_array_equal(run.state.params[path], weight)


@pytest.mark.slow
def test_a_linear_probe_trains_a_new_head_alone(pretrained: Path, tmp_path: Path) -> None:
    """The second run is on two devices, which shard the weights of the first one."""
    parallel = ParallelConfig(data=2, data_sharding="fsdp")
    probe = job(tmp_path, vit(classes=12), checkpoint=weights(pretrained, "head.*"), parallel=parallel, steps=2)
    assert train(replace(probe, optimizer=AdamWConfig(trainable=("head.*",)))) == 0
    start, end = stored(pretrained, 1), stored(tmp_path, 2)
    assert end["head.linear.matrix"].shape == (16, 12) and np.abs(end["head.linear.bias"]).max() > 0
    for path in start:
        if not path.startswith("head."):
            np.testing.assert_array_equal(end[path], start[path], err_msg=path)


@pytest.mark.slow
def test_positions_are_interpolated_for_larger_images(pretrained: Path, tmp_path: Path) -> None:
    """They are what jax.image.resize makes of them; the class token keeps its own. All other weights are taken."""
    small = stored(pretrained, 1)["positions"]
    run, messages = started(job(tmp_path, vit(size=20), checkpoint=weights(pretrained)))
    large = np.asarray(run.state.params["positions"])
    assert messages == [f"24 weights of {pretrained}, step 1, positions resized"]
    assert int(run.state.step) == int(run.state.consumed_samples) == 0
    np.testing.assert_array_equal(large[0], small[0])
    expected = jax.image.resize(small[1:].reshape(2, 2, 16), (5, 5, 16), "bilinear").reshape(25, 16)
    np.testing.assert_allclose(large[1:], expected, rtol=1e-5, atol=1e-6)


def test_interpolation_keeps_linear_functions() -> None:
    """It is linear in the middle and constant at the edges. A matrix of the same size does not change."""
    np.testing.assert_array_equal(interpolation_matrix(3, 3), np.eye(3))
    resized = interpolation_matrix(8, 4) @ (np.arange(4) + 0.5)
    np.testing.assert_allclose(resized, [0.5, *(np.arange(1, 7) + 0.5) / 2, 3.5])


@pytest.mark.parametrize(
    ("model", "source"),
    [
        (vit(classes=12), {}),
        (vit(), {"into": "tower"}),
        (vit(), {"fresh": ("neck.*",)}),
        (replace(vit(), stack=StackConfig(pattern=(BLOCK,), repeats=3)), {}),
        (replace(vit(), stack=StackConfig(pattern=(BLOCK,), repeats=1)), {}),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    pretrained: Path, tmp_path: Path, model: ViTConfig, source: dict[str, Any]
) -> None:
    cfg = job(tmp_path, model, checkpoint=CheckpointConfig(weights=(WeightsConfig(run=pretrained, **source),)))
    with user_error():
        started(cfg)
