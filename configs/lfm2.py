"""LFM2 (Liquid AI 2025) on your own text. `config()` is lfm2_1_2b.

The size is that of the released config; learning rates are examples. The debug twin, lfm2_1_2b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=lfm2.py --devices=h100:8
Run:      python -m megajax.train --config=lfm2.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=lfm2.py:debug --devices=cpu:8
Hardware: 8 H100. Planned by formula, not run
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 1.2 B size."""
    return lfm2_1_2b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return lfm2_1_2b_debug()


def lfm2_1_2b() -> mj.RunConfig:
    """1.2 B parameters, short convolutions and attention. 8 GPUs with 80 GB, data-parallel."""
    model = replace(mj.lfm2("1.2b"), recompute="full")
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    parallel = mj.ParallelConfig(data_sharding="zero1")
    return mj.own_text("lfm2_1_2b", model, parallel=parallel, schedule=schedule, rows=1024, steps=500_000)


def lfm2_1_2b_debug() -> mj.RunConfig:
    """lfm2_1_2b in tiny sizes, on one device or on eight."""
    model = mj.lfm2("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(lfm2_1_2b(), model)
