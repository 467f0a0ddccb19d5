"""GLM-4 (Zhipu AI 2025) on your own text. `config()` is glm4_32b.

The size is that of the released config; learning rates are examples. The debug twin, glm4_32b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=glm4.py --devices=h100:64
Run:      python -m megajax.train --config=glm4.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=glm4.py:debug --devices=cpu:8
Hardware: 64 H100. Compiled for virtual H100s, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 32 B size."""
    return glm4_32b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return glm4_32b_debug()


def glm4_32b() -> mj.RunConfig:
    """32.6 B parameters. 64 GPUs with 80 GB: pipeline 2 x tensor 4 x data 8.

    In full ticks the forward of a microbatch and the backward of another hide each other's collectives.
    """
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    run = mj.own_text("glm4_32b", mj.glm4("32b", sequence_length=4096), schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(pipeline=2, tensor=4, sequence=True), side_by_side=2)


def glm4_32b_debug() -> mj.RunConfig:
    """glm4_32b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    model = mj.glm4("debug", sequence_length=64, vocabulary_size=257)
    parallel = mj.ParallelConfig(pipeline=2, tensor=2, sequence=True)
    return mj.library_debug_config(glm4_32b(), model, parallel=parallel)
