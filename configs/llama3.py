"""Llama 3 (Llama team 2024, table 3) on your own text, a function per size. `config()` is llama3_8b.

Every size has a debug twin: llama3_70b_debug for llama3_70b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=llama3.py:llama3_405b --devices=h100:1024
Run:      python -m megajax.train --config=llama3.py                        (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=llama3.py:llama3_70b_debug --devices=cpu:8
Hardware: each size names its own. All but llama3_7m were compiled for virtual H100s, not run: docs/layouts.md has
          the peak memory of each
"""

from dataclasses import replace
from typing import Any

import megajax as mj

KI = 1024
LONG_ROWS = ("norm", "latent", "query_key_value", "gate", "residual", "mlp", "activation")
"""Recomputed in layers of long rows: everything but attention."""


def config() -> mj.RunConfig:
    """The 8B size."""
    return llama3_8b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return llama3_8b_debug()


def llama3_7m() -> mj.RunConfig:
    """4 layers x 64 hidden with GPT-2 tokens: a first run on your own text, on 2 CPU cores or any GPU.

    Most of the model is its two tables of 50257 tokens. Prepare the text with --tokenizer=gpt2
    --vocab-file=data/vocab.json --merge-file=data/merges.txt; on a GPU, add --precision.compute=bfloat16.
    """
    return mj.RunConfig(
        model=mj.llama3("debug", sequence_length=128, vocabulary_size=50257),
        data=mj.BlendConfig(paths=("data/corpus_text_document",), split="95,5,0", isolate_documents=True),
        tokenizer=mj.GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        precision=mj.PrecisionConfig(compute="float32"),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=1e-3, min_lr=1e-4, warmup_steps=20),
        batch=mj.BatchConfig(global_size=8, micro_size=2),
        evaluation=mj.EvaluationConfig(every=100, batches=4),
        checkpoint=mj.CheckpointConfig(every=100),
        steps=200,
        run_dir="runs/llama3_7m",
    )


def llama3_8b() -> mj.RunConfig:
    """4 M tokens a step, cosine from 3e-4 to 3e-5. 8 GPUs with 80 GB, FSDP over data 8."""
    run = mj.own_text(
        "llama3_8b",
        mj.llama3("8b"),
        schedule=mj.ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000),
        rows=512,
        evaluation=mj.EvaluationConfig(every=1000, batches=8),
        checkpoint=mj.CheckpointConfig(every=500),
        steps=500_000,
    )
    recompute = ("norm", "activation", "query_key_value")
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), recompute, micro_size=2)


def llama3_8b_h200() -> mj.RunConfig:
    """llama3_8b on 8 GPUs with 141 GB: ZeRO-1 over data 8."""
    return mj.on_layout(llama3_8b(), mj.ParallelConfig(data_sharding="zero1"), ("activation",), micro_size=2)


def llama3_70b() -> mj.RunConfig:
    """15 T tokens, 4 M a step, cosine from 1.5e-4 to 1.5e-6.

    64 GPUs with 80 GB and their multiples: tensor 4 x context 2 x pipeline 4 x data 2. In full ticks the forward of a
    microbatch and the backward of another hide each other's collectives.
    """
    return mj.own_text(
        "llama3_70b",
        mj.llama3("70b"),
        parallel=_stages(4, tensor=4),
        schedule=mj.ScheduleConfig(lr=1.5e-4, min_lr=1.5e-6, warmup_steps=8000),
        rows=512,
        side_by_side=2,
        steps=3_600_000,
    )


def llama3_70b_h200() -> mj.RunConfig:
    """llama3_70b on 64 GPUs with 141 GB: tensor 2 x context 2 x pipeline 4 with 4 virtual stages x data 4."""
    return mj.on_layout(llama3_70b(), _stages(4, tensor=2, virtual_stages=4), ("activation",))


def llama3_405b() -> mj.RunConfig:
    """15 T tokens, 16 M a step, cosine from 8e-5 to 8e-7.

    1024 GPUs with 80 GB: tensor 8 x context 2 x pipeline 16 x data 4, with full ticks as in llama3_70b.
    """
    return mj.own_text(
        "llama3_405b",
        mj.llama3("405b"),
        parallel=_stages(16, tensor=8),
        schedule=mj.ScheduleConfig(lr=8e-5, min_lr=8e-7, warmup_steps=8000),
        rows=2048,
        side_by_side=2,
        steps=900_000,
    )


def llama3_405b_h200() -> mj.RunConfig:
    """llama3_405b on 1024 GPUs with 141 GB: tensor 4 x context 2 x pipeline 16 with 4 virtual stages x data 8."""
    return mj.on_layout(llama3_405b(), _stages(16, tensor=4, virtual_stages=4))


def llama3_8b_32k() -> mj.RunConfig:
    """llama3_8b on rows of 32,768 tokens. 8 GPUs with 80 GB, context 2 x data 4.

    RoPE as in training on short rows: its base, 500,000, serves up to 32,768 positions (Xiong et al. 2023,
    "Effective Long-Context Scaling of Foundation Models"; Llama team 2024, section 3.2).
    """
    return _long_rows("llama3_8b_32k", mj.llama3("8b", sequence_length=32 * KI), context=2, rows=128)


def llama3_8b_128k() -> mj.RunConfig:
    """llama3_8b on rows of 131,072 tokens, with Llama 3.1's RoPE scaling. 16 GPUs with 80 GB, context 8 x data 2."""
    model = mj.llama3("8b", sequence_length=128 * KI, llama3_scaling=True)
    return _long_rows("llama3_8b_128k", model, context=8, rows=32)


def llama3_8b_1m() -> mj.RunConfig:
    """llama3_8b on rows of 1,048,576 tokens. 128 GPUs with 80 GB, context 16 x tensor 2 x data 4.

    Base of RoPE: 2.8e9, as in Gradient's Llama-3 8B of that length (Gradient 2024, model card of
    Llama-3-8B-Instruct-Gradient-1048k).
    """
    model = mj.llama3("8b", sequence_length=1024 * KI, rope_base=2.8e9)
    return _long_rows("llama3_8b_1m", model, context=16, tensor=2, rows=4)


def llama3_70b_128k() -> mj.RunConfig:
    """llama3_70b on rows of 131,072 tokens, with Llama 3.1's RoPE scaling.

    64 GPUs with 80 GB, context 8 x tensor 2 x data 4.
    """
    model = mj.llama3("70b", sequence_length=128 * KI, llama3_scaling=True)
    return _long_rows("llama3_70b_128k", model, context=8, tensor=2, rows=32, lr=1.5e-5)


def llama3_7m_debug() -> mj.RunConfig:
    """llama3_7m in tiny sizes, with mock data."""
    return mj.debug_config(llama3_7m(), _debug_model())


def llama3_8b_debug() -> mj.RunConfig:
    """llama3_8b in tiny sizes, on one device, or on eight with --devices=cpu:8 --parallel.tensor=2."""
    return mj.debug_config(llama3_8b(), _debug_model())


def llama3_70b_debug() -> mj.RunConfig:
    """llama3_70b in tiny sizes: pipeline 2 x context 2 x tensor 2 on eight devices."""
    return mj.debug_config(llama3_70b(), _debug_model(), parallel=_stages(2, tensor=2))


def llama3_405b_debug() -> mj.RunConfig:
    """llama3_405b in tiny sizes, in the layout of llama3_70b_debug."""
    return mj.debug_config(llama3_405b(), _debug_model(), parallel=_stages(2, tensor=2))


def _long_rows(
    name: str, model: mj.DecoderConfig, *, context: int, rows: int, tensor: int = 1, lr: float = 3e-5
) -> mj.RunConfig:
    """Training on from a model of short rows, given by --checkpoint.load, at a tenth of its learning rate.

    Layers save the residual stream and the output of attention, which takes longest to compute again. Rows are so long
    that the gathers of fsdp hide behind a layer's computing.
    """
    return mj.own_text(
        name,
        replace(model, recompute=LONG_ROWS),
        parallel=mj.ParallelConfig(context=context, tensor=tensor, sequence=tensor > 1, data_sharding="fsdp"),
        schedule=mj.ScheduleConfig(lr=lr, min_lr=lr / 10, warmup_steps=50),
        rows=rows,
        steps=1000,
    )


def llama3_8b_32k_debug() -> mj.RunConfig:
    """llama3_8b_32k in tiny sizes: rows of 256 tokens over context 4, and data 2 on eight devices."""
    return _long_twin(llama3_8b_32k())


def llama3_8b_128k_debug() -> mj.RunConfig:
    """llama3_8b_128k in tiny sizes, in the layout of llama3_8b_32k_debug."""
    return _long_twin(llama3_8b_128k(), llama3_scaling=True)


def llama3_8b_1m_debug() -> mj.RunConfig:
    """llama3_8b_1m in tiny sizes: rows of 256 tokens over context 4 x tensor 2."""
    return _long_twin(llama3_8b_1m(), rope_base=2.8e9)


def llama3_70b_128k_debug() -> mj.RunConfig:
    """llama3_70b_128k in tiny sizes, in the layout of llama3_8b_1m_debug."""
    return _long_twin(llama3_70b_128k(), llama3_scaling=True)


def _debug_model() -> mj.DecoderConfig:
    return mj.llama3("debug", sequence_length=64, vocabulary_size=512)


def _long_twin(run: mj.RunConfig, **rope: Any) -> mj.RunConfig:
    """On four devices and more, from random weights. rope: settings of RoPE, those of the run."""
    tensor = run.parallel.tensor
    model = mj.llama3("debug", sequence_length=256, vocabulary_size=512, **rope)
    return mj.debug_config(
        run,
        replace(model, recompute=LONG_ROWS),
        parallel=replace(run.parallel, context=4, tensor=tensor, sequence=tensor > 1),
        schedule=mj.ScheduleConfig(lr=1e-3, min_lr=1e-4, warmup_fraction=0.25),
    )


def _stages(pipeline: int, *, tensor: int, virtual_stages: int = 1) -> mj.ParallelConfig:
    """A pipeline, interleaved with several virtual stages, with rows over rings of two devices."""
    return mj.ParallelConfig(
        pipeline=pipeline,
        context=2,
        tensor=tensor,
        sequence=True,
        context_strategy="ring",
        schedule="interleaved" if virtual_stages > 1 else "1f1b",
        virtual_stages=virtual_stages,
    )
