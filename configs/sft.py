"""Supervised fine-tuning of released models on your own conversations. `config()` is sft_llama3_8b.

A function per model, with a debug twin in tiny sizes; `_tuned` makes one of any model. docs/tuning.md has a first
tuning that needs no files, and a config for any Hugging Face folder.

Prepare:  hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct
          hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B
          conversations as data/chats.jsonl (docs/data.md)
Run:      python -m megajax.train --config=sft.py
Laptop:   python -m megajax.train --config=sft.py:debug --devices=cpu:8
Hardware: 8 GPUs with 80 GB; not run on GPUs yet
"""

from pathlib import Path

import megajax as mj


def config() -> mj.RunConfig:
    """The Llama 3.1 8B."""
    return sft_llama3_8b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return sft_llama3_8b_debug()


def sft_llama3_8b() -> mj.RunConfig:
    """Llama 3.1 8B on rows of 4096 tokens. 8 GPUs with 80 GB: FSDP."""
    return _tuned(
        "llama3_8b", mj.llama3("8b", sequence_length=4096, llama3_scaling=True), "models/Llama-3.1-8B-Instruct"
    )


def sft_qwen3_8b() -> mj.RunConfig:
    """Qwen 3 8B on rows of 4096 tokens. 8 GPUs with 80 GB: FSDP."""
    return _tuned("qwen3_8b", mj.qwen3("8b", sequence_length=4096), "models/Qwen3-8B")


def sft_llama3_8b_debug() -> mj.RunConfig:
    """sft_llama3_8b in tiny sizes, with fresh weights and mock data."""
    return mj.debug_config(sft_llama3_8b(), mj.llama3("debug", sequence_length=64, vocabulary_size=512))


def sft_qwen3_8b_debug() -> mj.RunConfig:
    """sft_qwen3_8b in tiny sizes, with fresh weights and mock data."""
    return mj.debug_config(sft_qwen3_8b(), mj.qwen3("debug", sequence_length=64, vocabulary_size=512))


def _tuned(name: str, model: mj.DecoderConfig, folder: str) -> mj.RunConfig:
    """A model whose weights, tokenizer and chat template are in a Hugging Face folder, on 128 rows a step.

    Rows are packed conversations that do not attend to each other; answers alone have a loss.
    """
    return mj.RunConfig(
        model=model,
        parallel=mj.ParallelConfig(data_sharding="fsdp"),
        data=mj.ChatConfig(paths=("data/chats.jsonl",), split="98,2,0"),
        tokenizer=mj.HuggingFaceTokenizerConfig(path=folder),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.0),
        schedule=mj.ScheduleConfig(lr=1e-5, min_lr=1e-6, warmup_fraction=0.03),
        batch=mj.BatchConfig(global_size=128, micro_size=2),
        evaluation=mj.EvaluationConfig(every=100, batches=4),
        checkpoint=mj.CheckpointConfig(load=Path(f"hf:{folder}"), every=500),
        steps=1000,
        run_dir=f"runs/sft_{name}",
    )
