"""GPT-3 175B (Brown et al. 2020) by tensor, pipeline, sequence and data parallelism, as Megatron-LM made it known.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=gpt2 \
              --vocab-file=data/vocab.json --merge-file=data/merges.txt --append-eod
Plan:     python -m megajax.plan --config=gpt3_175b.py --devices=h100:128
Run:      python -m megajax.train --config=gpt3_175b.py                     (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=gpt3_175b.py:debug --devices=cpu:8
Hardware: 16 hosts of 8 GPUs with 80 GB: tensor 8, pipeline 16; 128 hosts: data 8 as well. Compiled for absent H100s,
          not run on any: peak 35.1 GiB per GPU on 128, 21.4 GiB on 1024
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
    """300 B tokens, 3.1 M a step; warm-up over 375 M tokens, cosine to a tenth."""
    return RunConfig(
        model=gpt3("175b"),
        parallel=ParallelConfig(pipeline=16, tensor=8, sequence=True, data_sharding="zero1"),
        data=BlendConfig(paths=("data/corpus_text_document",), split="989,10,1"),
        tokenizer=GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=6e-5, min_lr=6e-6, warmup_samples=183_105),
        batch=BatchConfig(global_size=1536, micro_size=1),
        evaluation=EvaluationConfig(every=1000, batches=10),
        checkpoint=CheckpointConfig(every=250),
        steps=95_368,
        run_dir="runs/gpt3_175b",
    )


def debug() -> RunConfig:
    """The same tree in toy sizes, in a pipeline of 2 stages x tensor 2 x data 2."""
    return toy(
        config(),
        gpt3("debug", sequence_length=64, vocabulary_size=512),
        parallel=ParallelConfig(pipeline=2, tensor=2, sequence=True, data_sharding="zero1"),
    )
