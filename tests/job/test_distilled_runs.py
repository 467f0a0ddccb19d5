"""Runs that learn from a teacher, beside them or stored: they start, resume, and export the student alone."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_jobs import losses, run_config

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.data.text.config import BlendConfig, TeacherFilesConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.faults.config import ResilienceConfig
from megajax.inference.config import GenerationConfig
from megajax.interop.origin import Origin, generation_config
from megajax.job.job import train
from megajax.models.distilled.config import TopKDistillationConfig, with_stored_teacher, with_teacher
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
    stored = "teacher_ids" in model.schema()
    data = TeacherFilesConfig(**data) if stored else BlendConfig(**data)
    settings = {"model": model, "data": data, "tokenizer": ByteTokenizerConfig(), **changes}
    return run_config(folder / name, **settings)


def command(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", f"megajax.{module}", *words], cwd=REPOSITORY, check=True)


def in_two_processes(module: str, *words: str) -> None:
    command("launch", "--processes=2", "--", "python", "-m", f"megajax.{module}", *words, "--devices=cpu:1")


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
    served = generation_config(Origin(run=folder / "beside"), GenerationConfig).base.model
    assert served == model.student() and not hasattr(served, "teacher")
    words = ["--prompt=ab", "--max-tokens=8", "--temperature=0"]
    answers = [
        subprocess.run(
            [sys.executable, "-m", "megajax.generate", place, *words], cwd=REPOSITORY, check=True, capture_output=True
        ).stdout
        for place in (f"--run={folder / 'beside'}", f"--hf={folder / 'beside_hf'}")
    ]
    assert answers[0] == answers[1] != b""


def test_a_stored_teacher_is_read_and_a_stopped_run_goes_on(folder: Path) -> None:
    task = f"--tasks=teacher:{folder / 'text'}:k=8"
    command("evaluate", f"--run={folder / 'teacher'}", task, "--devices=cpu:1", f"--output={folder / 'output'}")
    model = with_stored_teacher(STUDENT, TopKDistillationConfig(k=4, weight=0.5, label_weight=0.5))
    assert train(config(folder, "whole", model)) == 0
    stopping = ResilienceConfig(exit_after_steps=3)
    assert train(config(folder, "stopped", model, resilience=stopping)) == 0
    assert train(config(folder, "stopped", model)) == 0
    assert losses(folder / "stopped") == losses(folder / "whole")
    words = [f"--config={folder / 'whole' / 'config.yaml'}", f"--run_dir={folder / 'two'}", "--parallel.data=2"]
    in_two_processes("train", *words)
    np.testing.assert_allclose(losses(folder / "two"), losses(folder / "whole"), rtol=1e-5)
    assert "model.embed_tokens.weight" in exported(folder, "whole")


def test_two_processes_write_the_files_of_one(folder: Path) -> None:
    files = []
    for name, give in (("one", command), ("two", in_two_processes)):
        task = f"--tasks=teacher:{folder / 'text'}:k=8:folder={folder / name}"
        words = [f"--run={folder / 'teacher'}", task, "--parallel.data=none"]
        words.append(f"--output={folder / f'{name}_output'}")
        give("evaluate", *words)
        files.append(np.fromfile(folder / name / "text.teacher", "<i4").reshape(-1, 17))
    np.testing.assert_array_equal(files[0][:, :8], files[1][:, :8])
    log_p = [np.ascontiguousarray(words[:, 8:]).view("<f4") for words in files]
    np.testing.assert_allclose(log_p[0], log_p[1], rtol=0, atol=1e-5)
