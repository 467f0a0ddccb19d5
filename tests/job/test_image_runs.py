"""A Qwen3-VL on conversations about images, from its data to an export."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_jobs import losses

from megajax import convert
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import load
from megajax.data.images.config import ImageTextConfig
from megajax.faults.config import ResilienceConfig
from megajax.interop.weights.formats import open_stored
from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig

NAMES, VOCABULARY = ("red", "green", "blue"), 258


def conversations(folder: Path) -> ImageTextConfig:
    """Images of one colour in many shapes, one or two in a line."""
    draw, lines = np.random.default_rng(0), []
    for number in range(60):
        colours, files = draw.integers(0, 3, draw.integers(1, 3)).tolist(), []
        for place, colour in enumerate(colours):
            pixels = np.zeros((*draw.integers(4, 40, 2), 3), np.uint8)
            pixels[..., colour] = 255
            files.append(f"{number}.{place}.png")
            Image.fromarray(pixels).save(folder / files[-1])
        question = " and ".join(["<image>"] * len(files))
        answer = " and ".join(NAMES[colour] for colour in colours)
        lines.append({"image": files, "conversations": [{"from": "human", "value": question},
                                                        {"from": "gpt", "value": answer}]})  # fmt: skip
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return ImageTextConfig(paths=(str(folder / "lines.jsonl"),), split="1", cache_dir=str(folder / "cache"))


def job(data: ImageTextConfig, folder: Path, **changes: Any) -> RunConfig:
    cfg = load("qwen3_vl.py:debug")
    settings = {
        "model": replace(cfg.model, sequence_length=96),
        "data": data,
        "parallel": ParallelConfig(data=1),
        "batch": BatchConfig(global_size=8, micro_size=2),
        "evaluation": EvaluationConfig(every=None),
        "checkpoint": CheckpointConfig(every=4),
        "logging": replace(cfg.logging, every=1, plot=False, sample=False, live="never"),
        "steps": 8,
        "run_dir": str(folder),
    }
    return cfg.but(**settings | changes)


def whole(weights: Any) -> dict[str, np.ndarray]:
    """Every weight by path, without the padding of the vocabulary."""
    boxes = {path: tuple(slice(0, size) for size in shape) for path, shape in weights.shapes.items()}
    boxes["tokens"] = (slice(0, VOCABULARY), boxes["tokens"][1])
    return {path: np.asarray(weights.read(path, box), np.float32) for path, box in boxes.items()}


@pytest.mark.slow
def test_a_run_on_images_from_start_to_export(tmp_path: Path) -> None:
    """It goes on after a stop, on another layout; its export has its weights."""
    data, run, halved = conversations(tmp_path), tmp_path / "run", tmp_path / "halved"
    assert train(job(data, run)) == 0
    assert train(job(data, halved, resilience=ResilienceConfig(exit_after_steps=4))) == 0
    assert train(job(data, halved, parallel=ParallelConfig(data=2, data_sharding="fsdp"))) == 0
    np.testing.assert_allclose(losses(halved), losses(run), rtol=1e-5)
    assert losses(run)[-1] < losses(run)[0] - 0.5

    assert convert.main([f"--from={halved}", f"--to=hf:{tmp_path / 'theirs'}"]) == 0
    stored, trained = open_stored(f"hf:{tmp_path / 'theirs'}"), whole(open_stored(halved).weights)
    exported = whole(stored.weights)
    assert exported.keys() == trained.keys()
    assert all((exported[path] == trained[path]).all() for path in exported)
