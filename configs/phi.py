"""Phi-4 (Microsoft 2024) on your own text. `config()` is phi_4.

The size is that of the released config; learning rates are examples. The debug twin, phi_4_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=phi.py --devices=h100:32
Run:      python -m megajax.train --config=phi.py                (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=phi.py:debug --devices=cpu:8
Hardware: 32 H100. Compiled for virtual H100s, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 14.7 B size."""
    return phi_4()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return phi_4_debug()


def phi_4() -> mj.RunConfig:
    """14.7 B parameters. 32 GPUs with 80 GB: FSDP over data 32."""
    model = mj.phi3("4", sequence_length=4096)
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    run = mj.own_text("phi_4", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), ("activation",), micro_size=2)


def phi_4_debug() -> mj.RunConfig:
    """phi_4 in tiny sizes with LongRoPE, on one device or on eight."""
    longrope = mj.LongRopeScalingConfig(
        short=(1.0,) * 8, long=tuple(1.0 + n for n in range(8)), original=32, factor=2.0
    )
    model = mj.phi3("debug", sequence_length=64, vocabulary_size=257, scaling=longrope)
    return mj.library_debug_config(phi_4(), model)
