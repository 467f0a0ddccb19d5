"""Gemma 3 (Gemma team 2025) on your own text, a function per size. `config()` is gemma3_1b.

Sizes are those of the released configs; of the 27B model, the text part. Learning rates were not published. Every size
has a debug twin, which trains on the source files of Python's standard library: gemma3_27b_debug for gemma3_27b, debug
for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=gemma3.py:gemma3_27b --devices=h100:128
Run:      python -m megajax.train --config=gemma3.py                        (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=gemma3.py:debug --devices=cpu:8
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
    """The 1B size."""
    return gemma3_1b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return gemma3_1b_debug()


def gemma3_1b() -> mj.RunConfig:
    """1.0 B parameters. 8 GPUs with 80 GB, data-parallel."""
    model = mj.gemma3("1b", sequence_length=4096)
    return mj.own_text("gemma3_1b", model, parallel=mj.ParallelConfig(data_sharding="zero1"), **SETTINGS)


def gemma3_27b() -> mj.RunConfig:
    """27.0 B parameters. 128 GPUs with 80 GB: tensor 8 x FSDP over data 16."""
    model = replace(mj.gemma3("27b", sequence_length=4096), recompute="full")
    parallel = mj.ParallelConfig(tensor=8, sequence=True, data_sharding="fsdp")
    return mj.own_text("gemma3_27b", model, parallel=parallel, **SETTINGS)


def gemma3_1b_debug() -> mj.RunConfig:
    """gemma3_1b in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(gemma3_1b(), _debug_model())


def gemma3_27b_debug() -> mj.RunConfig:
    """gemma3_27b in tiny sizes: tensor 2 x FSDP over data 4 on eight devices."""
    parallel = mj.ParallelConfig(tensor=2, sequence=True, data_sharding="fsdp")
    return mj.library_debug_config(gemma3_27b(), _debug_model(), parallel=parallel)


def _debug_model() -> mj.DecoderConfig:
    return mj.gemma3("debug", sequence_length=64, vocabulary_size=257)
