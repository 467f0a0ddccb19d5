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
    """80 B parameters, 3 B active; 512 experts.

    64 GPUs with 80 GB: pipeline 4 x 3 virtual stages x expert 4 x data 4.
    """
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.qwen3_next("80b-a3b", sequence_length=4096)
    run = mj.own_text("qwen3_next_80b_a3b", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, _stages(4, chunks=3, expert=4), ("norm", "activation", "mlp"))


def qwen3_next_80b_a3b_debug() -> mj.RunConfig:
    """qwen3_next_80b_a3b in tiny sizes: pipeline 2 x 2 virtual stages x expert 2 x data 2."""
    model = mj.qwen3_next("debug", sequence_length=64, vocabulary_size=257)
    model = replace(model, stack=replace(model.stack, repeats=4))  # one of each virtual stage
    return mj.library_debug_config(qwen3_next_80b_a3b(), model, parallel=_stages(2, chunks=2, expert=2))


def _stages(pipeline: int, *, chunks: int, expert: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(pipeline=pipeline, expert=expert, schedule="interleaved", virtual_stages=chunks)
