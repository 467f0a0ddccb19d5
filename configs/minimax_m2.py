"""MiniMax-M2 (MiniMax 2025) on your own text. `config()` is minimax_m2_230b_a10b.

The size is that of the released config; learning rates are examples. The debug twin, minimax_m2_230b_a10b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=minimax_m2.py --devices=h100:256
Run:      python -m megajax.train --config=minimax_m2.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=minimax_m2.py:debug --devices=cpu:8
Hardware: 256 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 229 B size."""
    return minimax_m2_230b_a10b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return minimax_m2_230b_a10b_debug()


def minimax_m2_230b_a10b() -> mj.RunConfig:
    """229 B parameters, 11 B active; 256 experts.

    256 GPUs with 80 GB: pipeline 8 x 4 virtual stages x expert 4 x data 8.
    """
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    model = mj.minimax_m2("230b-a10b", sequence_length=4096)
    run = mj.own_text("minimax_m2_230b_a10b", model, schedule=schedule, rows=1024, steps=500_000)
    recompute = ("norm", "activation", "mlp", "query_key_value", "core_attention")
    return mj.on_layout(run, _stages(8, chunks=4, expert=4), recompute)


def minimax_m2_230b_a10b_debug() -> mj.RunConfig:
    """minimax_m2_230b_a10b in tiny sizes: pipeline 2 x 2 virtual stages x expert 2 x data 2."""
    model = mj.minimax_m2("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(minimax_m2_230b_a10b(), model, parallel=_stages(2, chunks=2, expert=2))


def _stages(pipeline: int, *, chunks: int, expert: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(pipeline=pipeline, expert=expert, schedule="interleaved", virtual_stages=chunks)
