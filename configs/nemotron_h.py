"""Nemotron-H (NVIDIA 2025): Mamba-2, MLPs and a few layers of attention, on your own text. `config()` is nemotron_h_8b.

Sizes are those of the released configs: config.json of nvidia/Nemotron-H-8B-Base-8K and nvidia/Nemotron-H-56B-Base-8K.
Every size has a debug twin, which trains on the source files of Python's standard library: nemotron_h_56b_debug for
nemotron_h_56b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Run:      python -m megajax.train --config=nemotron_h.py                    (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=nemotron_h.py:debug --devices=cpu:8 --parallel.tensor=2 --parallel.pipeline=2
Hardware: each size names its own; nemotron_h_56b is planned by formula. Not yet run on GPUs
"""

from typing import Any

import megajax as mj

SETTINGS: dict[str, Any] = {
    "schedule": mj.ScheduleConfig(lr=8e-4, min_lr=8e-6, warmup_steps=2000),
    "rows": 768,
    "steps": 2_000_000,
}
"""Of all sizes: rows have 8192 tokens."""


def config() -> mj.RunConfig:
    """The 8B size."""
    return nemotron_h_8b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return nemotron_h_8b_debug()


def nemotron_h_8b() -> mj.RunConfig:
    """52 layers, 4 of them attention. 32 GPUs with 80 GB: tensor 2 x data 16."""
    return mj.own_text("nemotron_h_8b", mj.nemotron_h("8b"), parallel=_tensor(2), **SETTINGS)


def nemotron_h_56b() -> mj.RunConfig:
    """118 layers, 10 of them attention. 256 GPUs with 80 GB: tensor 8 x data 32."""
    return mj.own_text("nemotron_h_56b", mj.nemotron_h("56b"), parallel=_tensor(8), **SETTINGS)


def nemotron_h_8b_debug() -> mj.RunConfig:
    """nemotron_h_8b in tiny sizes, on one device or any layout."""
    return mj.library_debug_config(nemotron_h_8b(), _debug_model())


def nemotron_h_56b_debug() -> mj.RunConfig:
    """nemotron_h_56b in tiny sizes: tensor 2, and data 4 on eight devices."""
    return mj.library_debug_config(nemotron_h_56b(), _debug_model(), parallel=_tensor(2))


def _tensor(size: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(tensor=size, sequence=True)


def _debug_model() -> mj.DecoderConfig:
    return mj.nemotron_h("debug", sequence_length=64, vocabulary_size=257)
