"""GLM-4 (Zhipu AI 2025) on your own text. `config()` is glm4_32b.

The size is that of the released config; learning rates are examples. The debug twin, glm4_32b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=glm4.py --devices=h100:64
Run:      python -m megajax.train --config=glm4.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=glm4.py:debug --devices=cpu:8
Hardware: 64 H100. Planned by formula, not run
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 32 B size."""
    return glm4_32b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return glm4_32b_debug()


def glm4_32b() -> mj.RunConfig:
    """32.6 B parameters. 64 GPUs with 80 GB: FSDP over data 64."""
    model = replace(mj.glm4("32b", sequence_length=4096), recompute="full")
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    parallel = mj.ParallelConfig(data_sharding="fsdp")
    return mj.own_text("glm4_32b", model, parallel=parallel, schedule=schedule, rows=1024, steps=500_000)


def glm4_32b_debug() -> mj.RunConfig:
    """glm4_32b in tiny sizes, on one device or on eight."""
    model = mj.glm4("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(glm4_32b(), model)
