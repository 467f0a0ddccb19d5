"""Kimi Linear (Kimi Team 2025) on your own text. `config()` is kimi_linear_48b_a3b.

The size is that of the released config; learning rates are examples. The debug twin, kimi_linear_48b_a3b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=kimi_linear.py --devices=h100:64
Run:      python -m megajax.train --config=kimi_linear.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=kimi_linear.py:debug --devices=cpu:8
Hardware: 64 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 48 B size."""
    return kimi_linear_48b_a3b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return kimi_linear_48b_a3b_debug()


def kimi_linear_48b_a3b() -> mj.RunConfig:
    """49 B parameters, 3 B active; 256 experts. 64 GPUs with 80 GB: pipeline 4 x expert 4 x data 4."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.kimi_linear("48b-a3b")
    run = mj.own_text("kimi_linear_48b_a3b", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(pipeline=4, expert=4), ("norm", "latent", "activation", "mlp"))


def kimi_linear_48b_a3b_debug() -> mj.RunConfig:
    """kimi_linear_48b_a3b in tiny sizes: pipeline 2 x expert 2, and data 2 on eight devices."""
    model = mj.kimi_linear("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(kimi_linear_48b_a3b(), model, parallel=mj.ParallelConfig(pipeline=2, expert=2))
