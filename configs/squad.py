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

import megajax as mj


def config() -> mj.RunConfig:
    """SQuAD 2.0."""
    return squad_v2()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return squad_v2_debug()


def squad_v1() -> mj.RunConfig:
    """SQuAD 1.1, 3 epochs of 87,599 questions."""
    return _tuned("v1", "1.1", steps=3 * 88_000 // 32, lr=5e-5)


def squad_v2() -> mj.RunConfig:
    """SQuAD 2.0, 2 epochs of 130,319 questions."""
    return _tuned("v2", "2.0", steps=2 * 132_000 // 48, rows=48, lr=5e-5)


def squad_v1_debug() -> mj.RunConfig:
    """squad_v1 in a tiny size, from fresh weights, on synthetic files."""
    return _debug(squad_v1())


def squad_v2_debug() -> mj.RunConfig:
    """squad_v2 in a tiny size."""
    return _debug(squad_v2())


def _tuned(name: str, version: Literal["1.1", "2.0"], *, steps: int, lr: float, rows: int = 32) -> mj.RunConfig:
    return mj.RunConfig(
        model=mj.with_text_head(mj.bert("base", sequence_length=384), mj.SpanHeadConfig()),
        data=mj.SquadConfig(path="data/squad", version=version),
        tokenizer=mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt"),
        optimizer=mj.AdamWConfig(weight_decay=0.01),
        schedule=mj.ScheduleConfig(lr=lr, style="linear", warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=rows, micro_size=2),
        evaluation=mj.EvaluationConfig(batches=0, tasks=(mj.SquadTaskConfig(),), tasks_every=1000),
        checkpoint=mj.CheckpointConfig(
            every=1000, weights=(mj.WeightsConfig(run="runs/bert_base", fresh=("head.*",)),)
        ),
        steps=steps,
        run_dir=f"runs/squad_{name}",
    )


def _debug(cfg: mj.RunConfig) -> mj.RunConfig:
    """Bytes as tokens, in windows of 64."""
    model = replace(mj.bert("debug", sequence_length=64, vocabulary_size=257, dropout=0.0), init_std=0.06)
    return mj.debug_config(
        cfg,
        mj.with_text_head(model, mj.SpanHeadConfig()),
        data=mj.MockSquadConfig(version=cfg.data.version, stride=16),
        tokenizer=mj.ByteTokenizerConfig(),
        schedule=mj.ScheduleConfig(lr=3e-3, style="linear", warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=32, micro_size=4),
        evaluation=mj.EvaluationConfig(batches=0, tasks=(mj.SquadTaskConfig(),), tasks_every=100),
        checkpoint=mj.CheckpointConfig(every=None),
        steps=300,
    )
