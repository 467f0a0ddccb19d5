"""Runs on synthetic files of GLUE, RACE and SQuAD: starts from a pretrained BERT, metrics, predictions, evaluations."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from user_errors import user_error

from megajax.checkpoint.checkpoint_manager import CheckpointManager
from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.config import load
from megajax.config.errors import UserError
from megajax.data.language_benchmarks.config import GlueConfig, MockGlueConfig
from megajax.data.rows.config import LoaderConfig
from megajax.data.rows.splits import Splits
from megajax.interop.weights.fit import all_weights
from megajax.interop.weights.model_differences import differences
from megajax.job.job import train
from megajax.job.notebook import set_up
from megajax.job.start.resume import checkpoint_meta
from megajax.job.start.weights import InitialWeights
from megajax.models.classifier.config import ClassHeadConfig, with_text_head
from megajax.models.presets.encoders import bert
from megajax.tasks.config import GlueTaskConfig, LambadaConfig, RaceTaskConfig, SquadTaskConfig
from megajax.tasks.evaluate_command import Evaluation, evaluate
from megajax.training.run_config import RunConfig
from megajax.training.scorer import Scorer
from megajax.training.session import Run

LENGTH = 32


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Eight rows of random tokens for BERT's pretraining."""

    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def leaves(self) -> dict[str, str]:
        return {name: leaf.dtype for name, leaf in pretraining().schema().items()}

    def build(self, **parts: Any) -> Splits:
        rng, schema = np.random.default_rng(0), pretraining().schema()
        row = {name: rng.integers(0, 2, leaf.shape).astype(leaf.dtype) for name, leaf in schema.items()}
        return Splits([row] * 8, None, None)


def pretraining():
    return bert("debug", sequence_length=2 * LENGTH, vocabulary_size=257, dropout=0.0)


def tuning(**changes: Any) -> RunConfig:
    model = with_text_head(replace(pretraining(), sequence_length=LENGTH), ClassHeadConfig(classes=2))
    settings = {"model": model, "batch.global_size": 8, "steps": 1} | changes
    return replace(
        load("glue.py:glue_rte_debug", *[f"{k}={v}" for k, v in settings.items() if "." in k]),
        **{name: value for name, value in settings.items() if "." not in name},
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> tuple[Path, Mapping[str, np.ndarray]]:
    """A run of BERT's pretraining with a checkpoint, and its weights."""
    folder = tmp_path_factory.mktemp("pretrained")
    run = set_up(tuning(model=pretraining(), data=MaskedRows(), run_dir=str(folder)), devices=jax.devices()[:1])
    with CheckpointManager(CheckpointConfig(), folder / "checkpoints") as manager:
        manager.save(1, run.state, checkpoint_meta(run.parts, ""))
    run.close()
    return folder, {path: np.asarray(weight) for path, weight in run.state.params.items()}


@pytest.fixture(scope="module")
def tuned(pretrained, tmp_path_factory) -> Run:
    """A classifier before its first step."""
    source = WeightsConfig(run=pretrained[0], fresh=("head.*",))
    data = MockGlueConfig(task="rte", path=str(tmp_path_factory.mktemp("files")))
    cfg = tuning(checkpoint=CheckpointConfig(weights=(source,)), data=data)
    return set_up(cfg, devices=jax.devices()[:1], start=InitialWeights(cfg.checkpoint.weights, print))


def test_a_classifier_starts_from_a_pretrained_bert_with_a_fresh_head(pretrained, tuned):
    params = tuned.state.params
    assert set(params) - set(pretrained[1]) == {"head.linear.matrix", "head.linear.bias"}
    np.testing.assert_array_equal(params["positions"], pretrained[1]["positions"][:LENGTH])
    for path in set(params) & set(pretrained[1]) - {"positions"}:
        np.testing.assert_array_equal(params[path], pretrained[1][path])
    assert np.any(params["pooler.matrix"]) and np.any(params["head.linear.matrix"])


def test_only_the_head_differs_from_the_model_of_another_library():
    names = [difference.name for difference in differences(tuning().model, pretraining())]
    assert all(fnmatchcase(name, "head.*") or name == "sequence_length" for name in names) and len(names) > 1


def test_outputs_of_rows_do_not_depend_on_their_batches(tuned, tmp_path):
    scorer = Scorer(tuned.program, tuned.parts.tokenizer, tuned.state.inputs, folder=tmp_path)
    rows = [tuned.parts.splits.train[number] for number in range(8)]
    batch, single = scorer.outputs(rows), scorer.outputs(rows[7:])
    assert batch["scores"].shape == (8, 2) and batch["losses"].shape == (8,)
    np.testing.assert_allclose(batch["scores"][7:], single["scores"], atol=1e-6)
    leaves = {name: np.stack([row[name] for row in rows]) for name in ("tokens", "segment_ids", "token_types")}
    np.testing.assert_allclose(batch["scores"], tuned.model(**leaves), atol=1e-5)
    figures = GlueTaskConfig().build(scorer)()
    table = (tmp_path / "predictions/validation/RTE.tsv").read_text().splitlines()
    assert table[0] == "index\tprediction" and len(table) == 81 == 1 + figures["accuracy"].count
    labels = [line.split("\t")[-1] for line in (Path(tuned.cfg.data.folder()) / "dev.tsv").read_text().splitlines()[1:]]
    predicted = [line.split("\t")[1] for line in table[1:]]
    assert figures["accuracy"].value == np.mean([a == b for a, b in zip(labels, predicted, strict=True)])
    test = GlueTaskConfig(split="test").build(scorer)()
    assert test["predictions"].value == 40 and (tmp_path / "predictions/test/RTE.tsv").is_file()


def test_tasks_for_other_data_or_other_models_are_refused(tuned, tmp_path):
    scorer = Scorer(tuned.program, tuned.parts.tokenizer, tuned.state.inputs)
    for task, kind in ((RaceTaskConfig(), "RaceConfig"), (SquadTaskConfig(), "SquadConfig")):
        with pytest.raises(UserError, match=f"evaluates runs on {kind}, but this run's is MockGlueConfig"):
            task.build(scorer)
    with user_error():
        LambadaConfig(path=str(tmp_path)).build(scorer)
    regression = tuning(data=GlueConfig(task="stsb", path="x"))
    assert any("makes labels of dtype float32" in problem.message for problem in regression.problems())


def lines_of(folder: Path, split: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("split") == split]


@pytest.mark.slow
def test_a_tiny_bert_learns_synthetic_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task, metric, file = "glue", "accuracy_mismatched", "MNLI-mm.tsv"
    cfg = load("glue.py:debug", "run_dir=run", "logging.plot=false", "logging.report=false", "logging.every=50")
    assert train(cfg) == 0
    last = lines_of(Path("run"), task)[-1]
    assert last[metric] >= 0.95 and last["loss"] < 0.5
    assert (tmp_path / "run/predictions/validation" / file).is_file()
    assert evaluate(cfg, Evaluation(Path("run"), cfg.evaluation.tasks, Path("out"), cache=False), all_weights) == 0
    figures = json.loads((tmp_path / "out/results.json").read_text())["results"][task]
    np.testing.assert_allclose(figures[metric]["value"], last[metric])
    files = [Path(folder, "predictions/validation", file).read_bytes() for folder in ("run", "out")]
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_tiny_bert_learns_synthetic_questions(tmp_path):
    cfg = load("squad.py:debug", "batch.micro_size=16", f"data.path={tmp_path}", devices=1)
    run = set_up(cfg, devices=jax.devices()[:1])
    for _ in run.steps():
        pass
    run.close()
    scorer = Scorer(run.program, run.parts.tokenizer, run.state.inputs, folder=tmp_path)
    figures = cfg.evaluation.tasks[0].build(scorer)()
    assert figures["f1"].value >= 90.0 and figures["loss"].value < 0.5
    assert len(list((tmp_path / "predictions/validation").iterdir())) == 3
