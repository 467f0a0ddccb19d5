"""Runs with adapters beside quantized weights: from a run or a folder, merged and exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_jobs import losses, model, run_config

from megajax import convert
from megajax.checkpoint.config import CheckpointConfig
from megajax.interop.weights.fit import weights_of
from megajax.interop.weights.formats import open_stored
from megajax.interop.weights.model_parts import without_adapters
from megajax.job.job import train
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.low_rank import LORA_A, LORA_B
from megajax.layers.quantization.config import QuantizationConfig
from megajax.optim.config import AdamWConfig

MODEL = replace(
    model(dropout=0.0),
    lora=LoRAConfig(rank=2, alpha=4.0),
    quantization=QuantizationConfig(weights="nf4", group=4, double=True),
)


def whole(weights: Any, path: str) -> np.ndarray:
    return weights.read(path, tuple(slice(0, size) for size in weights.shapes[path]))


@pytest.mark.slow
def test_a_run_on_quantized_weights_from_start_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, run, theirs = (tmp_path / name for name in ("base", "run", "theirs"))
    assert train(run_config(base, model=model(dropout=0.0), steps=3)) == 0
    settings = {"model": MODEL, "steps": 4}
    settings["checkpoint"] = CheckpointConfig(load=base, parts="weights", every=2)
    capsys.readouterr()
    assert train(run_config(run, **settings)) == 0
    assert "quantized to nf4" in "".join(capsys.readouterr())

    assert convert.main([f"--from={base}", f"--to=hf:{theirs}"]) == 0
    from_folder = CheckpointConfig(load=Path(f"hf:{theirs}"), every=2)
    assert train(run_config(tmp_path / "from_folder", **settings | {"checkpoint": from_folder})) == 0
    np.testing.assert_allclose(losses(tmp_path / "from_folder"), losses(run), rtol=1e-6)

    trained, stored = open_stored(run).weights, open_stored(base).weights
    merged = weights_of(open_stored(run), without_adapters(MODEL))
    assert merged.shapes == stored.shapes
    query = "stack.blocks.0.mixer.query"
    dense = np.einsum("ldr,lrhk->ldhk", whole(trained, query + LORA_A), whole(trained, query + LORA_B))
    before = whole(merged, query) - MODEL.lora.scale() * dense
    assert 0.01 < np.abs(before - whole(stored, query)).max() / np.abs(before).max() < 0.3
    flags = [f"--from={run}", f"--to={tmp_path / 'merged'}", "--merge", "--verify"]
    assert convert.main(flags) == 0
    np.testing.assert_array_equal(whole(open_stored(tmp_path / "merged").weights, query), whole(merged, query))

    assert convert.main([f"--from={run}", f"--to=peft:{tmp_path / 'peft'}", f"--base=hf:{theirs}"]) == 0
    back = tmp_path / "back"
    assert convert.main([f"--from=peft:{tmp_path / 'peft'}", f"--base=hf:{theirs}", f"--to={back}"]) == 0
    np.testing.assert_array_equal(whole(open_stored(back).weights, query + LORA_B), whole(trained, query + LORA_B))


def test_what_quantized_weights_need_for_training() -> None:
    def problems(**changes: Any) -> list[tuple[str, str]]:
        cfg = run_config(**{"model": MODEL, "checkpoint": CheckpointConfig(load=Path("base"))} | changes)
        return [(problem.setting, problem.message) for problem in cfg.problems(1)]

    assert problems() == []
    ((setting, message),) = problems(checkpoint=CheckpointConfig())
    assert setting == "checkpoint.load" and "start from stored ones" in message
    ((setting, message),) = problems(model=replace(MODEL, lora=None))
    assert setting == "optimizer" and "quantized (nf4, model.quantization), which no optimizer can train" in message
    rounded = QuantizationConfig(weights="fp8", activations="fp8")
    assert [setting for setting, _ in problems(model=replace(MODEL, quantization=rounded))] == [
        "model.quantization.activations"
    ]
    assert problems(optimizer=AdamWConfig(trainable=("norm.gain",))) == []
