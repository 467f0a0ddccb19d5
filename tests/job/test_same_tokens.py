"""A teacher or a reference model with other tokens is refused, with both values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_jobs import model, run_config
from user_errors import user_error

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.config.dump import to_yaml
from megajax.data.chat.config import MockPreferencesConfig
from megajax.job.job import train
from megajax.job.start.equal_inputs import demand_same_tokens
from megajax.models.answers.config import DPOConfig, with_objective
from megajax.models.distilled.config import with_teacher
from megajax.tokenizers.config import ByteTokenizerConfig, NullTokenizerConfig, WordPieceTokenizerConfig


def words(folder: Path, *names: str) -> WordPieceTokenizerConfig:
    """A tokenizer of as many tokens as the byte tokenizer has."""
    text = [*names, "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    file = folder / f"{'_'.join(names)}.txt"
    file.write_text("\n".join(text + [f"w{n}" for n in range(255 - len(text))]))
    return WordPieceTokenizerConfig(vocabulary=str(file))


def run_of(folder: Path, tokenizer: Any) -> Path:
    """A run folder, for its settings alone."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(run_config(folder, tokenizer=tokenizer)))
    return folder


def test_tokens_are_compared_by_their_texts(tmp_path: Path) -> None:
    """Two files with the same tokens are the same tokenizer."""
    first, second = words(tmp_path, "one", "two"), words(tmp_path, "one", "three")
    run = run_of(tmp_path / "run", first)
    lines = list[str]()
    for equal in (first, replace(first, lower=False)):
        demand_same_tokens(equal.build(), run, "the teacher", lines.append)
    assert not lines
    with user_error():
        demand_same_tokens(second.build(), run, "the teacher", lines.append)
    demand_same_tokens(NullTokenizerConfig(vocabulary_size=257).build(), run, "the teacher", lines.append)
    demand_same_tokens(first.build(), tmp_path, "the teacher", lines.append)
    demand_same_tokens(first.build(), tmp_path / "absent", "the teacher", lines.append)
    assert len(lines) == 2 and all("its tokens are not compared" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["the teacher", "the reference model"])
def test_runs_compare_them(role: str, tmp_path: Path) -> None:
    small = model(repeats=1, vocabulary_size=257, sequence_length=64, dropout=0.0)
    settings: dict[str, Any] = {"model": small, "steps": 3, "tokenizer": words(tmp_path, "one", "two")}
    assert train(run_config(tmp_path / "stored", **settings)) == 0
    settings["tokenizer"] = ByteTokenizerConfig()
    source = WeightsConfig(run=tmp_path / "stored", into="teacher" if role == "the teacher" else "")
    if role == "the teacher":
        settings["model"] = with_teacher(small, small)
    else:
        settings["model"] = with_objective(small, DPOConfig())
        settings["data"] = MockPreferencesConfig(lines=60, cache_dir=str(tmp_path / "cache"))
    with user_error():
        train(run_config(tmp_path / "run", **settings, checkpoint=CheckpointConfig(weights=(source,))))
    assert not [*(tmp_path / "run" / "checkpoints").glob("0*")]
