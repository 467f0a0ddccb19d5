"""MiniMax-Text-01 (MiniMax 2025) on your own text. `config()` is minimax_text_01.

The size is that of the released config; learning rates are examples. The debug twin, minimax_text_01_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=minimax.py --devices=h100:512
Run:      python -m megajax.train --config=minimax.py             (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=minimax.py:debug --devices=cpu:8
Hardware: 512 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 456 B size."""
    return minimax_text_01()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return minimax_text_01_debug()


def minimax_text_01() -> mj.RunConfig:
    """456 B parameters, 46 B active; 32 experts. 512 GPUs with 80 GB: expert 8 x tensor 4 x FSDP over data 16.

    Devices have room for 1.5 times the mean number of rows, which bounds their memory; the metrics count what is
    dropped beyond.
    """
    model = mj.minimax("text-01", sequence_length=4096, dispatch=mj.DispatchConfig(room=1.5))
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    run = mj.own_text("minimax_text_01", model, schedule=schedule, rows=1024, steps=500_000)
    parallel = mj.ParallelConfig(expert=8, tensor=4, sequence=True, data_sharding="fsdp")
    return mj.on_layout(run, parallel, "full", layers=72, micro_size=4)


def minimax_text_01_debug() -> mj.RunConfig:
    """minimax_text_01 in tiny sizes, on one device or on eight."""
    model = mj.minimax("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(minimax_text_01(), model)
