"""Llama-3 70B with rows of 8192 tokens on your own text.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=llama3_70b.py --devices=h100:128
Run:      python -m megajax.train --config=llama3_70b.py                     (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=llama3_70b.py:debug --devices=cpu:8
Hardware: 16 hosts of 8 GPUs with 80 GB: tensor 8, pipeline 4, data 4. Compiled for absent H100s, not run on any: peak
          36.4 GiB per GPU
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
    """15 T tokens, 4 M a step, cosine from 1.5e-4 to 1.5e-6."""
    return RunConfig(
        model=llama3("70b"),
        parallel=ParallelConfig(
            pipeline=4, tensor=8, sequence=True, data_sharding="zero1", schedule="interleaved", virtual_stages=5
        ),
        data=BlendConfig(paths=("data/corpus_text_document",), split="998,1,1", isolate_documents=True),
        tokenizer=HuggingFaceTokenizerConfig(path="data/tokenizer.json"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=1.5e-4, min_lr=1.5e-6, warmup_steps=8000),
        batch=BatchConfig(global_size=512, micro_size=1),
        evaluation=EvaluationConfig(every=1000, batches=4),
        checkpoint=CheckpointConfig(every=250),
        steps=3_600_000,
        run_dir="runs/llama3_70b",
    )


def debug() -> RunConfig:
    """The same tree in toy sizes, in a pipeline of 2 stages x 2 virtual stages x tensor 2 x data 2."""
    return toy(
        config(),
        llama3("debug", sequence_length=64, vocabulary_size=512),
        parallel=ParallelConfig(
            pipeline=2, tensor=2, sequence=True, data_sharding="zero1", schedule="interleaved", virtual_stages=2
        ),
    )
