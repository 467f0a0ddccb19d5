"""Qwen3-Next (Qwen team 2025) on your own text. `config()` is qwen3_next_80b_a3b.

The size is that of the released config; learning rates are examples. The debug twin, qwen3_next_80b_a3b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=qwen3_next.py --devices=h100:64
Run:      python -m megajax.train --config=qwen3_next.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=qwen3_next.py:debug --devices=cpu:8
Hardware: 64 H100. Planned by formula, not run
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 80 B size."""
    return qwen3_next_80b_a3b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return qwen3_next_80b_a3b_debug()


def qwen3_next_80b_a3b() -> mj.RunConfig:
    """80 B parameters, 3 B active; 512 experts. 64 GPUs with 80 GB: expert 16 x FSDP over data 4."""
    model = replace(mj.qwen3_next("80b-a3b", sequence_length=4096), recompute="full")
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    parallel = mj.ParallelConfig(expert=16, data_sharding="fsdp")
    return mj.own_text("qwen3_next_80b_a3b", model, parallel=parallel, schedule=schedule, rows=1024, steps=500_000)


def qwen3_next_80b_a3b_debug() -> mj.RunConfig:
    """qwen3_next_80b_a3b in tiny sizes, on one device or on eight."""
    model = mj.qwen3_next("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(qwen3_next_80b_a3b(), model)
