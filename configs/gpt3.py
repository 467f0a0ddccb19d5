"""GPT-3 (Brown et al. 2020, table 2.1) and two smaller models of the same architecture, a function per size.

`config()` is gpt3_50m. It trains on bytes of the Python standard library, so it needs no preparation. The other sizes
read data/corpus_text_document. Every size has a debug twin: gpt3_175b_debug for gpt3_175b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=gpt2 \
              --vocab-file=data/vocab.json --merge-file=data/merges.txt --append-eod
Plan:     python -m megajax.plan --config=gpt3.py:gpt3_175b --devices=h100:128
Run:      python -m megajax.train --config=gpt3.py:gpt3_1_3b                (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=gpt3.py:gpt3_175b_debug --devices=cpu:8
Hardware: each size names its own. The large sizes were compiled for virtual H100s and not run: docs/layouts.md
          has the peak memory of each
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 50M size."""
    return gpt3_50m()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return gpt3_50m_debug()


def gpt3_50m() -> mj.RunConfig:
    """16 layers x 512 hidden, 8 heads, rows of 512 bytes; 50.8 M parameters. 8192 bytes a step.

    Runs on one, two, four or eight devices. On one GPU, --batch.micro_size=16 has fewer and larger kernels. On two CPU
    cores a step takes tens of seconds; gpt3_50m_debug and quickstart.py take less.
    """
    return mj.RunConfig(
        model=mj.gpt3("50m", sequence_length=512, vocabulary_size=257),
        data=mj.StandardLibraryConfig(megabytes=20),
        tokenizer=mj.ByteTokenizerConfig(),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=6e-4, min_lr=6e-5, warmup_fraction=0.05),
        batch=mj.BatchConfig(global_size=16, micro_size=2),
        evaluation=mj.EvaluationConfig(every=200, batches=10),
        checkpoint=mj.CheckpointConfig(every=500),
        logging=mj.LoggingConfig(prompt="def "),
        steps=2000,
        run_dir="runs/gpt3_50m",
    )


def gpt3_160m() -> mj.RunConfig:
    """12 layers x 896 hidden, 14 heads; 162 M parameters. 3.2 B tokens, 20 per parameter, 0.5 M a step."""
    parallel = mj.ParallelConfig(data_sharding="zero1")
    batch = mj.BatchConfig(global_size=256, micro_size=8)
    return _own_text("160m", parallel=parallel, batch=batch, schedule=_cosine(6e-4, 6e-5), steps=6200, save_every=500)


def gpt3_1_3b() -> mj.RunConfig:
    """24 layers x 2048 hidden, 16 heads. 300 B tokens, 1 M a step. 8 GPUs with 80 GB, data 8."""
    parallel = mj.ParallelConfig(data_sharding="zero1")
    batch = mj.BatchConfig(global_size=512, micro_size=4)
    return _own_text(
        "1.3b", parallel=parallel, batch=batch, schedule=_cosine(2e-4, 2e-5), steps=286_000, save_every=1000
    )


def gpt3_6_7b() -> mj.RunConfig:
    """32 layers x 4096 hidden, 32 heads. 300 B tokens, 2 M a step. 64 GPUs with 80 GB, data 64."""
    parallel = mj.ParallelConfig(data_sharding="zero1")
    batch = mj.BatchConfig(global_size=1024, micro_size=4)
    run = _own_text(
        "6.7b", parallel=parallel, batch=batch, schedule=_cosine(1.2e-4, 1.2e-5), steps=143_000, save_every=500
    )
    return mj.on_layout(run, parallel, ("activation",), micro_size=4)


def gpt3_175b() -> mj.RunConfig:
    """96 layers x 12288 hidden, 96 heads. 300 B tokens, 3.1 M a step.

    128 GPUs with 80 GB: pipeline 16 x tensor 4 x data 2; on 1024, data 16. In full ticks the forward of a microbatch
    and the backward of another hide each other's collectives.
    """
    parallel = mj.ParallelConfig(pipeline=16, tensor=4, sequence=True, data_sharding="zero1")
    batch = mj.BatchConfig(global_size=1536, micro_size=1, side_by_side=2)
    return _own_text("175b", parallel=parallel, batch=batch, schedule=_cosine(6e-5, 6e-6), steps=95_368, save_every=250)


def gpt3_175b_h200() -> mj.RunConfig:
    """gpt3_175b on 128 GPUs with 141 GB: pipeline 8 with 2 virtual stages x tensor 2 x data 8."""
    parallel = mj.ParallelConfig(pipeline=8, tensor=2, sequence=True, schedule="interleaved", virtual_stages=2)
    return mj.on_layout(gpt3_175b(), parallel)


def gpt3_50m_debug() -> mj.RunConfig:
    """gpt3_50m in tiny sizes."""
    return mj.debug_config(gpt3_50m(), _debug_model())


def gpt3_160m_debug() -> mj.RunConfig:
    """gpt3_160m in tiny sizes."""
    return mj.debug_config(gpt3_160m(), _debug_model())


def gpt3_1_3b_debug() -> mj.RunConfig:
    """gpt3_1_3b in tiny sizes."""
    return mj.debug_config(gpt3_1_3b(), _debug_model())


def gpt3_6_7b_debug() -> mj.RunConfig:
    """gpt3_6_7b in tiny sizes, on one device."""
    return mj.debug_config(gpt3_6_7b(), _debug_model())


def gpt3_175b_debug() -> mj.RunConfig:
    """gpt3_175b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    parallel = mj.ParallelConfig(pipeline=2, tensor=2, sequence=True, data_sharding="zero1")
    model = _debug_model()
    model = replace(model, stack=replace(model.stack, repeats=4))  # two layers a stage, side by side
    return mj.debug_config(gpt3_175b(), model, parallel=parallel)


def _debug_model() -> mj.DecoderConfig:
    return mj.gpt3("debug", sequence_length=64, vocabulary_size=512)


def _cosine(lr: float, min_lr: float) -> mj.ScheduleConfig:
    """Warm-up over 375 M tokens, then cosine (Brown et al. 2020, appendix B)."""
    return mj.ScheduleConfig(lr=lr, min_lr=min_lr, warmup_samples=183_105)


def _own_text(
    size: str,
    *,
    parallel: mj.ParallelConfig,
    batch: mj.BatchConfig,
    schedule: mj.ScheduleConfig,
    steps: int,
    save_every: int,
) -> mj.RunConfig:
    """GPT-2 tokens of your own text, in rows of 2048."""
    return mj.RunConfig(
        model=mj.gpt3(size),
        parallel=parallel,
        data=mj.BlendConfig(paths=("data/corpus_text_document",), split="989,10,1"),
        tokenizer=mj.GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=schedule,
        batch=batch,
        evaluation=mj.EvaluationConfig(every=1000, batches=10),
        checkpoint=mj.CheckpointConfig(every=save_every),
        steps=steps,
        run_dir=f"runs/gpt3_{size.replace('.', '_')}",
    )
