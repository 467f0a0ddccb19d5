"""Moonlight (Moonshot AI 2025) on your own text. `config()` is moonlight_16b.

The size is that of the released config; learning rates are examples. The debug twin, moonlight_16b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=moonlight.py --devices=h100:32
Run:      python -m megajax.train --config=moonlight.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=moonlight.py:debug --devices=cpu:8
Hardware: 32 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 16 B size."""
    return moonlight_16b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return moonlight_16b_debug()


def moonlight_16b() -> mj.RunConfig:
    """16 B parameters, 2.2 B active, with Muon. 32 GPUs with 80 GB: FSDP over data 32."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    optimizer = mj.MuonConfig(weight_decay=0.1, extra_scale=0.2, qk_clip=100.0)
    settings = {"schedule": schedule, "optimizer": optimizer}
    run = mj.own_text("moonlight_16b", mj.deepseek("moonlight"), rows=1024, steps=500_000, **settings)
    recompute = ("norm", "latent", "activation", "mlp", "query_key_value")
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), recompute, micro_size=16)


def moonlight_16b_debug() -> mj.RunConfig:
    """moonlight_16b in tiny sizes, on one device or on eight."""
    model = mj.deepseek("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(moonlight_16b(), model)
