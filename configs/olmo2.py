"""OLMo 2 (Team OLMo 2024) on your own text, a function per size. `config()` is olmo2_7b.

Every size has a debug twin: olmo2_32b_debug for olmo2_32b, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=olmo2.py:olmo2_32b --devices=h100:256
Run:      python -m megajax.train --config=olmo2.py                         (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=olmo2.py:debug --devices=cpu:8
Hardware: each size names its own. Compiled for virtual H100s, not run
"""

import megajax as mj


def config() -> mj.RunConfig:
    """The 7B size."""
    return olmo2_7b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return olmo2_7b_debug()


def olmo2_7b() -> mj.RunConfig:
    """4 M tokens a step, cosine from 3e-4 to 3e-5. 8 GPUs with 80 GB: ZeRO-1 over data 8."""
    run = _run("olmo2_7b", _model(4096, layers=32, heads=32, kv_heads=32, ffn=11_008), 3e-4)
    return mj.on_layout(run, mj.ParallelConfig(), ("activation",))


def olmo2_32b() -> mj.RunConfig:
    """4 M tokens a step, cosine from 6e-4 to 6e-5. 64 GPUs with 80 GB: pipeline 2 x tensor 4 x data 8.

    In full ticks the forward of a microbatch and the backward of another hide each other's collectives.
    """
    run = _run("olmo2_32b", _model(5120, layers=64, heads=40, kv_heads=8, ffn=27_648), 6e-4)
    return mj.on_layout(run, _stages(tensor=4), side_by_side=2)


def olmo2_7b_debug() -> mj.RunConfig:
    """olmo2_7b in tiny sizes, data-parallel."""
    return mj.debug_config(olmo2_7b(), _twin(kv_heads=4))


def olmo2_32b_debug() -> mj.RunConfig:
    """olmo2_32b in tiny sizes: pipeline 2 x tensor 2, and data 2 on eight devices."""
    return mj.debug_config(olmo2_32b(), _twin(kv_heads=2), parallel=_stages(tensor=2))


def _stages(tensor: int) -> mj.ParallelConfig:
    return mj.ParallelConfig(pipeline=2, tensor=tensor, sequence=True)


def _run(name: str, model: mj.DecoderConfig, lr: float) -> mj.RunConfig:
    schedule = mj.ScheduleConfig(lr=lr, min_lr=lr / 10, warmup_steps=2000)
    return mj.own_text(name, model, schedule=schedule, rows=1024, steps=500_000)


def _twin(kv_heads: int) -> mj.DecoderConfig:
    return _model(64, layers=4, heads=4, kv_heads=kv_heads, ffn=160, sequence_length=64, vocabulary_size=512)


def _model(
    hidden: int,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    sequence_length: int = 4096,
    vocabulary_size: int = 100_352,
) -> mj.DecoderConfig:
    norm = mj.RMSNormConfig(epsilon=1e-6)
    mixer = mj.AttentionConfig(
        heads=heads, kv_heads=kv_heads, qk_norm=norm, qk_norm_over="heads", rope=mj.RopeConfig(base=500_000.0)
    )
    block = mj.BlockConfig(mixer=mixer, mlp=mj.GatedMLPConfig(ffn=ffn), norm=norm, norm_placement="output")
    return mj.DecoderConfig(
        hidden=hidden,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        stack=mj.StackConfig(pattern=(block,), repeats=layers),
        norm=norm,
        init_std=0.02,
        family="olmo2",
    )
