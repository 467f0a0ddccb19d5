"""EXAONE 4 (LG AI Research 2025) on your own text. `config()` is exaone4_32b.

The size is that of the released config; learning rates are examples. The debug twin, exaone4_32b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=exaone4.py --devices=h100:128
Run:      python -m megajax.train --config=exaone4.py                (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=exaone4.py:debug --devices=cpu:8
Hardware: 128 H100. Compiled for virtual H100s, not run
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
    """32.0 B parameters. 128 GPUs with 80 GB: pipeline 2 x tensor 4 x data 16.

    In full ticks the forward of a microbatch and the backward of another hide each other's collectives.
    """
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.exaone4("32b", sequence_length=4096)
    run = mj.own_text("exaone4_32b", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(pipeline=2, tensor=4, sequence=True), "none", side_by_side=2)


def exaone4_32b_debug() -> mj.RunConfig:
    """exaone4_32b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    model = mj.exaone4("debug", sequence_length=64, vocabulary_size=257, window=16)
    model = replace(model, stack=replace(model.stack, repeats=4))  # two of each stage
    parallel = mj.ParallelConfig(pipeline=2, tensor=2, sequence=True)
    return mj.library_debug_config(exaone4_32b(), model, parallel=parallel)
