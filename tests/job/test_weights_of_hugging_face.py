"""Runs that start from a Hugging Face folder: on several devices, with more tokens, and refusals."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from small_jobs import run_config
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.interop.conversion import open_source
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.registry import families
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.name_mapping import resolved
from megajax.job.notebook import set_up
from megajax.job.start.layer_order import layers_of
from megajax.job.start.weights import InitialWeights
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.training.config import EvaluationConfig
from megajax.training.session import Run

BLOCK = BlockConfig(
    mixer=AttentionConfig(heads=4, kv_heads=2, head_dim=4, rope=RopeConfig()),
    mlp=GatedMLPConfig(ffn=32),
    norm=RMSNormConfig(),
)
MODEL = DecoderConfig(
    hidden=16, vocabulary_size=96, sequence_length=16, stack=StackConfig(pattern=(BLOCK,), repeats=3), norm=BLOCK.norm
)


def of_blocks(mixer: AttentionConfig) -> DecoderConfig:
    return replace(MODEL, stack=StackConfig(pattern=(replace(BLOCK, mixer=mixer),), repeats=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights."""
    folder, family, draw = tmp_path_factory.mktemp("llama"), families()["llama"], np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(family.config_json(MODEL)))
    table = resolved(family.rows(MODEL), declared_by(MODEL))
    tensors = {tensor.name: draw.normal(size=tensor.shape()).astype(np.float16) for tensor in table}
    save_file(tensors, folder / "model.safetensors")
    return folder


def started(
    tmp_path: Path,
    source: WeightsConfig,
    model: DecoderConfig = MODEL,
    parallel: ParallelConfig | None = None,
    ignore: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    parallel = parallel or ParallelConfig(data=1)
    sizes = [parallel.pipeline, parallel.data or 1, parallel.tensor]
    cfg = run_config(
        tmp_path,
        model=model,
        parallel=parallel,
        evaluation=EvaluationConfig(batches=0),
        checkpoint=CheckpointConfig(weights=(source,), ignore=ignore),
    )
    devices = jax.devices()[: int(np.prod(sizes))]
    return set_up(cfg, devices=devices, start=InitialWeights(cfg.checkpoint.weights, say))


def hf(folder: Path, **settings: Any) -> WeightsConfig:
    return WeightsConfig(run=Path(f"hf:{folder}"), **settings)


def test_devices_hold_the_layers_and_shards_of_the_files(folder: Path, tmp_path: Path) -> None:
    """A pipeline with stages of two layers and one; matrices sharded over tensor and data."""
    layout = ParallelConfig(pipeline=2, tensor=2, data=2, data_sharding="fsdp", sequence=True)
    run, weights = started(tmp_path, hf(folder), parallel=layout), open_source(f"hf:{folder}").weights
    for path, spec in run.parts.program.declared.items():
        array = weights.read(path, tuple(slice(0, size) for size in weights.shapes[path])).astype(np.float32)
        if spec.layers:
            order = run.parts.program.partition.order_of(layers_of(spec))
            assert len(order) == 4 and -1 in order
            array = np.stack([np.zeros_like(array[0]) if row < 0 else array[row] for row in order])
        np.testing.assert_array_equal(np.asarray(run.state.params[path]), array, err_msg=path)


@pytest.mark.parametrize("way", ["drawn", "mean"])
def test_tables_grow_to_more_tokens(folder: Path, tmp_path: Path, way: Any) -> None:
    """The table grows from 96 to 200 tokens: new rows are random, or the mean of the existing ones."""
    model = replace(MODEL, vocabulary_size=200)
    run, weights = started(tmp_path, hf(folder, new_tokens=way), model), open_source(f"hf:{folder}").weights
    for path in ("tokens", "head"):
        actual = np.asarray(run.state.params[path])
        stored = weights.read(path, (slice(0, 96), slice(0, 16))).astype(np.float32)
        np.testing.assert_array_equal(actual[:96], stored)
        if way == "mean":
            np.testing.assert_allclose(actual[96:200], np.broadcast_to(stored.mean(0), (104, 16)), rtol=1e-5, atol=1e-7)
        else:
            assert 0.01 < actual[96:200].std() < 0.03


@pytest.mark.parametrize(
    ("model", "source"),
    [
        (replace(MODEL, vocabulary_size=97), {}),
        (replace(MODEL, vocabulary_size=95), {}),
        (replace(MODEL, hidden=32), {}),
        (of_blocks(replace(BLOCK.mixer, rope=None)), {}),
        (replace(MODEL, norm=RMSNormConfig(epsilon=1e-6)), {}),
        (replace(MODEL, stack=StackConfig(pattern=(BLOCK,), repeats=2)), {}),
        (replace(MODEL, tied=True), {}),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, model: DecoderConfig, source: dict[str, Any]
) -> None:
    with user_error():
        started(tmp_path, hf(folder, **source), model)


def test_rows_keep_the_length_of_learned_positions(tmp_path: Path) -> None:
    """Fresh positions would lose trained ones, so the advice is to set the length of the table."""
    folder, family, draw = tmp_path / "gpt2", families()["gpt2"], np.random.default_rng(0)
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32, "vocab_size": 96}
    model = family.read(Settings(settings))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **settings}))
    table = resolved(family.rows(model), declared_by(model))
    save_file(
        {each.name: draw.normal(size=each.shape()).astype(np.float32) for each in table}, folder / "a.safetensors"
    )
    for length in (16, 48):
        with user_error() as refused:
            started(tmp_path, hf(folder), replace(model, sequence_length=length))
        assert "fresh" not in str(refused.value)


def test_unknown_settings_are_accepted_by_name(folder: Path, tmp_path: Path) -> None:
    noted, said = tmp_path / "noted", list[str]()
    shutil.copytree(folder, noted)
    settings = json.loads((folder / "config.json").read_text())
    (noted / "config.json").write_text(json.dumps({**settings, "depth_scale": 2.0}))
    with user_error():
        started(tmp_path, hf(noted))
    started(tmp_path, hf(noted), ignore=("depth_scale",), say=said.append)
    assert said[0].endswith(f" weights of hf:{noted}, ignored settings: depth_scale=2.0")


def test_load_takes_only_weights_where_it_is_asked_to(folder: Path) -> None:
    assert CheckpointConfig(load=Path(f"hf:{folder}")).sources() == (WeightsConfig(run=Path(f"hf:{folder}")),)
    run = CheckpointConfig(load=Path("runs/a"), parts="weights")
    assert run.sources() == (WeightsConfig(run=Path("runs/a")),) and run.state_source() is None
    assert CheckpointConfig(load=Path("runs/a")).state_source() == Path("runs/a")
    assert [problem.setting for problem in CheckpointConfig(parts="weights").problems()] == ["parts"]
