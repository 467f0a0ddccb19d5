"""Two processes with one device each evaluate like one process: one writes, and both have the cached answers."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from gangs import launcher, started
from tiny_runs import LENGTH, VOCABULARY, llama

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import load
from megajax.config.dump import to_yaml
from megajax.data.text.config import MockConfig
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import NullTokenizerConfig
from megajax.training.config import BatchConfig
from megajax.training.program import Program
from megajax.training.run_config import RunConfig


def keep(cfg: RunConfig, folder: Path) -> None:
    """A run with fresh weights."""
    mesh = build_mesh(ParallelConfig(data=1))
    program = Program.of(cfg, mesh)
    with jax.set_mesh(mesh), CheckpointConfig().build(folder / "checkpoints") as manager:
        rows = [[chunk.start, chunk.stop] for chunk in program.partition.stored()]
        manager.save(1, program.fresh_state()(), {"rows": rows, "facts": {}})
    (folder / "config.yaml").write_text(to_yaml(cfg))


@pytest.mark.slow
def test_two_processes_write_the_predictions_of_one(tmp_path: Path) -> None:
    keep(load("glue.py:debug", f"data.path={tmp_path / 'files'}", f"run_dir={tmp_path / 'run'}"), tmp_path / "run")
    command = [sys.executable, "-m", "megajax.evaluate", f"--run={tmp_path / 'run'}", "--tasks=glue:validation"]
    with started(tmp_path) as start:
        for name, before in (("one", []), ("two", launcher())):
            run = start(*before, *command, "--devices=cpu:1", f"--output={tmp_path / name}", name=name)
            assert run.wait(400) == 0, run.text
    for file in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        single, two = ((tmp_path / name / "predictions/validation" / file).read_text() for name in ("one", "two"))
        assert single == two and len(single.splitlines()) == 81


@pytest.mark.slow
def test_two_processes_evaluate_as_one(tmp_path: Path) -> None:
    cfg = RunConfig(
        model=llama(),
        data=MockConfig(),
        tokenizer=NullTokenizerConfig(vocabulary_size=VOCABULARY),
        precision=PrecisionConfig(compute="float32"),
        batch=BatchConfig(global_size=4, micro_size=4),
    )
    keep(cfg, tmp_path / "run")
    draw = np.random.default_rng(0)
    texts = [" ".join(map(str, draw.integers(0, VOCABULARY - 1, size))) for size in draw.integers(2, LENGTH, 20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["megajax.evaluate", f"--run={tmp_path / 'run'}", f"--tasks=lambada:{tmp_path / 'texts.jsonl'}"]
    module = [sys.executable, "-m"]
    with started(tmp_path) as start:
        for name, before in (("one", module), ("two", [*launcher(), *module])):
            run = start(*before, *command, "--devices=cpu:1", f"--output={tmp_path / name}", name=name)
            assert run.wait(400) == 0, run.text
        second = start(*launcher(), *module, *command, "--devices=cpu:1", f"--output={tmp_path / 'two'}", name="3")
        assert second.wait(400) == 0, second.text
    assert "20 answers of an earlier attempt" in second.text
    single, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert (single["devices"], two["devices"]) == (1, 2)
    for name, figure in single["results"]["lambada"].items():
        assert two["results"]["lambada"][name]["value"] == pytest.approx(figure["value"], rel=1e-5), name
    assert second.text.count("results: ") == 1
