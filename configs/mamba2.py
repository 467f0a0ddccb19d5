"""Mamba-2 (Dao and Gu 2024) on your own text, a function per size. `config()` is mamba2_130m.

Sizes are those of the released configs: config.json of state-spaces/mamba2-130m and so on, which read the tokens of
GPT-NeoX. Rates and batches are those of the papers (Gu and Dao 2023, appendix E.2). Every size has a debug twin, which
trains on the source files of Python's standard library: mamba2_2_7b_debug for mamba2_2_7b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Run:      python -m megajax.train --config=mamba2.py                        (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=mamba2.py:debug --devices=cpu:8 --parallel.tensor=2 --parallel.pipeline=2
Hardware: each size names its own; not yet run on GPUs
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The smallest size."""
    return mamba2_130m()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return mamba2_130m_debug()


def mamba2_130m() -> mj.RunConfig:
    """24 layers x 768 hidden. 8 GPUs, data 8."""
    return _sized("130m", lr=3e-3, micro=8)


def mamba2_370m() -> mj.RunConfig:
    """48 layers x 1024 hidden. 8 GPUs, data 8."""
    return _sized("370m", lr=1.5e-3, micro=8)


def mamba2_780m() -> mj.RunConfig:
    """48 layers x 1536 hidden. 8 GPUs, data 8."""
    return _sized("780m", lr=1.25e-3, micro=4)


def mamba2_1_3b() -> mj.RunConfig:
    """48 layers x 2048 hidden. 8 GPUs with 80 GB, data 8."""
    return _sized("1.3b", lr=1e-3, micro=2)


def mamba2_2_7b() -> mj.RunConfig:
    """64 layers x 2560 hidden, 1 M tokens a step. 16 GPUs with 80 GB, tensor 2 x data 8."""
    return _sized("2.7b", lr=8e-4, micro=2, rows=512, parallel=mj.ParallelConfig(tensor=2, sequence=True))


def mamba2_130m_debug() -> mj.RunConfig:
    """mamba2_130m in tiny sizes, on one device or any layout."""
    return _debug(mamba2_130m())


def mamba2_370m_debug() -> mj.RunConfig:
    """mamba2_370m in tiny sizes."""
    return _debug(mamba2_370m())


def mamba2_780m_debug() -> mj.RunConfig:
    """mamba2_780m in tiny sizes."""
    return _debug(mamba2_780m())


def mamba2_1_3b_debug() -> mj.RunConfig:
    """mamba2_1_3b in tiny sizes."""
    return _debug(mamba2_1_3b())


def mamba2_2_7b_debug() -> mj.RunConfig:
    """mamba2_2_7b in tiny sizes: tensor 2, and data 4 on eight devices."""
    return _debug(mamba2_2_7b(), mamba2_2_7b().parallel)


def _debug(cfg: mj.RunConfig, parallel: mj.ParallelConfig | None = None) -> mj.RunConfig:
    model = mj.mamba2("debug", sequence_length=64, vocabulary_size=257)
    return mj.library_debug_config(cfg, model, parallel=parallel or mj.ParallelConfig())


def _sized(
    size: str, *, lr: float, micro: int, rows: int = 256, parallel: mj.ParallelConfig | None = None
) -> mj.RunConfig:
    """300 G tokens, in `rows` of 2048 a step; documents are kept apart."""
    return mj.own_text(
        f"mamba2_{size.replace('.', '_')}",
        mj.mamba2(size),
        parallel=parallel or mj.ParallelConfig(),
        schedule=mj.ScheduleConfig(lr=lr, min_lr=1e-5, warmup_fraction=0.1),
        rows=rows,
        batch=mj.BatchConfig(global_size=rows, micro_size=micro),
        checkpoint=mj.CheckpointConfig(every=1000),
        steps=300_000_000_000 // (2048 * rows),
    )
