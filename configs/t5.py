"""T5 (Raffel et al. 2020) on your own text, a function per size. `config()` is the base size.

Every size has a debug twin, which trains on the documentation in Python's standard library and needs no preparation:
t5_11b_debug for t5_11b, debug for `config()`. `text` is a small model for a small text of your own.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=wordpiece \
              --vocab-file=data/vocab.txt --split-sentences
Run:      python -m megajax.train --config=t5.py                            (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=t5.py:debug
Hardware: each size names its own; t5_base and t5_11b were compiled for virtual H100s. Not yet run on GPUs.
          Layouts have no pipeline: its stages cut one stack of layers
"""

from typing import Any

import megajax as mj

TINY: dict[str, Any] = {"encoder_length": 64, "sequence_length": 32, "vocabulary_size": 2102, "dropout": 0.0}
"""Rows of the debug twins, and a vocabulary of 2000, [BOS], [EOS] and 100 sentinels."""
FSDP = mj.ParallelConfig(data_sharding="fsdp")


def config() -> mj.RunConfig:
    """The base size."""
    return t5_base()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return t5_base_debug()


def t5_small() -> mj.RunConfig:
    """2 x 6 layers x 512 hidden; 60 M parameters. 8 GPUs, data 8."""
    return _own_text("t5_small", mj.t5("small", dropout=0.0), micro=64)


def t5_base() -> mj.RunConfig:
    """2 x 12 layers x 768 hidden; 220 M parameters. 8 GPUs with 80 GB, data 8."""
    return _own_text("t5_base", mj.t5("base", dropout=0.0), micro=32)


def t5_large() -> mj.RunConfig:
    """2 x 24 layers x 1024 hidden; 770 M parameters. 16 GPUs with 80 GB, data 16."""
    return _own_text("t5_large", mj.t5("large", dropout=0.0), micro=16)


def t5_3b() -> mj.RunConfig:
    """2 x 24 layers x 1024 hidden, MLPs of 16384. 32 GPUs with 80 GB, tensor 2 x data 16."""
    return _own_text("t5_3b", mj.t5("3b", dropout=0.0), micro=8, tensor=2)


def t5_11b() -> mj.RunConfig:
    """2 x 24 layers x 1024 hidden, MLPs of 65536 and 128 heads. 64 GPUs with 80 GB: FSDP over data 64."""
    run = _own_text("t5_11b", mj.t5("11b", dropout=0.0), micro=16)
    return mj.on_layout(run, FSDP, "full", layers=8, micro_size=16)


def t5_v1_1_xxl() -> mj.RunConfig:
    """T5 v1.1: 2 x 24 layers x 4096 hidden, gated MLPs; 11 B parameters. 64 GPUs with 80 GB: FSDP over data 64."""
    run = _own_text("t5_v1_1_xxl", mj.t5_v1_1("xxl"), micro=32)
    return mj.on_layout(run, FSDP, "full", layers=1, micro_size=32)


def text() -> mj.RunConfig:
    """2 x 2 layers x 128 hidden on a text of a few megabytes, with a vocabulary of up to 4000 and 100 sentinels."""
    model = mj.t5("text", encoder_length=64, sequence_length=32, vocabulary_size=4102, dropout=0.0)
    return mj.RunConfig(
        model=model,
        data=mj.MaskedSpansConfig(paths=("data/corpus_text_sentence",), split="95,5,0"),
        tokenizer=mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt", extra_ids=100),
        precision=mj.PrecisionConfig(compute="float32"),
        optimizer=mj.AdamWConfig(weight_decay=0.01),
        schedule=mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.05),
        batch=mj.BatchConfig(global_size=16, micro_size=16),
        evaluation=mj.EvaluationConfig(every=200, batches=16),
        checkpoint=mj.CheckpointConfig(every=200),
        steps=1200,
        run_dir="runs/t5_text",
    )


def t5_small_debug() -> mj.RunConfig:
    """t5_small in tiny sizes."""
    return _debug(t5_small())


def t5_base_debug() -> mj.RunConfig:
    """t5_base in tiny sizes, on one device or on eight with --devices=cpu:8 --parallel.tensor=2."""
    return _debug(t5_base())


def t5_large_debug() -> mj.RunConfig:
    """t5_large in tiny sizes."""
    return _debug(t5_large())


def t5_3b_debug() -> mj.RunConfig:
    """t5_3b in tiny sizes, on one device."""
    return _debug(t5_3b())


def t5_11b_debug() -> mj.RunConfig:
    """t5_11b in tiny sizes: FSDP over all devices."""
    return _debug(t5_11b(), parallel=FSDP)


def t5_v1_1_xxl_debug() -> mj.RunConfig:
    """t5_v1_1_xxl in tiny sizes: FSDP over all devices."""
    return _debug(t5_v1_1_xxl(), mj.t5_v1_1("debug", **TINY), parallel=FSDP)


def _debug(cfg: mj.RunConfig, model: mj.T5Config | None = None, **changes: Any) -> mj.RunConfig:
    """64 tokens for the encoder, 32 for the decoder."""
    own: dict[str, Any] = {
        "data": mj.LibrarySpansConfig(),
        "tokenizer": mj.LibraryWordPieceConfig(size=2000, extra_ids=100),
        "schedule": mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        "evaluation": mj.EvaluationConfig(every=50, batches=4),
        "checkpoint": mj.CheckpointConfig(every=50),
        "steps": 100,
    }
    return mj.debug_config(cfg, model or mj.t5("debug", **TINY), **own | changes)


def _layout(*, tensor: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(tensor=tensor, sequence=tensor > 1, data_sharding="zero1")


def _own_text(name: str, model: mj.T5Config, *, micro: int, tensor: int = 1) -> mj.RunConfig:
    """2048 rows of 512 tokens a step, and 128 for the decoder; 1 M steps (Raffel et al. 2020, section 3.7)."""
    return mj.RunConfig(
        model=model,
        parallel=_layout(tensor=tensor),
        data=mj.MaskedSpansConfig(paths=("data/corpus_text_sentence",), split="989,10,1"),
        tokenizer=mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt", extra_ids=100),
        optimizer=mj.AdamWConfig(weight_decay=0.01),
        schedule=mj.ScheduleConfig(lr=1e-4, min_lr=1e-5, style="linear", warmup_steps=10_000),
        batch=mj.BatchConfig(global_size=2048, micro_size=micro),
        evaluation=mj.EvaluationConfig(every=1000, batches=10),
        checkpoint=mj.CheckpointConfig(every=1000),
        steps=1_000_000,
        run_dir=f"runs/{name}",
    )
