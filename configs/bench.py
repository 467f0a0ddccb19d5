"""Shapes for measuring speed on one GPU with 141 GB; made-up rows, so nothing has to be prepared.

Run:      python -m benchmarks mfu --config=bench.py:llama_1b          (docs/benchmarks.md has the other programs)
Length:   --model.sequence_length=8192 --batch.micro_size=2 --batch.global_size=8 (llama_3b: as many tokens as before)
Hardware: one H200. Compiled for a virtual one, not run: peak 52.1 GiB (llama_1b), 57.7 (gpt_1_3b), 89.9 (llama_3b),
          109.0 (llama_8b_18_layers); as much at lengths of 2048, 4096 and 8192 with as many tokens. With
          --model.recompute=none they take 63.9, 75.8 and 102.3
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The middle one."""
    return llama_3b()


def gpt_1_3b() -> mj.RunConfig:
    """GPT-3 1.3B (Brown et al. 2020, table 2.1)."""
    return _run("gpt_1_3b", mj.gpt3("1.3b"), rows=16)


def llama_1b() -> mj.RunConfig:
    """The shape of Llama 3.2 1B: 16 layers of 2048, heads of 64."""
    return _run("llama_1b", _llama(layers=16, hidden=2048, heads=32), rows=8)


def llama_3b() -> mj.RunConfig:
    """The shape of Llama 3.2 3B: 28 layers of 3072, heads of 128."""
    return _run("llama_3b", _llama(layers=28, hidden=3072, heads=24), rows=4)


def llama_8b_18_layers() -> mj.RunConfig:
    """Llama 3 8B with 18 of its 32 layers: what fits beside float32 weights and moments."""
    model = mj.llama3("8b")
    return _run("llama_8b_18_layers", replace(model, stack=replace(model.stack, repeats=18)), rows=1)


def debug() -> mj.RunConfig:
    """Llama in tiny sizes, for trying the programs without a GPU."""
    return mj.debug_config(config(), mj.llama3("debug", sequence_length=64, vocabulary_size=512))


def debug_gpt() -> mj.RunConfig:
    """GPT in tiny sizes."""
    return mj.debug_config(gpt_1_3b(), mj.gpt3("debug", sequence_length=64, vocabulary_size=512))


def _llama(*, layers: int, hidden: int, heads: int) -> mj.DecoderConfig:
    mixer = mj.AttentionConfig(heads=heads, kv_heads=8, rope=mj.RopeConfig(base=500000.0))
    block = mj.BlockConfig(mixer=mixer, mlp=mj.GatedMLPConfig(ffn=8192), norm=mj.RMSNormConfig())
    stack = mj.StackConfig(pattern=(block,), repeats=layers)
    return mj.DecoderConfig(
        hidden=hidden,
        vocabulary_size=128256,
        sequence_length=4096,
        stack=stack,
        norm=mj.RMSNormConfig(),
        tied=True,
    )


def _run(name: str, model: mj.DecoderConfig, *, rows: int) -> mj.RunConfig:
    """Four microbatches of `rows` rows a step, so that the update weighs as little as in a real run."""
    return mj.RunConfig(
        model=model,
        data=mj.MockConfig(),
        tokenizer=mj.NullTokenizerConfig(vocabulary_size=model.vocabulary_size),
        optimizer=mj.AdamWConfig(beta2=0.95, weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=1e-4, min_lr=1e-5, warmup_steps=10),
        batch=mj.BatchConfig(global_size=4 * rows, micro_size=rows),
        evaluation=mj.EvaluationConfig(every=None),
        steps=100,
        run_dir=f"runs/bench_{name}",
    )
