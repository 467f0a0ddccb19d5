"""Llama 4 (Meta 2025), the text part, on your own text. `config()` is llama4_scout.

The size is that of the released config; learning rates are examples. The debug twin, llama4_scout_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=llama4.py --devices=h100:128
Run:      python -m megajax.train --config=llama4.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=llama4.py:debug --devices=cpu:8
Hardware: 128 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The Scout size."""
    return llama4_scout()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return llama4_scout_debug()


def llama4_scout() -> mj.RunConfig:
    """108 B parameters, 17 B active; 16 experts. 128 GPUs with 80 GB: pipeline 4 x expert 4 x tensor 2 x data 4."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.llama4("scout", sequence_length=4096)
    run = mj.own_text("llama4_scout", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(pipeline=4, expert=4, tensor=2), ("norm", "activation", "mlp"))


def llama4_scout_debug() -> mj.RunConfig:
    """llama4_scout in tiny sizes: pipeline 2 x expert 2 x tensor 2 on eight devices."""
    model = mj.llama4("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(llama4_scout(), model, parallel=mj.ParallelConfig(pipeline=2, expert=2, tensor=2))
