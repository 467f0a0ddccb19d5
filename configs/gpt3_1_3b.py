"""GPT-3 1.3B (Brown et al. 2020, table 2.1) on your own text.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=gpt2 \
              --vocab-file=data/vocab.json --merge-file=data/merges.txt --append-eod
Plan:     python -m megajax.plan --config=gpt3_1_3b.py --devices=h100:8
Run:      python -m megajax.train --config=gpt3_1_3b.py                     (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=gpt3_1_3b.py:debug
Hardware: one host of 8 GPUs with 80 GB: data 8. Compiled for absent H100s, not run on any: peak 18.0 GiB per GPU
"""

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.config import BlendConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.presets.gpt import gpt3
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import GPT2TokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig
from megajax.training.toy import toy


def config() -> RunConfig:
    """300 B tokens, 1 M a step; warm-up over 375 M tokens, cosine to a tenth."""
    return RunConfig(
        model=gpt3("1.3b"),
        parallel=ParallelConfig(data_sharding="zero1"),
        data=BlendConfig(paths=("data/corpus_text_document",), split="989,10,1"),
        tokenizer=GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=2e-4, min_lr=2e-5, warmup_samples=183_105),
        batch=BatchConfig(global_size=512, micro_size=4),
        evaluation=EvaluationConfig(every=1000, batches=10),
        checkpoint=CheckpointConfig(every=1000),
        steps=286_000,
        run_dir="runs/gpt3_1_3b",
    )


def debug() -> RunConfig:
    """The same tree in toy sizes."""
    return toy(config(), gpt3("debug", sequence_length=64, vocabulary_size=512))
