"""Runs of preference optimization: the reference model is scored once, and a run that resumes reads it."""

import json
from pathlib import Path
from typing import Any

import gangs
import numpy as np
import pytest
from small_jobs import losses, model, run_config
from user_errors import user_error

from megajax.checkpoint.reader import open_checkpoints
from megajax.data.chat.config import MockPreferencesConfig
from megajax.faults.config import ResilienceConfig
from megajax.job.job import train
from megajax.layers.lora.config import LoRAConfig
from megajax.models.answers.config import DPOConfig, KTOConfig, with_objective
from megajax.tokenizers.config import ByteTokenizerConfig
from megajax.training import reference
from megajax.training.run_config import RunConfig

pytestmark = pytest.mark.slow


def config(folder: Path, name: str = "run", objective: Any = None, **changes: Any) -> RunConfig:
    """Four steps on synthetic preferences."""
    small = model(repeats=1, vocabulary_size=257, sequence_length=64, dropout=0.0, lora=changes.pop("lora", None))
    objective = objective or DPOConfig(beta=0.5)
    kind = "judged" if isinstance(objective, KTOConfig) else "pairs"
    settings = {
        "model": with_objective(small, objective),
        "tokenizer": ByteTokenizerConfig(),
        "data": MockPreferencesConfig(lines=60, answers=kind, cache_dir=str(folder / "cache")),
        "steps": 4,
    }
    return run_config(folder / name, **settings | changes)


def scores(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "mock_preferences" / "reference").glob("*.scores"))


def forbidden(*arguments: Any) -> None:
    raise AssertionError("scored again")


def test_a_run_scores_its_reference_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed after two steps, it has the losses of a run in one piece, which reads the same file.

    Without the file it is refused.
    """
    stopping = ResilienceConfig(exit_after_steps=2)
    assert train(config(tmp_path, resilience=stopping)) == 0
    assert losses(tmp_path / "run")[0] == pytest.approx(np.log(2), rel=1e-6)
    (file,) = scores(tmp_path)
    (step,) = open_checkpoints(tmp_path / "run")[0].steps()
    checksum = open_checkpoints(tmp_path / "run")[0].meta(step)["reference"]
    assert json.loads(file.with_suffix(".json").read_text())["weights"] == checksum
    monkeypatch.setattr(reference, "score", forbidden)
    moved = file.rename(tmp_path / file.name)
    with user_error():
        train(config(tmp_path))
    moved.rename(file)
    assert train(config(tmp_path)) == 0
    assert train(config(tmp_path, "whole")) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-6)
    assert losses(tmp_path / "run")[-1] < np.log(2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {"accuracy", "margin", "reward_chosen", "reward_rejected", "log_p_chosen", "log_p_rejected", "kl"}
    assert all(names <= line.keys() for line in lines)
    assert {line["split"] for line in lines if "split" in line} == {"validation"}


def test_adapters_are_compared_with_their_frozen_base(tmp_path: Path) -> None:
    """A lost file would be computed again, from the weights of a resumed run."""
    lora = LoRAConfig(rank=2)
    stopping = ResilienceConfig(exit_after_steps=2)
    assert train(config(tmp_path, lora=lora, resilience=stopping)) == 0
    (file,) = scores(tmp_path)
    content = np.frombuffer(file.read_bytes(), "<f4").copy()
    file.unlink()
    assert train(config(tmp_path, lora=lora)) == 0
    np.testing.assert_array_equal(np.frombuffer(file.read_bytes(), "<f4"), content)
    assert losses(tmp_path / "run")[0] == pytest.approx(np.log(2), rel=1e-6)


def test_an_interrupted_computation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after a batch of rows, the next start computes the others."""
    add, count = reference.ScoresFile.add, []

    def dying(self: reference.ScoresFile, rows: np.ndarray) -> None:
        add(self, rows)
        count.append(len(rows))
        if len(count) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(reference.ScoresFile, "add", dying)
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path, steps=3))
    assert not scores(tmp_path)
    assert train(config(tmp_path, steps=3)) == 0
    (file,) = scores(tmp_path)
    assert sum(count) * 65 * 4 == file.stat().st_size and len(count) > 2


def test_kto(tmp_path: Path) -> None:
    assert train(config(tmp_path, objective=KTOConfig(beta=0.5))) == 0
    trained = losses(tmp_path / "run")
    assert trained[0] == pytest.approx(0.5, rel=1e-6) and trained[-1] < 0.5


def test_two_processes(tmp_path: Path) -> None:
    """The first run computes the log-probabilities, the second has those that process 0 reads."""
    trained = []
    for name in ("first", "second"):
        settings = [
            *("--config=dpo.py:debug", "--devices=cpu:1", f"--run_dir={tmp_path / name}", "--steps=2"),
            *(
                "--evaluation.batches=0",
                "--schedule.warmup_fraction=0",
                "--batch.micro_size=4",
                "--logging.report=false",
            ),
            *("--data.lines=60", f"--data.cache_dir={tmp_path / 'cache'}", "--xla=xla_cpu_enable_fast_math=false"),
        ]
        with gangs.started(tmp_path) as begin:
            gang = begin(*gangs.launcher(processes=2), *gangs.TRAIN, *settings)
            assert gang.wait(400) == 0, gang.text
        assert ("rows scored now" if name == "first" else "log-probabilities: read") in gang.text
        trained.append(gangs.losses(tmp_path / name))
    assert trained[0] == trained[1]
    assert trained[0][1] == pytest.approx(np.log(2), rel=1e-6) and trained[0][2] < np.log(2)
