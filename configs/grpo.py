"""Reinforcement learning (GRPO) of released models with your own reward functions. `config()` is grpo_llama3_8b.

The same configs train by DAPO, Dr. GRPO or GSPO (docs/reinforcement.md).

Prepare:  hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct
          prompts as data/prompts.jsonl, a function in rewards.py
Run:      python -m megajax.train --config=grpo.py
Laptop:   python -m megajax.train --config=grpo.py:debug --devices=cpu:1
Hardware: 8 GPUs with 80 GB; not run on GPUs yet
Expect:   the debug twin learns sums of two digits from their rewards alone, in minutes on a CPU
"""

from pathlib import Path

import megajax as mj


def config() -> mj.RunConfig:
    """The Llama 3.1 8B."""
    return grpo_llama3_8b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return grpo_llama3_8b_debug()


def grpo_llama3_8b() -> mj.RunConfig:
    """Llama 3.1 8B, 64 prompts with 16 answers a rollout, one update each. 8 GPUs with 80 GB: FSDP."""
    folder = "models/Llama-3.1-8B-Instruct"
    model = mj.llama3("8b", sequence_length=2048, llama3_scaling=True)
    return mj.RunConfig(
        model=mj.with_objective(model, mj.GRPOConfig(average="tokens", clip_high=0.28)),
        parallel=mj.ParallelConfig(data_sharding="fsdp"),
        data=mj.RolloutsConfig(
            paths=("data/prompts.jsonl",),
            rewards=("rewards.py:reward",),
            prompts=64,
            answers=16,
            prompt_tokens=512,
            max_tokens=1536,
        ),
        tokenizer=mj.HuggingFaceTokenizerConfig(path=folder),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.0),
        schedule=mj.ScheduleConfig(lr=1e-6, min_lr=1e-6, warmup_fraction=0.02),
        batch=mj.BatchConfig(global_size=1024, micro_size=1),
        checkpoint=mj.CheckpointConfig(load=Path(f"hf:{folder}"), every=25),
        steps=500,
        run_dir="runs/grpo_llama3_8b",
    )


def grpo_llama3_8b_debug() -> mj.RunConfig:
    """grpo_llama3_8b in tiny sizes, with fresh weights, on sums of two digits, as bytes."""
    model = mj.llama3("debug", sequence_length=20, vocabulary_size=257)
    return mj.debug_config(
        grpo_llama3_8b(),
        mj.with_objective(model, mj.GRPOConfig(average="tokens", clip_high=0.28)),
        data=mj.DigitSumsConfig(prompts=32, answers=16, scale="none", inference=mj.InferenceConfig(rows=256)),
        tokenizer=mj.ByteTokenizerConfig(),
        schedule=mj.ScheduleConfig(lr=2e-3, min_lr=2e-3, warmup_fraction=0.02),
        batch=mj.BatchConfig(global_size=128, micro_size=16),
        evaluation=mj.EvaluationConfig(),
        checkpoint=mj.CheckpointConfig(every=50),
        steps=200,
    )
