"""Llama-3 8B with rows of 8192 tokens on your own text.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Run:      python -m megajax.train --config=llama3_8b.py
Laptop:   python -m megajax.train --config=llama3_8b.py:debug
Hardware: one host of 8 GPUs with 80 GB: tensor 4, data 2. Compiled for absent H100s, not run on any: 11.2 GiB of state
          and 18.6 GiB of temporaries per GPU
"""

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.config import BlendConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.presets.llama import llama3
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import HuggingFaceTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig
from megajax.training.toy import toy


def config() -> RunConfig:
    """4 M tokens a step, cosine from 3e-4 to 3e-5."""
    return RunConfig(
        model=llama3("8b"),
        parallel=ParallelConfig(tensor=4, sequence=True, data_sharding="zero1"),
        data=BlendConfig(paths=("data/corpus_text_document",), split="998,1,1", isolate_documents=True),
        tokenizer=HuggingFaceTokenizerConfig(path="data/tokenizer.json"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000),
        batch=BatchConfig(global_size=512, micro_size=1),
        evaluation=EvaluationConfig(every=1000, batches=8),
        checkpoint=CheckpointConfig(every=500),
        steps=500_000,
        run_dir="runs/llama3_8b",
    )


def debug() -> RunConfig:
    """The same tree in toy sizes; runs on one device, or on eight with --devices=cpu:8 --parallel.tensor=2."""
    return toy(config(), llama3("debug", sequence_length=64, vocabulary_size=512))
