"""Falcon-H1 (Falcon LLM team 2025) on your own text. `config()` is falcon_h1_34b.

The size is that of the released config; learning rates are examples. The debug twin, falcon_h1_34b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=falcon_h1.py --devices=h100:64
Run:      python -m megajax.train --config=falcon_h1.py              (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=falcon_h1.py:debug --devices=cpu:8
Hardware: 64 H100. Planned by formula, not run
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 34 B size."""
    return falcon_h1_34b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return falcon_h1_34b_debug()


def falcon_h1_34b() -> mj.RunConfig:
    """34 B parameters. 64 GPUs with 80 GB, fully sharded."""
    model = replace(mj.falcon_h1("34b"), recompute="full")
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    parallel = mj.ParallelConfig(data_sharding="fsdp")
    return mj.own_text("falcon_h1_34b", model, parallel=parallel, schedule=schedule, rows=1024, steps=500_000)


def falcon_h1_34b_debug() -> mj.RunConfig:
    """falcon_h1_34b in tiny sizes, on one device or on eight."""
    model = mj.falcon_h1("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(falcon_h1_34b(), model)
