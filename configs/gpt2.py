"""GPT-2 (Radford et al. 2019) on your own text. `config()` is the 124M size.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=gpt2 \
              --vocab-file=data/vocab.json --merge-file=data/merges.txt --append-eod
Run:      python -m megajax.train --config=gpt2.py
Laptop:   python -m megajax.train --config=gpt2.py:debug
Hardware: meant for one host of 8 GPUs, not yet run on one; 0.5 M tokens a step
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 124M size."""
    return gpt2_124m()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return gpt2_124m_debug()


def gpt2_124m() -> mj.RunConfig:
    """12 layers x 768 hidden, 12 heads. 315 B tokens: cosine to a tenth, warm-up of 2000 steps."""
    return mj.RunConfig(
        model=mj.gpt2("124m", dropout=0.0),
        data=mj.BlendConfig(paths=("data/corpus_text_document",), split="989,10,1"),
        tokenizer=mj.GPT2TokenizerConfig(vocabulary="data/vocab.json", merges="data/merges.txt"),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=6e-4, min_lr=6e-5, warmup_steps=2000),
        batch=mj.BatchConfig(global_size=512, micro_size=16),
        evaluation=mj.EvaluationConfig(every=1000, batches=20),
        checkpoint=mj.CheckpointConfig(every=1000),
        steps=600_000,
        run_dir="runs/gpt2_124m",
    )


def gpt2_124m_debug() -> mj.RunConfig:
    """The same tree in tiny sizes: 2 layers, mock data, seconds on a laptop."""
    return mj.debug_config(gpt2_124m(), mj.gpt2("debug", sequence_length=64, vocabulary_size=512, dropout=0.0))
