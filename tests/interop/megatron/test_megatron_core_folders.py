"""Folders that megatron-core 0.19.2 saved, which make_megatron_core_folders.py recorded: weights, moments, logits."""

import hashlib
import json
import tarfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hugging_face_folders import read_all

from megajax.config import load
from megajax.convert import main
from megajax.interop.megatron.checkpoints.checkpoint import ShardedFolder
from megajax.interop.megatron.checkpoints.format import open_model
from megajax.layers.param import Observation, bind, specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan

FILE = Path(__file__).parent / "megatron_core_folders.tar.xz"
FACTS = json.loads(FILE.with_suffix("").with_suffix(".json").read_text())
LOGITS = 2e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == FACTS["sha256"]
    root = tmp_path_factory.mktemp("megatron")
    with tarfile.open(FILE) as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.mark.parametrize("name", ["gpt_tensor_2", "llama", "experts"])
def test_logits(name: str, folders: Path) -> None:
    assert not list((folders / name).rglob("common.pt")), "what is no array is in the shards"
    opened, layout = open_model(folders / name), Layout(Plan.of(ParallelConfig(data=1)))
    abstract = nnx.eval_shape(lambda: opened.foreign.model.build(layout))
    observed = {path: np.zeros(spec.shape, np.float32) for path, spec in specs(abstract, Observation).items()}
    model = bind(abstract, read_all(opened.foreign.weights) | observed)
    with np.load(folders / name / "results.npz") as results:
        logits = np.asarray(model(jnp.asarray(results["tokens"], jnp.int32)))
        assert np.abs(logits[..., :31] - results["logits"][..., :31]).max() < LOGITS
    assert (opened.iteration, opened.consumed_samples) == (2, 4)


def test_moments(folders: Path) -> None:
    opened = open_model(folders / "llama")
    assert opened.updates == 2
    with np.load(folders / "llama" / "results.npz") as results:
        for ours, theirs in (("first_moment", "exp_avg"), ("second_moment", "exp_avg_sq")):
            values = read_all(opened.moments[ours])
            for tensor in opened.foreign.table:
                recorded = results[f"{theirs}/{tensor.name}"][: tensor.shape()[0]]
                for piece, part in zip(tensor.pieces, tensor.to_weights(recorded), strict=True):
                    np.testing.assert_array_equal(values[piece.path][piece.index], part, err_msg=tensor.name)


def test_weights_in_16_bits_are_read_from_their_copies(folders: Path) -> None:
    stored = ShardedFolder(folders / "llama_bf16" / "iter_0000002")
    name = "embedding.word_embeddings.weight"
    copy, rounded = stored.read(f"optimizer.state.param.{name}"), stored.read(name)
    np.testing.assert_array_equal(copy.astype(jnp.bfloat16), rounded)
    opened = open_model(folders / "llama_bf16")
    tokens = read_all(opened.foreign.weights)["tokens"]
    np.testing.assert_array_equal(tokens[:31].ravel(), copy[:31].ravel())
    assert set(opened.moments) == {"first_moment", "second_moment"} and opened.updates == 2


def test_a_converted_run_keeps_optimizer_and_schedule(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"--from=megatron:{folders}/llama", f"--to={tmp_path}/run", "--verify"])
    output = capsys.readouterr().out
    assert "optimizer: moments and counters after 2 steps" in output and "all equal" in output
    assert "settings of optimizer" not in output
    cfg = load(f"{tmp_path}/run/config.yaml")
    assert (cfg.schedule.lr, cfg.optimizer.weight_decay, cfg.batch.global_size, cfg.steps) == (1e-2, 0.01, 2, 10)
