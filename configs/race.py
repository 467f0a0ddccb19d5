"""RACE (Lai et al. 2017): a trained BERT, tuned to choose one of four answers. `config()` is race_base.

The debug twins write synthetic files of the same format and start from fresh weights. The settings are those of
Megatron-LM's examples (Shoeybi et al. 2019): 3 epochs, questions with options of up to 128 tokens.

Prepare:  the run of bert.py as runs/bert_base with data/vocab.txt, and data/RACE with train/, dev/ and test/
Run:      python -m megajax.train --config=race.py
Laptop:   python -m megajax.train --config=race.py:debug
Test:     python -m megajax.evaluate --run=runs/race_base --tasks=race:test
Hardware: 8 GPUs with 80 GB; not yet run on GPUs
"""

from dataclasses import replace

import megajax as mj

QUESTIONS = 87_866
"""Of the training split."""
EPOCHS, ROWS = 3, 16


def config() -> mj.RunConfig:
    """The base size."""
    return race_base()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return race_base_debug()


def race_base() -> mj.RunConfig:
    """BERT base. 8 GPUs, data 8."""
    return _tuned("base", micro_size=2)


def race_large() -> mj.RunConfig:
    """BERT large. 8 GPUs, data 8."""
    return _tuned("large", micro_size=1)


def race_base_debug() -> mj.RunConfig:
    """race_base in a tiny size, from fresh weights, on synthetic files."""
    return _debug(race_base())


def race_large_debug() -> mj.RunConfig:
    """race_large in a tiny size."""
    return _debug(race_large())


def _tuned(size: str, micro_size: int) -> mj.RunConfig:
    steps = EPOCHS * QUESTIONS // ROWS
    return mj.RunConfig(
        model=mj.with_text_head(mj.bert(size), mj.ChoiceHeadConfig()),
        data=mj.RaceConfig(path="data/RACE"),
        tokenizer=mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt"),
        optimizer=mj.AdamWConfig(weight_decay=0.01),
        schedule=mj.ScheduleConfig(lr=1e-5, style="linear", warmup_fraction=0.06),
        batch=mj.BatchConfig(global_size=ROWS, micro_size=micro_size),
        evaluation=mj.EvaluationConfig(batches=0, tasks=(mj.RaceTaskConfig(),), tasks_every=steps // EPOCHS),
        checkpoint=mj.CheckpointConfig(
            every=1000, weights=(mj.WeightsConfig(run=f"runs/bert_{size}", fresh=("head.*",)),)
        ),
        steps=steps,
        run_dir=f"runs/race_{size}",
    )


def _debug(cfg: mj.RunConfig) -> mj.RunConfig:
    """Bytes as tokens, in sequences of 96."""
    model = replace(mj.bert("debug", sequence_length=96, vocabulary_size=257, dropout=0.0), init_std=0.06)
    return mj.debug_config(
        cfg,
        mj.with_text_head(model, mj.ChoiceHeadConfig()),
        data=mj.MockRaceConfig(),
        tokenizer=mj.ByteTokenizerConfig(),
        schedule=mj.ScheduleConfig(lr=2e-3, style="linear", warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=16, micro_size=2),
        evaluation=mj.EvaluationConfig(batches=0, tasks=(mj.RaceTaskConfig(),), tasks_every=50),
        checkpoint=mj.CheckpointConfig(every=None),
        steps=100,
    )
