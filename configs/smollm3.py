"""SmolLM3 (Hugging Face 2025) on your own text. `config()` is smollm3_3b.

The size is that of the released config; learning rates are examples. The debug twin, smollm3_3b_debug or
debug, trains on the source files of Python's standard library.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=smollm3.py --devices=h100:32
Run:      python -m megajax.train --config=smollm3.py                (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=smollm3.py:debug --devices=cpu:8
Hardware: 32 H100. Planned by formula, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 3.1 B size."""
    return smollm3_3b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return smollm3_3b_debug()


def smollm3_3b() -> mj.RunConfig:
    """3.1 B parameters. 32 GPUs with 80 GB, fully sharded."""
    model = mj.smollm3("3b", sequence_length=4096)
    schedule = mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    parallel = mj.ParallelConfig(data_sharding="fsdp")
    return mj.own_text("smollm3_3b", model, parallel=parallel, schedule=schedule, rows=1024, steps=500_000)


def smollm3_3b_debug() -> mj.RunConfig:
    """smollm3_3b in tiny sizes, on one device or on eight."""
    model = mj.smollm3("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(smollm3_3b(), model)
