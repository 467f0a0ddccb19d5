"""Granite 3 (IBM 2024) on your own text. `config()` is granite_8b.

The size is that of the released config; learning rates are examples. The debug twin, granite_8b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=granite.py --devices=h100:32
Run:      python -m megajax.train --config=granite.py                (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=granite.py:debug --devices=cpu:8
Hardware: 32 H100. Compiled for virtual H100s, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 8.2 B size."""
    return granite_8b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return granite_8b_debug()


def granite_8b() -> mj.RunConfig:
    """8.2 B parameters. 32 GPUs with 80 GB: ZeRO-1 over data 32."""
    model = mj.granite("8b", sequence_length=4096)
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    return mj.own_text("granite_8b", model, schedule=schedule, rows=1024, steps=500_000)


def granite_8b_debug() -> mj.RunConfig:
    """granite_8b in tiny sizes, on one device or on eight."""
    model = mj.granite("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(granite_8b(), model)
