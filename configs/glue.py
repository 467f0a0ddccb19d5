"""GLUE (Wang et al. 2019): a trained BERT, tuned on one of its tasks. `config()` is MNLI; docs/tuning.md has the files.

A function per task, with a debug twin that writes synthetic files of the same format and starts from fresh weights. The
settings are those of Devlin et al. (2019): 3 epochs of batches of 32.

Prepare:  the run of bert.py as runs/bert_base with data/vocab.txt, and the task's folder, such as data/glue/MNLI
Run:      python -m megajax.train --config=glue.py:glue_mrpc
Laptop:   python -m megajax.train --config=glue.py:debug
Predict:  python -m megajax.evaluate --run=runs/glue_mrpc --tasks=glue:test
Hardware: one GPU; not yet run on one
"""

from dataclasses import replace

import megajax as mj

EPOCHS, ROWS = 3, 32


def config() -> mj.RunConfig:
    """MNLI."""
    return glue_mnli()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return glue_mnli_debug()


def glue_mnli() -> mj.RunConfig:
    """Whether a sentence follows from another one, contradicts it, or neither."""
    return _tuned("mnli", "MNLI", 392_702)


def glue_qqp() -> mj.RunConfig:
    """Whether two questions ask the same."""
    return _tuned("qqp", "QQP", 363_846)


def glue_qnli() -> mj.RunConfig:
    """Whether a sentence answers a question."""
    return _tuned("qnli", "QNLI", 104_743)


def glue_sst2() -> mj.RunConfig:
    """Whether a sentence of a film review is positive."""
    return _tuned("sst2", "SST-2", 67_349)


def glue_cola() -> mj.RunConfig:
    """Whether a sentence is acceptable English."""
    return _tuned("cola", "CoLA", 8_551)


def glue_stsb() -> mj.RunConfig:
    """How similar two sentences are, from 0 to 5."""
    return _tuned("stsb", "STS-B", 5_749)


def glue_mrpc() -> mj.RunConfig:
    """Whether two sentences say the same."""
    return _tuned("mrpc", "MRPC", 3_668)


def glue_rte() -> mj.RunConfig:
    """Whether a sentence follows from another one."""
    return _tuned("rte", "RTE", 2_490)


def glue_wnli() -> mj.RunConfig:
    """Whether a sentence with its pronoun replaced follows."""
    return _tuned("wnli", "WNLI", 635)


def glue_mnli_debug() -> mj.RunConfig:
    """glue_mnli in a tiny size, from fresh weights, on synthetic files."""
    return _debug(glue_mnli())


def glue_qqp_debug() -> mj.RunConfig:
    """glue_qqp in a tiny size."""
    return _debug(glue_qqp())


def glue_qnli_debug() -> mj.RunConfig:
    """glue_qnli in a tiny size."""
    return _debug(glue_qnli())


def glue_sst2_debug() -> mj.RunConfig:
    """glue_sst2 in a tiny size."""
    return _debug(glue_sst2())


def glue_cola_debug() -> mj.RunConfig:
    """glue_cola in a tiny size."""
    return _debug(glue_cola())


def glue_stsb_debug() -> mj.RunConfig:
    """glue_stsb in a tiny size."""
    return _debug(glue_stsb())


def glue_mrpc_debug() -> mj.RunConfig:
    """glue_mrpc in a tiny size."""
    return _debug(glue_mrpc())


def glue_rte_debug() -> mj.RunConfig:
    """glue_rte in a tiny size."""
    return _debug(glue_rte())


def glue_wnli_debug() -> mj.RunConfig:
    """glue_wnli in a tiny size."""
    return _debug(glue_wnli())


def _head(task: str) -> mj.ClassHeadConfig | mj.RegressionHeadConfig:
    """STS-B's labels are numbers, MNLI has three classes, and the other tasks have two."""
    return mj.RegressionHeadConfig() if task == "stsb" else mj.ClassHeadConfig(classes=3 if task == "mnli" else 2)


def _tuned(task: str, folder: str, examples: int) -> mj.RunConfig:
    steps = EPOCHS * examples // ROWS
    return mj.RunConfig(
        model=mj.with_text_head(mj.bert("base", sequence_length=128), _head(task)),
        data=mj.GlueConfig(task=task, path=f"data/glue/{folder}"),
        tokenizer=mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt"),
        optimizer=mj.AdamWConfig(weight_decay=0.01),
        schedule=mj.ScheduleConfig(lr=2e-5, style="linear", warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=ROWS, micro_size=ROWS),
        evaluation=mj.EvaluationConfig(batches=0, tasks=(mj.GlueTaskConfig(),), tasks_every=max(1, steps // EPOCHS)),
        checkpoint=mj.CheckpointConfig(
            every=steps // EPOCHS, weights=(mj.WeightsConfig(run="runs/bert_base", fresh=("head.*",)),)
        ),
        steps=steps,
        run_dir=f"runs/glue_{task}",
    )


def _debug(cfg: mj.RunConfig) -> mj.RunConfig:
    """Bytes as tokens, in rows of 64."""
    task = cfg.data.task
    model = replace(mj.bert("debug", sequence_length=64, vocabulary_size=257, dropout=0.0), init_std=0.06)
    return mj.debug_config(
        cfg,
        mj.with_text_head(model, _head(task)),
        data=mj.MockGlueConfig(task=task),
        tokenizer=mj.ByteTokenizerConfig(),
        schedule=mj.ScheduleConfig(lr=3e-3, style="linear", warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=32, micro_size=4),
        evaluation=mj.EvaluationConfig(batches=0, tasks=(mj.GlueTaskConfig(),), tasks_every=50),
        checkpoint=mj.CheckpointConfig(every=None),
        steps=150,
    )
