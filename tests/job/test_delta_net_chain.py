"""The debug twin of Qwen3-Next: trained, resumed on another layout, exported and back, and generated from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_jobs import losses, run_config

from megajax.faults.config import ResilienceConfig
from megajax.inference.config import GenerationConfig, InferenceParallelConfig
from megajax.inference.sampling_settings import Sampling
from megajax.inference.worker import complete
from megajax.interop import conversion
from megajax.interop.loading import load, start_engine
from megajax.interop.weights.origin import generation_config
from megajax.job.job import train
from megajax.mesh.config import ParallelConfig
from megajax.models.presets.qwen import qwen3_next
from megajax.training.config import EvaluationConfig

MODEL = replace(qwen3_next("debug", sequence_length=16, vocabulary_size=64), init_std=0.1)
LAYOUT = ParallelConfig(data=1, expert=2, context=2, data_sharding="fsdp")
FEW = {"evaluation": EvaluationConfig(every=None), "steps": 4}


def tokens(origin: str) -> list[list[int]]:
    """Greedy answers to two prompts."""
    config: GenerationConfig = generation_config(origin, GenerationConfig).base
    settings = replace(config.inference, compute="float32", rows=2, chunk=6, block=4, cache_tokens=64)
    loaded = load(replace(config, inference=settings, parallel=InferenceParallelConfig(data=1)), origin)
    sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    answers = complete(start_engine(loaded, queue=2), [((3, 1, 4, 1, 5), sampling), ((2, 7), sampling)])
    return [list(answer.tokens) for (answer,) in answers]


def convert(source: str, target: str) -> None:
    conversion.write(conversion.open_source(source), target, conversion.Options(), lambda _: None)


@pytest.mark.slow
def test_from_training_to_transformers_and_back(tmp_path: Path) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert train(run_config(whole, model=MODEL, **FEW)) == 0
    assert train(run_config(halved, model=MODEL, resilience=ResilienceConfig(exit_after_steps=2), **FEW)) == 0
    assert train(run_config(halved, model=MODEL, parallel=LAYOUT, **FEW)) == 0
    np.testing.assert_allclose(losses(halved), losses(whole), rtol=1e-4)

    exported, back, again = tmp_path / "exported", tmp_path / "back", tmp_path / "again"
    convert(str(halved), f"hf:{exported}")
    convert(f"hf:{exported}", str(back))
    convert(str(back), f"hf:{again}")
    first, second = (load_file(folder / "model.safetensors") for folder in (exported, again))
    assert {name: x.tobytes() for name, x in first.items()} == {name: x.tobytes() for name, x in second.items()}
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in first
    answers = [tokens(origin) for origin in (str(halved), f"hf:{exported}")]
    assert answers[0] == answers[1] and len(answers[0][0]) == 6
