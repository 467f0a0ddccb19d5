"""Falcon-H1 (Falcon LLM team 2025) on your own text. `config()` is falcon_h1_34b.

The size is that of the released config; learning rates are examples. The debug twin, falcon_h1_34b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=falcon_h1.py --devices=h100:64
Run:      python -m megajax.train --config=falcon_h1.py              (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=falcon_h1.py:debug --devices=cpu:8
Hardware: 64 H100. Compiled for virtual H100s, not run
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
    """34 B parameters. 64 GPUs with 80 GB: pipeline 8 x tensor 2 x data 4.

    In full ticks the forward of a microbatch and the backward of another hide each other's collectives.
    """
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    run = mj.own_text("falcon_h1_34b", mj.falcon_h1("34b"), schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, _stages(8), side_by_side=2)


def falcon_h1_34b_debug() -> mj.RunConfig:
    """falcon_h1_34b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    model = mj.falcon_h1("debug", sequence_length=64, vocabulary_size=257)
    model = replace(model, stack=replace(model.stack, repeats=4))  # two of each stage
    return mj.library_debug_config(falcon_h1_34b(), model, parallel=_stages(2))


def _stages(pipeline: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(pipeline=pipeline, tensor=2, sequence=True)
