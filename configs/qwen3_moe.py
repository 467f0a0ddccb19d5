"""Qwen 3 with experts (Qwen team 2025) on your own text, a function per size. `config()` is qwen3_moe_30b_a3b.

Sizes are those of the released configs: config.json of Qwen/Qwen3-30B-A3B-Base and Qwen/Qwen3-235B-A22B. Learning rates
were not published. Every size has a debug twin, which trains on the source files of Python's standard library:
qwen3_moe_235b_a22b_debug for qwen3_moe_235b_a22b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=qwen3_moe.py --devices=h100:32
Run:      python -m megajax.train --config=qwen3_moe.py                     (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=qwen3_moe.py:debug --devices=cpu:8 --parallel.expert=4
Hardware: each size names its own; not yet run on GPUs
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
    """The 30B-A3B size."""
    return qwen3_moe_30b_a3b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return qwen3_moe_30b_a3b_debug()


def qwen3_moe_30b_a3b() -> mj.RunConfig:
    """30.5 B parameters, 3.3 B active; 128 experts. 32 GPUs with 80 GB: FSDP over data 32.

    Every device gathers all experts of a layer and keeps its tokens: with eight rows a microbatch that takes less time
    than sending tokens to experts.
    """
    run = mj.own_text("qwen3_moe_30b_a3b", mj.qwen3_moe("30b-a3b", sequence_length=4096), **SETTINGS)
    parallel = mj.ParallelConfig(data_sharding="fsdp")
    return mj.on_layout(run, parallel, ("norm", "activation", "mlp"), micro_size=8)


def qwen3_moe_30b_a3b_h200() -> mj.RunConfig:
    """qwen3_moe_30b_a3b on 32 GPUs with 141 GB, with less recomputation."""
    return mj.on_layout(qwen3_moe_30b_a3b(), mj.ParallelConfig(data_sharding="fsdp"), ("activation",), micro_size=8)


def qwen3_moe_235b_a22b() -> mj.RunConfig:
    """235 B parameters, 22 B active; 128 experts. 256 GPUs with 80 GB: FSDP over data 256."""
    run = mj.own_text("qwen3_moe_235b_a22b", mj.qwen3_moe("235b-a22b", sequence_length=4096), **SETTINGS)
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), "full", micro_size=4)


def qwen3_moe_30b_a3b_debug() -> mj.RunConfig:
    """qwen3_moe_30b_a3b in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(qwen3_moe_30b_a3b(), _debug_model())


def qwen3_moe_235b_a22b_debug() -> mj.RunConfig:
    """qwen3_moe_235b_a22b in tiny sizes: FSDP over all devices."""
    return mj.library_debug_config(
        qwen3_moe_235b_a22b(), _debug_model(), parallel=mj.ParallelConfig(data_sharding="fsdp")
    )


def _debug_model() -> mj.DecoderConfig:
    return mj.qwen3_moe("debug", sequence_length=64, vocabulary_size=257)
