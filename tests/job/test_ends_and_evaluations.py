"""Attempts that end early on their own, and evaluation on several sets and on all rows."""

import numpy as np
import pytest
from run_folder import lines
from small_jobs import VOCABULARY, run_config
from user_errors import user_error

from megajax.command_line.parser import parse
from megajax.config.compose import check
from megajax.config.errors import ConfigError
from megajax.data.text.config import BlendConfig, MockConfig
from megajax.data.text.indexed_dataset import IndexedWriter
from megajax.job.hooks import Evaluate, PaddedRows
from megajax.job.job import train
from megajax.job.notebook import prepare, set_up
from megajax.metrics.config import LoggingConfig
from megajax.training.config import EvaluationConfig


@pytest.mark.parametrize(
    ("evaluation", "logging", "evaluated"),
    [({"at_end": True}, {"sample": False}, True), ({"every": 6, "at_end": False}, {"prompt": "1 2"}, False)],
    ids=["evaluated", "sampled"],
)
def test_what_happens_at_the_end(evaluation, logging, evaluated, tmp_path, capsys):
    cfg = run_config(
        tmp_path,
        evaluation=EvaluationConfig(batches=1, **evaluation),
        logging=LoggingConfig(plot=False, report=False, **logging),
    )
    assert train(cfg, sampler=lambda run, folder: "a sample") == 0
    assert ("a sample" in capsys.readouterr().out) != evaluated
    assert bool([line for line in lines(tmp_path) if line.get("split") == "test"]) == evaluated


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "other"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        random = np.random.default_rng(0)
        for _ in range(30):
            writer.add_document([random.integers(0, VOCABULARY, 13).astype(np.uint16)])
    return str(prefix)


def test_several_validation_sets_are_reported_by_name(corpus, tmp_path, capsys):
    """The sample and the report of the end fail, which does not fail the run."""

    def fails(*_):
        raise IndexError("too few rows")

    sets = {
        "other": BlendConfig(valid_paths=(corpus,), cache_dir=str(tmp_path / "cache")),
        "same": MockConfig(documents=300),
    }
    logging = LoggingConfig(plot=False, sample=True)
    cfg = run_config(tmp_path / "run", evaluation=EvaluationConfig(every=3, batches=1, sets=sets), logging=logging)
    assert train(cfg, sampler=fails, reporter=fails) == 0
    again = f"to try again, run python -m megajax.report {tmp_path / 'run'}"
    out = capsys.readouterr().out
    assert "no sample: IndexError: too few rows" in out and f"no report: too few rows; {again}" in out
    losses = {line["split"]: line["loss"] for line in lines(tmp_path / "run") if "split" in line}
    assert list(losses) == ["validation", "other", "same", "test"]
    assert losses["same"] == losses["validation"] != losses["other"]


def test_full_validation_counts_every_row_once(corpus, tmp_path):
    data = BlendConfig(valid_paths=(corpus,), train_paths=(corpus,), drop_last=False, cache_dir=str(tmp_path / "cache"))
    cfg = run_config(tmp_path, data=data, evaluation=EvaluationConfig(full=True))
    run = set_up(cfg)
    source = run.parts.splits.valid
    assert len(source) % 8  # 390 tokens in rows of 16: not a whole number of batches
    measure = Evaluate(cfg.evaluation, type("Log", (), {"log": lambda *_: None, "event": lambda *_, **__: None})())
    measure.at_end(run, 0)
    sums = np.zeros(2)
    for row in range(len(source)):
        tokens, labels, mask = (source[row][name] for name in ("tokens", "labels", "loss_mask"))
        logits = np.asarray(run.model(tokens[None]))[0].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        sums += [-(logits[np.arange(16), labels] * mask).sum(), mask.sum()]
    run.close()
    assert measure.last["validation"]["loss"] == pytest.approx(sums[0] / sums[1], rel=1e-5)
    filled = PaddedRows(source, 8)
    assert len(filled) % 8 == 0
    assert filled[len(filled) - 1]["loss_mask"].sum() == 0
    assert filled[0] is not None and source[0]["loss_mask"].sum() > 0


class Unweighted(MockConfig):
    def leaves(self) -> dict[str, str]:
        return {name: dtype for name, dtype in super().leaves().items() if name != "loss_mask"}


def test_full_validation_needs_rows_without_weight():
    with user_error("data", kind=ConfigError):
        check(run_config(data=Unweighted(), evaluation=EvaluationConfig(full=True)), 1)


def test_validation_sets_on_the_command_line(tmp_path):
    text = "--evaluation.sets={code: {type: BlendConfig, valid_paths: [a, b]}}"
    cfg = parse(["--config=gpt2.py:debug", text], verb="train").config
    assert cfg.evaluation.sets["code"].valid_paths == ("a", "b")


@pytest.mark.parametrize(
    ("sets", "listed"),
    [
        ({"test": MockConfig()}, "test is the name of a split"),
        ({"a b": MockConfig()}, "'a b' is not made of letters"),
        ({"code": BlendConfig()}, "evaluation.sets.code.paths: names no data path"),
        ({"code": MockConfig(isolate_documents=True)}, "segment_ids come with isolate_documents=true"),
    ],
    ids=["reserved", "blank", "empty", "isolated"],
)
def test_invalid_sets_are_named(sets, listed):
    with pytest.raises(ConfigError) as raised:
        check(run_config(evaluation=EvaluationConfig(sets=sets)))
    assert listed in str(raised.value)


def test_a_set_without_a_validation_split_is_refused(corpus, tmp_path):
    data = BlendConfig(train_paths=(corpus,), cache_dir=str(tmp_path / "cache"))
    with user_error("evaluation.sets.code"):
        prepare(run_config(evaluation=EvaluationConfig(sets={"code": data})))


def test_a_prompt_without_tokens_is_refused_before_training():
    with user_error("logging.prompt"):
        prepare(run_config(logging=LoggingConfig(prompt="def ")))
