"""Cohere 2 (Cohere 2024) on your own text. `config()` is cohere2_7b.

The size is that of the released config; learning rates are examples. The debug twin, cohere2_7b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=cohere2.py --devices=h100:32
Run:      python -m megajax.train --config=cohere2.py                  (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=cohere2.py:debug --devices=cpu:8
Hardware: 32 H100. Compiled for virtual H100s, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 8.0 B size."""
    return cohere2_7b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return cohere2_7b_debug()


def cohere2_7b() -> mj.RunConfig:
    """8.0 B parameters. 32 GPUs with 80 GB: ZeRO-1 over data 32."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.cohere2("7b", sequence_length=4096)
    run = mj.own_text("cohere2_7b", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(), ("activation",))


def cohere2_7b_debug() -> mj.RunConfig:
    """cohere2_7b in tiny sizes, on one device or on eight."""
    model = mj.cohere2("debug", sequence_length=64, vocabulary_size=257, window=16)
    return mj.library_debug_config(cohere2_7b(), model)
