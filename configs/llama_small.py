"""A small Llama for a GPT-2 vocabulary: a first run on your own text, on a CPU or one GPU.

Prepare:  python -m megajax.preprocess --input TEXT --output-prefix data/corpus --tokenizer=gpt2 \
              --vocab-file=data/vocab.json --merge-file=data/merges.txt --append-eod
Run:      python -m megajax.train --config=llama_small.py --data.paths=data/corpus_text_document
Hardware: 2 CPU cores, or any GPU with --precision.compute=bfloat16
"""

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.config import BlendConfig
from megajax.models.presets.gpt import GPT_VOCABULARY
from megajax.models.presets.llama import llama3
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import GPT2TokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    """Two layers of 64: the vocabulary's table is most of the model."""
    return RunConfig(
        model=llama3("debug", sequence_length=128, vocabulary_size=GPT_VOCABULARY),
        data=BlendConfig(paths=("data/corpus_text_document",), split="95,5,0", isolate_documents=True),
        tokenizer=GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        precision=PrecisionConfig(compute="float32"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=1e-3, min_lr=1e-4, warmup_steps=20),
        batch=BatchConfig(global_size=8, micro_size=2),
        evaluation=EvaluationConfig(every=100, batches=4),
        checkpoint=CheckpointConfig(every=100),
        steps=200,
        run_dir="runs/llama_small",
    )
