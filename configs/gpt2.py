"""GPT-2 (Radford et al. 2019) on your own text. `config()` is the 124M size.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=gpt2 \
              --vocab-file=data/vocab.json --merge-file=data/merges.txt --append-eod
Run:      python -m megajax.train --config=gpt2.py
Laptop:   python -m megajax.train --config=gpt2.py:debug
Hardware: meant for one host of 8 GPUs, not yet run on one; 0.5 M tokens a step
"""

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.configs import BlendConfig
from megajax.models.presets.gpt import gpt2
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import GPT2TokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.presets import debug_config
from megajax.training.run_config import RunConfig


def config() -> RunConfig:
    """The 124M size."""
    return gpt2_124m()


def debug() -> RunConfig:
    """The debug twin of `config()`."""
    return gpt2_124m_debug()


def gpt2_124m() -> RunConfig:
    """12 layers x 768 hidden, 12 heads. 315 B tokens: cosine to a tenth, warm-up of 2000 steps."""
    return RunConfig(
        model=gpt2("124m", dropout=0.0),
        data=BlendConfig(paths=("data/corpus_text_document",), split="989,10,1"),
        tokenizer=GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        optimizer=AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=6e-4, min_lr=6e-5, warmup_steps=2000),
        batch=BatchConfig(global_size=512, micro_size=16),
        evaluation=EvaluationConfig(every=1000, batches=20),
        checkpoint=CheckpointConfig(every=1000),
        steps=600_000,
        run_dir="runs/gpt2_124m",
    )


def gpt2_124m_debug() -> RunConfig:
    """The same tree in tiny sizes: 2 layers, mock data, seconds on a laptop."""
    return debug_config(gpt2_124m(), gpt2("debug", sequence_length=64, vocabulary_size=512, dropout=0.0))
