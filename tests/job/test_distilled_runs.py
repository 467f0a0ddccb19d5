"""A run that learns from a teacher starts, and exports the student alone."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_jobs import run_config

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.data.text.config import BlendConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.inference.config import GenerationConfig
from megajax.interop.weights.origin import generation_config
from megajax.job.job import train
from megajax.models.distilled.config import with_teacher
from megajax.models.presets.llama import llama3
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training.run_config import RunConfig

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

STUDENT = llama3("debug", sequence_length=16, vocabulary_size=257)
TEACHER = replace(STUDENT, hidden=2 * STUDENT.hidden)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files and a teacher."""
    folder, draw = tmp_path_factory.mktemp("distilled"), np.random.default_rng(0)
    with IndexedWriter(folder / "text", np.dtype("<u2")) as writer:
        for length in draw.integers(5, 60, 80):
            writer.add_document([draw.integers(32, 40, length)])
    assert train(config(folder, "teacher", TEACHER)) == 0
    return folder


def config(folder: Path, name: str, model: Any, **changes: Any) -> RunConfig:
    data = {"paths": (str(folder / "text"),), "split": "80,20,0", "cache_dir": str(folder / "cache")}
    settings = {"model": model, "data": BlendConfig(**data), "tokenizer": ByteTokenizerConfig(), **changes}
    return run_config(folder / name, **settings)


def command(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", f"megajax.{module}", *words], cwd=REPOSITORY, check=True)


def exported(folder: Path, name: str) -> dict[str, np.ndarray]:
    target = folder / f"{name}_hf"
    command("convert", f"--from={folder / name}", f"--to=hf:{target}", "--verify")
    assert json.loads((target / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    return load_file(target / "model.safetensors")


def test_a_run_beside_its_teacher_exports_the_student_alone(folder: Path) -> None:
    weights = (WeightsConfig(run=folder / "teacher", into="teacher"),)
    model = with_teacher(STUDENT, TEACHER)
    assert train(config(folder, "beside", model, checkpoint=CheckpointConfig(weights=weights))) == 0
    tensors, alone = exported(folder, "beside"), exported(folder, "teacher")
    assert tensors.keys() == alone.keys() and not any("teacher" in name for name in tensors)
    assert tensors["model.embed_tokens.weight"].shape == (257, STUDENT.hidden)
    assert alone["model.embed_tokens.weight"].shape == (257, TEACHER.hidden)
    served = generation_config(folder / "beside", GenerationConfig).base.model
    assert served == model.student() and not hasattr(served, "teacher")
    words = ["--prompt=ab", "--max-tokens=8", "--temperature=0"]
    answers = [
        subprocess.run(
            [sys.executable, "-m", "megajax.generate", place, *words], cwd=REPOSITORY, check=True, capture_output=True
        ).stdout
        for place in (f"--run={folder / 'beside'}", f"--hf={folder / 'beside_hf'}")
    ]
    assert answers[0] == answers[1] != b""
