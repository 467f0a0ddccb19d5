"""OLMoE (Muennighoff et al. 2024) on your own text. `config()` is olmoe_1b_7b.

The size is that of the released config; learning rates are examples. The debug twin, olmoe_1b_7b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=olmoe.py --devices=h100:16
Run:      python -m megajax.train --config=olmoe.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=olmoe.py:debug --devices=cpu:8
Hardware: 16 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 7 B size."""
    return olmoe_1b_7b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return olmoe_1b_7b_debug()


def olmoe_1b_7b() -> mj.RunConfig:
    """6.9 B parameters, 1.3 B active; 64 experts. 16 GPUs with 80 GB: ZeRO-1 over data 16."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.olmoe("1b-7b", sequence_length=4096)
    run = mj.own_text("olmoe_1b_7b", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(), ("activation",), micro_size=4)


def olmoe_1b_7b_debug() -> mj.RunConfig:
    """olmoe_1b_7b in tiny sizes, on one device or on eight."""
    model = mj.olmoe("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(olmoe_1b_7b(), model)
