"""Mixtral (Jiang et al. 2024) on your own text, a function per size. `config()` is mixtral_8x7b.

Sizes are those of the released configs: config.json of mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1. Learning
rates were not published. Every size has a debug twin, which trains on the source files of Python's standard library:
mixtral_8x22b_debug for mixtral_8x22b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=mixtral.py --devices=h100:64
Run:      python -m megajax.train --config=mixtral.py                       (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=mixtral.py:debug --devices=cpu:8
          python -m megajax.train --config=mixtral.py:dense && python -m megajax.train --config=mixtral.py:upcycled
Hardware: each size names its own; mixtral_8x22b is planned by formula. Not yet run on GPUs
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import megajax as mj

SETTINGS: dict[str, Any] = {
    "schedule": mj.ScheduleConfig(lr=1e-4, min_lr=1e-5, warmup_steps=500),
    "rows": 256,
    "steps": 500_000,
}
"""Of all sizes: rows have 4096 tokens."""


def config() -> mj.RunConfig:
    """The 8x7B size."""
    return mixtral_8x7b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return mixtral_8x7b_debug()


def mixtral_8x7b() -> mj.RunConfig:
    """46.7 B parameters, 12.9 B active. 64 GPUs with 80 GB: pipeline 4 x 4 virtual stages x tensor 2 x data 8."""
    parallel = mj.ParallelConfig(pipeline=4, tensor=2, sequence=True, schedule="interleaved", virtual_stages=4)
    return mj.on_layout(mj.own_text("mixtral_8x7b", mj.mixtral("8x7b"), **SETTINGS), parallel, "none")


def mixtral_8x7b_h200() -> mj.RunConfig:
    """mixtral_8x7b on 64 GPUs with 141 GB: FSDP over data 64."""
    return mj.on_layout(mixtral_8x7b(), mj.ParallelConfig(data_sharding="fsdp"), "full", layers=1, micro_size=4)


def mixtral_8x22b() -> mj.RunConfig:
    """141 B parameters, 39 B active. 128 GPUs with 80 GB: pipeline 8 x tensor 4 x data 4.

    In full ticks the forward of a microbatch and the backward of another hide each other's collectives.
    """
    parallel = mj.ParallelConfig(pipeline=8, tensor=4, sequence=True)
    return mj.on_layout(mj.own_text("mixtral_8x22b", mj.mixtral("8x22b"), **SETTINGS), parallel, side_by_side=2)


def balance() -> mj.RunConfig:
    """4 layers with 8 experts, balanced without a loss: about 3 minutes on 2 CPU cores.

    The most loaded expert of the worst layer gets 3.7 times the mean at step 30, less than 1.3 times from step 250 on.
    """
    model = _with_router(_debug_model(), mj.RouterConfig(score="sigmoid", balance_rate=0.005))
    return mj.library_debug_config(
        mixtral_8x7b(),
        model,
        data=mj.StandardLibraryConfig(isolate_documents=True),
        batch=mj.BatchConfig(global_size=32, micro_size=32),
        evaluation=mj.EvaluationConfig(every=150, batches=4),
        checkpoint=mj.CheckpointConfig(every=150),
        logging=mj.LoggingConfig(layers_every=10),
        steps=300,
        run_dir="runs/mixtral_balance",
    )


def mixtral_8x7b_debug() -> mj.RunConfig:
    """mixtral_8x7b in tiny sizes: pipeline 2 x 2 virtual stages x tensor 2, and data 2 on eight devices."""
    parallel = mj.ParallelConfig(pipeline=2, tensor=2, sequence=True, schedule="interleaved", virtual_stages=2)
    return mj.library_debug_config(mixtral_8x7b(), _debug_model(), parallel=parallel)


def mixtral_8x22b_debug() -> mj.RunConfig:
    """mixtral_8x22b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    parallel = mj.ParallelConfig(pipeline=2, tensor=2, sequence=True)
    return mj.library_debug_config(mixtral_8x22b(), _debug_model(), parallel=parallel)


def dense() -> mj.RunConfig:
    """The debug twin on any layout, with a dense layer instead of experts: what `upcycled` starts from."""
    model = _debug_model()
    (block,) = model.stack.pattern
    model = replace(model, stack=model.stack.with_pattern((replace(block, mlp=block.mlp.expert),)))
    return replace(mj.library_debug_config(mixtral_8x7b(), model), run_dir="runs/mixtral_dense")


def upcycled() -> mj.RunConfig:
    """The debug twin on any layout, from the weights of `dense`: each expert starts as a copy of the dense layer."""
    checkpoint = mj.CheckpointConfig(weights=(mj.WeightsConfig(run=Path("runs/mixtral_dense")),))
    return mj.library_debug_config(
        mixtral_8x7b(), _debug_model(), checkpoint=checkpoint, run_dir="runs/mixtral_upcycled"
    )


def _debug_model() -> mj.DecoderConfig:
    return mj.mixtral("debug", sequence_length=64, vocabulary_size=257)


def _with_router(model: mj.DecoderConfig, router: mj.RouterConfig) -> mj.DecoderConfig:
    (block,) = model.stack.pattern
    block = replace(block, mlp=replace(block.mlp, router=router))
    return replace(model, stack=model.stack.with_pattern((block,)))
