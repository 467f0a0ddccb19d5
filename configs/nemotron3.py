"""Nemotron 3 (NVIDIA 2025) on your own text. `config()` is nemotron3_nano.

The size is that of the released config; learning rates are examples. The debug twin, nemotron3_nano_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=nemotron3.py --devices=h100:64
Run:      python -m megajax.train --config=nemotron3.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=nemotron3.py:debug --devices=cpu:8
Hardware: 64 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The Nano size."""
    return nemotron3_nano()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return nemotron3_nano_debug()


def nemotron3_nano() -> mj.RunConfig:
    """31.6 B parameters, 3.6 B active; 128 experts. 64 GPUs with 80 GB: expert 2 x FSDP over data 32."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.nemotron3("nano", sequence_length=4096)
    run = mj.own_text("nemotron3_nano", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(expert=2, data_sharding="fsdp"), "full", micro_size=8)


def nemotron3_nano_debug() -> mj.RunConfig:
    """nemotron3_nano in tiny sizes, on one device or on eight."""
    model = mj.nemotron3("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(nemotron3_nano(), model)
