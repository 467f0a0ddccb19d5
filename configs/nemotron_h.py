"""Nemotron-H (NVIDIA 2025): Mamba-2, MLPs and a few layers of attention, on your own text. `config()` is nemotron_h_8b.

Sizes are those of the released configs: config.json of nvidia/Nemotron-H-8B-Base-8K and nvidia/Nemotron-H-56B-Base-8K.
Every size has a debug twin, which trains on the source files of Python's standard library: nemotron_h_56b_debug for
nemotron_h_56b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Run:      python -m megajax.train --config=nemotron_h.py                    (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=nemotron_h.py:debug --devices=cpu:8 --parallel.tensor=2 --parallel.pipeline=2
Hardware: each size names its own; not yet run on GPUs
"""

from dataclasses import replace
from typing import Any

from megajax.mesh.config import ParallelConfig
from megajax.models.configs import DecoderConfig
from megajax.models.presets.mamba import nemotron_h
from megajax.optim.config import ScheduleConfig
from megajax.training.presets import library_debug_config, own_text
from megajax.training.run_config import RunConfig

SETTINGS: dict[str, Any] = {
    "schedule": ScheduleConfig(lr=8e-4, min_lr=8e-6, warmup_steps=2000),
    "rows": 768,
    "steps": 2_000_000,
}
"""Of all sizes: rows have 8192 tokens."""


def config() -> RunConfig:
    """The 8B size."""
    return nemotron_h_8b()


def debug() -> RunConfig:
    """The debug twin of `config()`."""
    return nemotron_h_8b_debug()


def nemotron_h_8b() -> RunConfig:
    """52 layers, 4 of them attention. 32 GPUs with 80 GB, tensor 2 x data 16."""
    return own_text("nemotron_h_8b", nemotron_h("8b"), parallel=ParallelConfig(tensor=2, sequence=True), **SETTINGS)


def nemotron_h_56b() -> RunConfig:
    """118 layers, 10 of them attention. 256 GPUs with 80 GB, tensor 8 x FSDP over data 32."""
    model = replace(nemotron_h("56b"), recompute="full")
    return own_text(
        "nemotron_h_56b", model, parallel=ParallelConfig(tensor=8, sequence=True, data_sharding="fsdp"), **SETTINGS
    )


def nemotron_h_8b_debug() -> RunConfig:
    """nemotron_h_8b in tiny sizes, on one device or any layout."""
    return library_debug_config(nemotron_h_8b(), _debug_model())


def nemotron_h_56b_debug() -> RunConfig:
    """nemotron_h_56b in tiny sizes: tensor 2 x FSDP over data 4 on eight devices."""
    parallel = ParallelConfig(tensor=2, sequence=True, data_sharding="fsdp")
    return library_debug_config(nemotron_h_56b(), _debug_model(), parallel=parallel)


def _debug_model() -> DecoderConfig:
    return nemotron_h("debug", sequence_length=64, vocabulary_size=257)
