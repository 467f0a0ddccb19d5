"""`convert` between Megatron-LM checkpoints and runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from megatron_folders import MODELS, Shares, write_ranks, write_sharded
from test_megatron_folders import random_tensors

from megajax.checkpoint.reader import CheckpointReader
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config import load
from megajax.convert import main
from megajax.interop.megatron.checkpoints.format import open_model
from megajax.train import main as train

TRAINED: dict[str, Any] = {
    "optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.97, "adam_eps": 1e-8, "lr": 3e-3, "min_lr": 3e-4,
    "lr_decay_style": "cosine", "weight_decay": 0.1, "clip_grad": 1.0, "global_batch_size": 8, "micro_batch_size": 1,
    "train_iters": 20, "lr_warmup_iters": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", ["local", ""])
def test_round_trip(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "mixtral" if family else "llama"
    weights = random_tensors(name)
    write_sharded(tmp_path / "theirs", weights, MODELS[name][0], Shares(tensor=2))
    main([f"--from=megatron:{tmp_path}/theirs", f"--to={tmp_path}/run", "--verify"])
    main([f"--from={tmp_path}/run", f"--to=megatron:{tmp_path}/back", f"--family={family}", "--verify"])
    output = capsys.readouterr().out
    assert output.count("all equal") == 2
    assert "layers of plain torch" in output if family else "layers of Transformer Engine" in output
    back = open_model(tmp_path / "back").foreign.tensors
    for name, array in weights.items():
        # Tables come back without padding.
        np.testing.assert_array_equal(back.read(name), array[: len(back.read(name))], err_msg=name)
    assert back.entries["embedding.word_embeddings.weight"].shape == (29, 16)


@pytest.mark.slow
def test_a_converted_run_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = MODELS["llama"][0]
    moments = {
        "exp_avg": random_tensors("llama", 1),
        "exp_avg_sq": {k: np.abs(v) for k, v in random_tensors("llama", 2).items()},
    }
    arguments = {**args, **TRAINED, "num_layers": 4}
    write_ranks(tmp_path / "theirs", random_tensors("llama"), arguments, Shares(tensor=2, pipeline=2), moments=moments)
    main([f"--from=megatron:{tmp_path}/theirs", f"--to={tmp_path}/run"])
    output = capsys.readouterr().out
    assert "optimizer: moments and counters after 7 steps" in output
    cfg = load(f"{tmp_path}/run/config.yaml", "data.type=MockConfig", "tokenizer.type=NullTokenizerConfig")
    assert (cfg.optimizer.beta2, cfg.schedule.lr, cfg.batch.global_size, cfg.steps) == (0.97, 3e-3, 8, 20)
    stored = CheckpointReader(tmp_path / "run" / "checkpoints")
    assert stored.newest_intact() == 7
    arrays = StoredArrays(tmp_path / "run" / "checkpoints" / "00000007")
    counts = {name: arrays.value(name) for name in ("step", "optimizer.count", "consumed_samples", "scheduled_samples")}
    assert counts == {"step": 7, "optimizer.count": 7, "consumed_samples": 56, "scheduled_samples": 1}
    # Quantized weights have no moments to resume from.
    main([f"--from=megatron:{tmp_path}/theirs", f"--to={tmp_path}/int8", "--quantize=int8"])
    assert "optimizer:" not in capsys.readouterr().out
    quantized = yaml.safe_load((tmp_path / "int8/config.yaml").read_text())["checkpoint"]
    assert quantized["load"] is None and len(quantized["weights"]) == 1
    train([f"--config={tmp_path}/run/config.yaml", "--data.type=MockConfig", "--steps=8", "--devices=cpu:8"])
    line = json.loads((tmp_path / "run-continued" / "metrics.jsonl").read_text().splitlines()[0])
    assert (line["step"], line["consumed_samples"]) == (8, 64)
