"""Supervised fine-tuning of released models on your own conversations. `config()` is sft_llama3_8b.

A function per model, with a debug twin in tiny sizes; `_tuned` makes one of any model. docs/tuning.md has a first
tuning that needs no files, and a config for any Hugging Face folder.

Prepare:  the model's Hugging Face folder as models/NAME, conversations as data/chats.jsonl (docs/data.md)
Run:      python -m megajax.train --config=sft.py
Laptop:   python -m megajax.train --config=sft.py:debug --devices=cpu:8
Hardware: 8 GPUs with 80 GB; not run on GPUs yet
"""

from pathlib import Path

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.configs import ChatConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.configs import DecoderConfig
from megajax.models.presets.llama import llama3
from megajax.models.presets.qwen import qwen3
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.presets import debug_config
from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    """The Llama 3.1 8B."""
    return sft_llama3_8b()


def debug() -> RunConfig:
    """The debug twin of `config()`."""
    return sft_llama3_8b_debug()


def sft_llama3_8b() -> RunConfig:
    """Llama 3.1 8B on rows of 4096 tokens. 8 GPUs with 80 GB: FSDP."""
    return _tuned("llama3_8b", llama3("8b", sequence_length=4096, llama3_scaling=True), "models/Llama-3.1-8B-Instruct")


def sft_qwen3_8b() -> RunConfig:
    """Qwen 3 8B on rows of 4096 tokens. 8 GPUs with 80 GB: FSDP."""
    return _tuned("qwen3_8b", qwen3("8b", sequence_length=4096), "models/Qwen3-8B")


def sft_llama3_8b_debug() -> RunConfig:
    """sft_llama3_8b in tiny sizes, with fresh weights and mock data."""
    return debug_config(sft_llama3_8b(), llama3("debug", sequence_length=64, vocabulary_size=512))


def sft_qwen3_8b_debug() -> RunConfig:
    """sft_qwen3_8b in tiny sizes, with fresh weights and mock data."""
    return debug_config(sft_qwen3_8b(), qwen3("debug", sequence_length=64, vocabulary_size=512))


def _tuned(name: str, model: DecoderConfig, folder: str) -> RunConfig:
    """A model whose weights, tokenizer and chat template are in a Hugging Face folder, on 128 rows a step.

    Rows are packed conversations that do not attend to each other; answers alone have a loss.
    """
    return RunConfig(
        model=model,
        parallel=ParallelConfig(data_sharding="fsdp"),
        data=ChatConfig(paths=("data/chats.jsonl",), split="98,2,0", template=f"{folder}/tokenizer_config.json"),
        tokenizer=HuggingFaceTokenizerConfig(path=folder),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.0),
        schedule=ScheduleConfig(lr=1e-5, min_lr=1e-6, warmup_fraction=0.03),
        batch=BatchConfig(global_size=128, micro_size=1),
        evaluation=EvaluationConfig(every=100, batches=4),
        checkpoint=CheckpointConfig(load=Path(f"hf:{folder}"), every=500),
        steps=1000,
        run_dir=f"runs/sft_{name}",
    )
