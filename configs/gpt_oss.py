"""gpt-oss (OpenAI 2025) on your own text, a function per size. `config()` is gpt_oss_20b.

Sizes are those of the released configs: config.json of openai/gpt-oss-20b and openai/gpt-oss-120b. How they were
trained was not published. Every size has a debug twin, which trains on the source files of Python's standard library:
gpt_oss_120b_debug for gpt_oss_120b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=gpt_oss.py --devices=h100:16
Run:      python -m megajax.train --config=gpt_oss.py                       (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=gpt_oss.py:debug --devices=cpu:8 --parallel.expert=4
Hardware: each size names its own. Planned by formula, not run
"""

from typing import Any

import megajax as mj

SETTINGS: dict[str, Any] = {
    "schedule": mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000),
    "rows": 1024,
    "steps": 1_000_000,
}
"""Of all sizes: rows have 4096 tokens."""


def config() -> mj.RunConfig:
    """The 20B size."""
    return gpt_oss_20b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return gpt_oss_20b_debug()


def gpt_oss_20b() -> mj.RunConfig:
    """20.9 B parameters, 3.6 B active; 32 experts. 16 GPUs with 80 GB: FSDP over data 16."""
    run = mj.own_text("gpt_oss_20b", mj.gpt_oss("20b", sequence_length=4096), **SETTINGS)
    recompute = ("norm", "activation", "mlp", "query_key_value")
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), recompute, micro_size=8)


def gpt_oss_120b() -> mj.RunConfig:
    """116.8 B parameters, 5.1 B active; 128 experts. 64 GPUs with 80 GB: pipeline 4 x expert 4 x tensor 2 x data 2."""
    run = mj.own_text("gpt_oss_120b", mj.gpt_oss("120b", sequence_length=4096), **SETTINGS)
    return mj.on_layout(run, _stages(4, expert=4), ("norm", "activation", "mlp"), micro_size=2)


def gpt_oss_20b_debug() -> mj.RunConfig:
    """gpt_oss_20b in tiny sizes, with windows of 16 tokens, on one device or on eight."""
    return mj.library_debug_config(gpt_oss_20b(), _debug_model())


def gpt_oss_120b_debug() -> mj.RunConfig:
    """gpt_oss_120b in tiny sizes: pipeline 2 x expert 2 x tensor 2 on eight devices."""
    return mj.library_debug_config(gpt_oss_120b(), _debug_model(), parallel=_stages(2, expert=2))


def _stages(pipeline: int, *, expert: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(pipeline=pipeline, expert=expert, tensor=2, sequence=True)


def _debug_model() -> mj.DecoderConfig:
    return mj.gpt_oss("debug", sequence_length=64, vocabulary_size=257, window=16)
