"""Gemma 2 (Gemma team 2024) and Gemma 3 (2025) on your own text, a function per size. `config()` is gemma3_1b.

Sizes are those of the released configs; of Gemma 3 27B, the text part. Learning rates were not published. Every size
has a debug twin, which trains on the source files of Python's standard library: gemma3_27b_debug for gemma3_27b, debug
for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=gemma.py:gemma3_27b --devices=h100:128
Run:      python -m megajax.train --config=gemma.py                         (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=gemma.py:debug --devices=cpu:8
Hardware: each size names its own. gemma2_27b and gemma3_27b were compiled for virtual H100s, the
          others planned by formula; not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 1B size of Gemma 3."""
    return gemma3_1b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return gemma3_1b_debug()


def gemma2_2b() -> mj.RunConfig:
    """2.6 B parameters. 8 GPUs with 80 GB, data-parallel."""
    return _run("gemma2_2b", mj.gemma2("2b", sequence_length=4096))


def gemma2_27b() -> mj.RunConfig:
    """27.2 B parameters. 128 GPUs with 80 GB: tensor 4 x data 32. Two microbatches hide each other's collectives."""
    return _large("gemma2_27b", mj.gemma2("27b", sequence_length=4096))


def gemma3_1b() -> mj.RunConfig:
    """1.0 B parameters. 8 GPUs with 80 GB, data-parallel."""
    return _run("gemma3_1b", mj.gemma3("1b", sequence_length=4096))


def gemma3_27b() -> mj.RunConfig:
    """27.0 B parameters. 128 GPUs with 80 GB: tensor 4 x data 32. Two microbatches hide each other's collectives."""
    return _large("gemma3_27b", mj.gemma3("27b", sequence_length=4096))


def gemma2_2b_debug() -> mj.RunConfig:
    """gemma2_2b in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(gemma2_2b(), mj.gemma2("debug", sequence_length=64, vocabulary_size=257))


def gemma2_27b_debug() -> mj.RunConfig:
    """gemma2_27b in tiny sizes: tensor 2, and data 4 on eight devices."""
    model = mj.gemma2("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(gemma2_27b(), model, parallel=_tensor(2))


def gemma3_1b_debug() -> mj.RunConfig:
    """gemma3_1b in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(gemma3_1b(), mj.gemma3("debug", sequence_length=64, vocabulary_size=257))


def gemma3_27b_debug() -> mj.RunConfig:
    """gemma3_27b in tiny sizes: tensor 2, and data 4 on eight devices."""
    model = mj.gemma3("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(gemma3_27b(), model, parallel=_tensor(2))


def _large(name: str, model: mj.DecoderConfig) -> mj.RunConfig:
    return mj.on_layout(_run(name, model), _tensor(4), side_by_side=2)


def _tensor(size: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(tensor=size, sequence=True)


def _run(name: str, model: mj.DecoderConfig) -> mj.RunConfig:
    """Rows have 4096 tokens."""
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    return mj.own_text(name, model, schedule=schedule, rows=1024, steps=500_000)
