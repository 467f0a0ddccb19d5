"""Granite 4 (IBM 2025) on your own text. `config()` is granite4_h_small.

The size is that of the released config; learning rates are examples. The debug twin, granite4_h_small_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=granite4.py --devices=h100:64
Run:      python -m megajax.train --config=granite4.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=granite4.py:debug --devices=cpu:8
Hardware: 64 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 32 B size."""
    return granite4_h_small()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return granite4_h_small_debug()


def granite4_h_small() -> mj.RunConfig:
    """32.2 B parameters, 8.8 B active; 72 experts. 64 GPUs with 80 GB: pipeline 4 x expert 2 x data 8."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.granite4("h-small", sequence_length=4096)
    run = mj.own_text("granite4_h_small", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(pipeline=4, expert=2), "full")


def granite4_h_small_debug() -> mj.RunConfig:
    """granite4_h_small in tiny sizes: pipeline 2 x expert 2 x data 2 on eight devices."""
    model = mj.granite4("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(granite4_h_small(), model, parallel=mj.ParallelConfig(pipeline=2, expert=2))
