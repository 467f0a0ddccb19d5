"""BERT (Devlin et al. 2019; Shoeybi et al. 2019, section 5.5) on your own text. `config()` is the base size.

Every size has a debug twin, which trains on the documentation in Python's standard library and needs no preparation:
bert_large_debug for bert_large, debug for `config()`. `text` is a small model for a small text of your own.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus --tokenizer=wordpiece \
              --vocab-file=data/vocab.txt --split-sentences
Plan:     python -m megajax.plan --config=bert.py:bert_large --devices=h100:8
Run:      python -m megajax.train --config=bert.py
Laptop:   python -m megajax.train --config=bert.py:debug
Hardware: each size names its own; not yet run on GPUs
"""

from dataclasses import replace
from typing import Any

import megajax as mj


def config() -> mj.RunConfig:
    """The base size."""
    return bert_base()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return bert_base_debug()


def bert_base() -> mj.RunConfig:
    """12 layers x 768 hidden, 12 heads; 110 M parameters. 8 GPUs, data 8."""
    return _own_text("base", micro=64)


def bert_large() -> mj.RunConfig:
    """24 layers x 1024 hidden, 16 heads; 336 M parameters. 8 GPUs with 80 GB, data 8."""
    return _own_text("large", micro=32, parallel=mj.ParallelConfig(data_sharding="zero1"))


def bert_1_3b() -> mj.RunConfig:
    """24 layers x 2048 hidden, 32 heads. 32 GPUs with 80 GB, data 32."""
    return _own_text("1.3b", micro=16, parallel=mj.ParallelConfig(data_sharding="zero1"))


def bert_3_9b() -> mj.RunConfig:
    """48 layers x 2560 hidden, 40 heads. 64 GPUs with 80 GB, tensor 2 x pipeline 2 x data 16."""
    parallel = mj.ParallelConfig(pipeline=2, tensor=2, sequence=True, data_sharding="zero1")
    return _own_text("3.9b", micro=8, parallel=parallel)


def text() -> mj.RunConfig:
    """2 layers x 128 hidden on a text of a few megabytes, with a vocabulary of up to 4000: minutes on 2 CPU cores.

    Narrow, so initial weights are larger than usual; rotary positions; and the bias of each token, which stands for how
    often it occurs, learns faster than the rest. Without these the loss stays at the tokens' entropy for much longer.
    """
    model = mj.bert("text", sequence_length=64, vocabulary_size=4002, dropout=0.0)
    (block,) = model.stack.pattern
    block = replace(block, mixer=replace(block.mixer, rope=mj.RopeConfig()))
    model = replace(model, stack=replace(model.stack, pattern=(block,)), learned_positions=False)
    return mj.RunConfig(
        model=replace(model, init_std=0.08, embedding_std=0.04),
        data=mj.MaskedSentencesConfig(paths=("data/corpus_text_sentence",), split="95,5,0", mask_probability=0.2),
        tokenizer=mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt"),
        precision=mj.PrecisionConfig(compute="float32"),
        optimizer=mj.AdamWConfig(weight_decay=0.01, groups=(mj.GroupConfig(match="masked_bias", lr_multiplier=10),)),
        schedule=mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.05),
        batch=mj.BatchConfig(global_size=16, micro_size=16),
        evaluation=mj.EvaluationConfig(every=200, batches=16),
        checkpoint=mj.CheckpointConfig(every=200),
        steps=1450,
        run_dir="runs/bert_text",
    )


def bert_base_debug() -> mj.RunConfig:
    """bert_base in tiny sizes, on one device or any layout."""
    return _debug(bert_base())


def bert_large_debug() -> mj.RunConfig:
    """bert_large in tiny sizes."""
    return _debug(bert_large())


def bert_1_3b_debug() -> mj.RunConfig:
    """bert_1_3b in tiny sizes."""
    return _debug(bert_1_3b(), "debug-megatron")


def bert_3_9b_debug() -> mj.RunConfig:
    """bert_3_9b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    return _debug(bert_3_9b(), "debug-megatron", parallel=bert_3_9b().parallel)


def _debug(cfg: mj.RunConfig, size: str = "debug", **changes: Any) -> mj.RunConfig:
    """Sentences of at most 64 tokens, of a vocabulary of 2000."""
    model = mj.bert(size, sequence_length=64, vocabulary_size=2002, dropout=0.0)
    own: dict[str, Any] = {
        "data": mj.LibrarySentencesConfig(),
        "tokenizer": mj.LibraryWordPieceConfig(size=2000),
        "schedule": mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        "evaluation": mj.EvaluationConfig(every=50, batches=4),
        "checkpoint": mj.CheckpointConfig(every=50),
        "steps": 100,
    }
    return mj.debug_config(cfg, model, **own | changes)


def _own_text(size: str, *, micro: int, parallel: mj.ParallelConfig | None = None) -> mj.RunConfig:
    """1024 rows of 512 tokens a step, for 2 M steps; the rate decays linearly (Shoeybi et al. 2019, section 5.5).

    Without dropout, with which attention has the reference kernel alone.
    """
    return mj.RunConfig(
        model=mj.bert(size, dropout=0.0),
        parallel=parallel or mj.ParallelConfig(),
        data=mj.MaskedSentencesConfig(paths=("data/corpus_text_sentence",), split="989,10,1"),
        tokenizer=mj.WordPieceTokenizerConfig(vocabulary="data/vocab.txt"),
        optimizer=mj.AdamWConfig(weight_decay=0.01),
        schedule=mj.ScheduleConfig(lr=1e-4, style="linear", warmup_steps=10_000),
        batch=mj.BatchConfig(global_size=1024, micro_size=micro),
        evaluation=mj.EvaluationConfig(every=1000, batches=10),
        checkpoint=mj.CheckpointConfig(every=1000),
        steps=2_000_000,
        run_dir=f"runs/bert_{size.replace('.', '_')}",
    )
