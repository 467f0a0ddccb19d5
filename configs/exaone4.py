"""EXAONE 4 (LG AI Research 2025) on your own text. `config()` is exaone4_32b.

The size is that of the released config; learning rates are examples. The debug twin, exaone4_32b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=exaone4.py --devices=h100:128
Run:      python -m megajax.train --config=exaone4.py                (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=exaone4.py:debug --devices=cpu:8
Hardware: 128 H100. Planned by formula, not run
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 32.0 B size."""
    return exaone4_32b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return exaone4_32b_debug()


def exaone4_32b() -> mj.RunConfig:
    """32.0 B parameters. 128 GPUs with 80 GB: tensor 8 x FSDP over data 16."""
    model = replace(mj.exaone4("32b", sequence_length=4096), recompute="full")
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    parallel = mj.ParallelConfig(tensor=8, sequence=True, data_sharding="fsdp")
    return mj.own_text("exaone4_32b", model, parallel=parallel, schedule=schedule, rows=1024, steps=500_000)


def exaone4_32b_debug() -> mj.RunConfig:
    """exaone4_32b in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(
        exaone4_32b(), mj.exaone4("debug", sequence_length=64, vocabulary_size=257, window=16)
    )
