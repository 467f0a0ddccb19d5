"""GLM-4.5 (Zhipu AI 2025) on your own text. `config()` is glm4_moe_4_5_air.

The size is that of the released config; learning rates are examples. The debug twin, glm4_moe_4_5_air_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=glm4_moe.py --devices=h100:128
Run:      python -m megajax.train --config=glm4_moe.py               (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=glm4_moe.py:debug --devices=cpu:8
Hardware: 128 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 110 B size."""
    return glm4_moe_4_5_air()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return glm4_moe_4_5_air_debug()


def glm4_moe_4_5_air() -> mj.RunConfig:
    """110 B parameters, 12 B active; 128 experts. 128 GPUs with 80 GB: FSDP over data 128."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.glm4_moe("4.5-air", sequence_length=4096)
    run = mj.own_text("glm4_moe_4_5_air", model, schedule=schedule, rows=1024, steps=500_000)
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), "full", micro_size=8)


def glm4_moe_4_5_air_debug() -> mj.RunConfig:
    """glm4_moe_4_5_air in tiny sizes, on one device or on eight."""
    model = mj.glm4_moe("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(glm4_moe_4_5_air(), model)
