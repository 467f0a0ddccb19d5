"""Preference optimization (DPO) of released models on your own pairs of answers. `config()` is dpo_llama3_8b.

The same configs train with ORPO, SimPO or KTO by --model.objective.type (docs/tuning.md). reward_llama3_8b trains
a reward model on the same pairs, for grpo.py (docs/reinforcement.md).

Prepare:  hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct
          pairs as data/preferences.jsonl (docs/data.md)
Run:      python -m megajax.train --config=dpo.py
Laptop:   python -m megajax.train --config=dpo.py:debug --devices=cpu:8
Hardware: 8 GPUs with 80 GB; not run on GPUs yet
Expect:   the debug twin prefers the right one of two answers in over 95 % of held-out pairs, in two minutes on a CPU
"""

from dataclasses import replace
from pathlib import Path

import megajax as mj

SCORE = mj.ChoiceHeadConfig(choices=2, pooling="last", pooler=False, dropout=0.0, bias=False)
"""A score of each answer, as classifiers of decoders in transformers compute it."""


def config() -> mj.RunConfig:
    """The Llama 3.1 8B."""
    return dpo_llama3_8b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return dpo_llama3_8b_debug()


def dpo_llama3_8b() -> mj.RunConfig:
    """Llama 3.1 8B on rows of 4096 tokens. 8 GPUs with 80 GB: FSDP."""
    folder = "models/Llama-3.1-8B-Instruct"
    model = mj.llama3("8b", sequence_length=4096, llama3_scaling=True)
    return mj.RunConfig(
        model=mj.with_objective(model, mj.DPOConfig(beta=0.1)),
        parallel=mj.ParallelConfig(data_sharding="fsdp"),
        data=mj.PreferencesConfig(paths=("data/preferences.jsonl",), split="98,2,0"),
        tokenizer=mj.HuggingFaceTokenizerConfig(path=folder),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.0),
        schedule=mj.ScheduleConfig(lr=5e-7, min_lr=5e-8, warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=32, micro_size=2),
        evaluation=mj.EvaluationConfig(every=50, batches=4),
        checkpoint=mj.CheckpointConfig(load=Path(f"hf:{folder}"), every=250),
        steps=500,
        run_dir="runs/dpo_llama3_8b",
    )


def dpo_llama3_8b_debug() -> mj.RunConfig:
    """dpo_llama3_8b in tiny sizes, with fresh weights and synthetic pairs, as bytes."""
    model = mj.llama3("debug", sequence_length=256, vocabulary_size=257)
    return mj.debug_config(
        dpo_llama3_8b(),
        mj.with_objective(model, mj.DPOConfig(beta=0.1)),
        data=mj.MockPreferencesConfig(),
        tokenizer=mj.ByteTokenizerConfig(),
        schedule=mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        evaluation=mj.EvaluationConfig(every=50, batches=2),
        checkpoint=mj.CheckpointConfig(every=50),
        steps=100,
    )


def reward_llama3_8b() -> mj.RunConfig:
    """Llama 3.1 8B with a score of each answer, trained on the same pairs (Bradley-Terry). 8 GPUs with 80 GB: FSDP."""
    base = dpo_llama3_8b()
    model = mj.llama3("8b", sequence_length=2048, llama3_scaling=True)
    weights = mj.WeightsConfig(run="hf:models/Llama-3.1-8B-Instruct", fresh=("head.*",))
    return base.but(
        model=mj.with_text_head(model, SCORE),
        data=replace(base.data, answers="choices"),
        schedule=mj.ScheduleConfig(lr=1e-5, min_lr=1e-6, warmup_fraction=0.1),
        checkpoint=mj.CheckpointConfig(weights=(weights,), every=250),
        run_dir="runs/reward_llama3_8b",
    )


def reward_llama3_8b_debug() -> mj.RunConfig:
    """reward_llama3_8b in tiny sizes, with fresh weights and synthetic pairs, as bytes."""
    model = mj.llama3("debug", sequence_length=64, vocabulary_size=257)
    return mj.debug_config(
        reward_llama3_8b(),
        mj.with_text_head(model, SCORE),
        data=mj.MockPreferencesConfig(answers="choices"),
        tokenizer=mj.ByteTokenizerConfig(),
        schedule=mj.ScheduleConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.1),
        evaluation=mj.EvaluationConfig(every=50, batches=2),
        checkpoint=mj.CheckpointConfig(every=50),
        steps=100,
    )
