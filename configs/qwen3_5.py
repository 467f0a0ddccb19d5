"""Qwen3.5 (Qwen team 2026), the text model, on your own text. `config()` is qwen3_5_35b_a3b.

Sizes are those of the released configs; learning rates are examples. Every size has a debug twin, which trains on the
source files of Python's standard library: qwen3_5_27b_debug for qwen3_5_27b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=qwen3_5.py --devices=h100:64
Run:      python -m megajax.train --config=qwen3_5.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=qwen3_5.py:debug --devices=cpu:8
Hardware: 64 H100. Planned by formula, not run
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 35 B size."""
    return qwen3_5_35b_a3b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return qwen3_5_35b_a3b_debug()


def qwen3_5_27b() -> mj.RunConfig:
    """26.9 B parameters, without experts. 64 GPUs with 80 GB: pipeline 2 x tensor 4 x data 8.

    In full ticks the forward of a microbatch and the backward of another hide each other's collectives.
    """
    run = _run("qwen3_5_27b", mj.qwen3_5("27b", sequence_length=4096))
    return mj.on_layout(run, _stages(tensor=4), micro_size=2, side_by_side=2)


def qwen3_5_35b_a3b() -> mj.RunConfig:
    """34.7 B parameters, 3 B active; 256 experts. 64 GPUs with 80 GB: FSDP over data 64."""
    run = _run("qwen3_5_35b_a3b", mj.qwen3_5_moe("35b-a3b", sequence_length=4096))
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), "full", micro_size=8)


def qwen3_5_27b_debug() -> mj.RunConfig:
    """qwen3_5_27b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    model = mj.qwen3_5("debug", sequence_length=64, vocabulary_size=257)
    model = replace(model, stack=replace(model.stack, repeats=4))  # two of each stage
    return mj.library_debug_config(qwen3_5_27b(), model, parallel=_stages(tensor=2))


def qwen3_5_35b_a3b_debug() -> mj.RunConfig:
    """qwen3_5_35b_a3b in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(qwen3_5_35b_a3b(), mj.qwen3_5_moe("debug", sequence_length=64, vocabulary_size=257))


def _stages(tensor: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(pipeline=2, tensor=tensor, sequence=True)


def _run(name: str, model: mj.DecoderConfig) -> mj.RunConfig:
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    return mj.own_text(name, model, schedule=schedule, rows=1024, steps=500_000)
