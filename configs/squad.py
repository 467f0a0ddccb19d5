"""SQuAD (Rajpurkar et al. 2016, 2018): a trained BERT, tuned to answer from a text. `config()` is squad_v2.

The debug twins write synthetic files of the same format and start from fresh weights. The settings are those of Devlin
et al. (2019): windows of 384 tokens with a stride of 128, 3 and 2 epochs.

Prepare:  the run of bert.py as runs/bert_base with data/vocab.txt, and data/squad with the .json files
Run:      python -m megajax.train --config=squad.py
Laptop:   python -m megajax.train --config=squad.py:debug
Hardware: 8 GPUs; not yet run on GPUs
"""

from dataclasses import replace
from typing import Literal

from megajax.checkpoint.config import CheckpointConfig, WeightsConfig
from megajax.data.configs import MockSquadConfig, SquadConfig
from megajax.models.classifier.config import with_head
from megajax.models.configs import SpanHeadConfig
from megajax.models.presets.bert import bert
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tasks.config import SquadTaskConfig
from megajax.tokenizers.config import ByteTokenizerConfig, WordPieceTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.presets import debug_config
from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    """SQuAD 2.0."""
    return squad_v2()


def debug() -> RunConfig:
    """The debug twin of `config()`."""
    return squad_v2_debug()


def squad_v1() -> RunConfig:
    """SQuAD 1.1, 3 epochs of 87,599 questions."""
    return _tuned("v1", "1.1", steps=3 * 88_000 // 32, lr=5e-5)


def squad_v2() -> RunConfig:
    """SQuAD 2.0, 2 epochs of 130,319 questions."""
    return _tuned("v2", "2.0", steps=2 * 132_000 // 48, rows=48, lr=5e-5)


def squad_v1_debug() -> RunConfig:
    """squad_v1 in a tiny size, from fresh weights, on synthetic files."""
    return _debug(squad_v1())


def squad_v2_debug() -> RunConfig:
    """squad_v2 in a tiny size."""
    return _debug(squad_v2())


def _tuned(name: str, version: Literal["1.1", "2.0"], *, steps: int, lr: float, rows: int = 32) -> RunConfig:
    return RunConfig(
        model=with_head(bert("base", sequence_length=384), SpanHeadConfig()),
        data=SquadConfig(path="data/squad", version=version),
        tokenizer=WordPieceTokenizerConfig(vocabulary="data/vocab.txt"),
        optimizer=AdamWConfig(weight_decay=0.01),
        schedule=ScheduleConfig(lr=lr, style="linear", warmup_fraction=0.1),
        batch=BatchConfig(global_size=rows, micro_size=2),
        evaluation=EvaluationConfig(batches=0, tasks=(SquadTaskConfig(),), tasks_every=1000),
        checkpoint=CheckpointConfig(every=1000, weights=(WeightsConfig(run="runs/bert_base", fresh=("head.*",)),)),
        steps=steps,
        run_dir=f"runs/squad_{name}",
    )


def _debug(cfg: RunConfig) -> RunConfig:
    """Bytes as tokens, in windows of 64."""
    model = replace(bert("debug", sequence_length=64, vocabulary_size=257, dropout=0.0), init_std=0.06)
    return debug_config(
        cfg,
        with_head(model, SpanHeadConfig()),
        data=MockSquadConfig(version=cfg.data.version, stride=16),
        tokenizer=ByteTokenizerConfig(),
        schedule=ScheduleConfig(lr=3e-3, style="linear", warmup_fraction=0.1),
        batch=BatchConfig(global_size=32, micro_size=4),
        evaluation=EvaluationConfig(batches=0, tasks=(SquadTaskConfig(),), tasks_every=100),
        checkpoint=CheckpointConfig(every=None),
        steps=300,
    )
