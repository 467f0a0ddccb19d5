"""Gemma 2 (Gemma team 2024) on your own text, a function per size. `config()` is gemma2_2b.

Sizes are those of the released configs. Learning rates were not published. Every size
has a debug twin, which trains on the source files of Python's standard library: gemma2_27b_debug for gemma2_27b, debug
for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=gemma2.py:gemma2_27b --devices=h100:128
Run:      python -m megajax.train --config=gemma2.py                        (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=gemma2.py:debug --devices=cpu:8
Hardware: each size names its own. Planned by formula, not run
"""

from dataclasses import replace
from typing import Any

import megajax as mj

SETTINGS: dict[str, Any] = {
    "schedule": mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000),
    "rows": 1024,
    "steps": 500_000,
}
"""Of all sizes: rows have 4096 tokens."""


def config() -> mj.RunConfig:
    """The 2B size."""
    return gemma2_2b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return gemma2_2b_debug()


def gemma2_2b() -> mj.RunConfig:
    """2.6 B parameters. 8 GPUs with 80 GB, data-parallel."""
    model = mj.gemma2("2b", sequence_length=4096)
    return mj.own_text("gemma2_2b", model, parallel=mj.ParallelConfig(data_sharding="zero1"), **SETTINGS)


def gemma2_27b() -> mj.RunConfig:
    """27.2 B parameters. 128 GPUs with 80 GB: tensor 8 x FSDP over data 16."""
    model = replace(mj.gemma2("27b", sequence_length=4096), recompute="full")
    parallel = mj.ParallelConfig(tensor=8, sequence=True, data_sharding="fsdp")
    return mj.own_text("gemma2_27b", model, parallel=parallel, **SETTINGS)


def gemma2_2b_debug() -> mj.RunConfig:
    """gemma2_2b in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(gemma2_2b(), _debug_model())


def gemma2_27b_debug() -> mj.RunConfig:
    """gemma2_27b in tiny sizes: tensor 2 x FSDP over data 4 on eight devices."""
    parallel = mj.ParallelConfig(tensor=2, sequence=True, data_sharding="fsdp")
    return mj.library_debug_config(gemma2_27b(), _debug_model(), parallel=parallel)


def _debug_model() -> mj.DecoderConfig:
    return mj.gemma2("debug", sequence_length=64, vocabulary_size=257)
