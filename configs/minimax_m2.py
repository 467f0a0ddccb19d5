"""MiniMax-M2 (MiniMax 2025) on your own text. `config()` is minimax_m2_230b_a10b.

The size is that of the released config; learning rates are examples. The debug twin, minimax_m2_230b_a10b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=minimax_m2.py --devices=h100:256
Run:      python -m megajax.train --config=minimax_m2.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=minimax_m2.py:debug --devices=cpu:8
Hardware: 256 H100. Planned by formula, not run
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 229 B size."""
    return minimax_m2_230b_a10b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return minimax_m2_230b_a10b_debug()


def minimax_m2_230b_a10b() -> mj.RunConfig:
    """229 B parameters, 11 B active; 256 experts. 256 GPUs with 80 GB: expert 16 x FSDP over data 16."""
    model = replace(mj.minimax_m2("230b-a10b", sequence_length=4096), recompute="full")
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    parallel = mj.ParallelConfig(expert=16, data_sharding="fsdp")
    return mj.own_text("minimax_m2_230b_a10b", model, parallel=parallel, schedule=schedule, rows=1024, steps=500_000)


def minimax_m2_230b_a10b_debug() -> mj.RunConfig:
    """minimax_m2_230b_a10b in tiny sizes, on one device or on eight."""
    model = mj.minimax_m2("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(minimax_m2_230b_a10b(), model)
