"""Two processes that start from one Hugging Face folder: each reads its shards, and the losses equal those of one."""

import json
from pathlib import Path

import numpy as np
import pytest
from gangs import CONFIG, TINY, TRAIN, launcher, steps
from safetensors.numpy import save_file

from megajax.checkpoint.weights.foreign import declared_by
from megajax.checkpoint.weights.name_mapping import resolved
from megajax.config import load
from megajax.interop.huggingface.registry import families

SETTINGS = (
    "--parallel.data_sharding=fsdp", "--model.recompute=full", "--model.dropout=0", "--steps=3",
    "--evaluation.batches=0",
)  # fmt: skip


@pytest.mark.slow
def test_losses_are_those_of_one_process(start, tmp_path: Path) -> None:
    folder, model, family = tmp_path / "model", load(CONFIG).model, families()["llama"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.config_json(model)))
    table, draw = resolved(family.rows(model), declared_by(model)), np.random.default_rng(0)
    tensors = {entry.name: (0.05 * draw.normal(size=entry.shape())).astype(np.float16) for entry in table}
    save_file(tensors, folder / "model.safetensors")
    source = f"--checkpoint.load=hf:{folder}"
    command = (*TRAIN, *TINY, *SETTINGS, source)
    gang = start(*launcher("--devices-per-process=1"), *command, f"--run_dir={tmp_path / 'two'}", name="two")
    assert gang.wait(200) == 0, gang.text
    assert f"12 weights of hf:{folder}" in gang.text
    single = start(*command, f"--run_dir={tmp_path / 'one'}", "--devices=cpu:2", name="one")
    assert single.wait(200) == 0, single.text
    two, entry = steps(tmp_path / "two"), steps(tmp_path / "one")
    assert two.keys() == entry.keys() == {1, 2, 3}
    np.testing.assert_allclose(list(two.values()), list(entry.values()), rtol=1e-5)
