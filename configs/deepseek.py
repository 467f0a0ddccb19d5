"""DeepSeek-V2-Lite and DeepSeek-V3 (DeepSeek-AI 2024) on your own text. `config()` is deepseek_v2_lite.

Sizes are those of the released configs: config.json of deepseek-ai/DeepSeek-V2-Lite and deepseek-ai/DeepSeek-V3;
learning rates and batches those of the papers (V2, appendix B; V3, section 4.2). Each size has a debug twin, which
trains on the source files of Python's standard library: deepseek_v3_debug for deepseek_v3, debug for `config()`.

Prepare:  python -m megajax.preprocess --input corpus.jsonl --output-prefix data/corpus \
              --tokenizer=data/tokenizer.json --append-eod
Plan:     python -m megajax.plan --config=deepseek.py:deepseek_v3 --devices=h100:1024
Run:      python -m megajax.train --config=deepseek.py                      (on every host, see docs/launch.md)
Laptop:   python -m megajax.train --config=deepseek.py:debug --devices=cpu:8 --parallel.expert=4
Hardware: each size names its own; not yet run on GPUs
"""

from dataclasses import replace

import megajax as mj

RECOMPUTE = ("norm", "latent", "activation", "mlp", "query_key_value", "core_attention")
"""Of deepseek_v3: layers save their inputs, the residual stream and what no part names."""


def config() -> mj.RunConfig:
    """The Lite size of V2."""
    return deepseek_v2_lite()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return deepseek_v2_lite_debug()


def deepseek_v2_lite() -> mj.RunConfig:
    """15.7 B parameters, 2.4 B active; 5.7 T tokens, 19 M a step. 16 GPUs with 80 GB: FSDP over data 16."""
    run = mj.own_text(
        "deepseek_v2_lite",
        mj.deepseek("v2-lite"),
        schedule=mj.ScheduleConfig(lr=4.2e-4, min_lr=4.2e-5, warmup_steps=2000),
        rows=4608,
        steps=302_000,
        evaluation=mj.EvaluationConfig(every=1000, batches=1),
    )
    recompute = ("norm", "latent", "activation", "query_key_value")
    return mj.on_layout(run, mj.ParallelConfig(data_sharding="fsdp"), recompute, micro_size=6)


def deepseek_v3() -> mj.RunConfig:
    """671 B parameters, 37 B active, and 11.6 B that predict further ahead; 8.7 of its 14.8 T tokens, 63 M a step.

    1024 GPUs with 80 GB: pipeline 16 x expert 8 x tensor 2 x data 4. Devices have room for 1.5 times the mean number
    of rows, which bounds their memory; the metrics count what is dropped beyond. A run counts up to 2^31 rows; the rest
    is a second run.
    """
    return mj.own_text(
        "deepseek_v3",
        replace(mj.deepseek("v3", dispatch=mj.DispatchConfig(room=1.5)), recompute=RECOMPUTE),
        parallel=mj.ParallelConfig(pipeline=16, expert=8, tensor=2, sequence=True),
        schedule=mj.ScheduleConfig(lr=2.2e-4, min_lr=2.2e-5, warmup_steps=2000),
        rows=15360,
        steps=139_000,
        evaluation=mj.EvaluationConfig(every=1000, batches=1),
    )


def deepseek_v3_h200() -> mj.RunConfig:
    """deepseek_v3 on 1024 GPUs with 141 GB: pipeline 16 x expert 8 x data 8."""
    return mj.on_layout(deepseek_v3(), mj.ParallelConfig(pipeline=16, expert=8), RECOMPUTE)


def deepseek_v2_lite_debug() -> mj.RunConfig:
    """deepseek_v2_lite in tiny sizes, on one device or on eight."""
    return mj.library_debug_config(deepseek_v2_lite(), _debug_model())


def deepseek_v3_debug() -> mj.RunConfig:
    """deepseek_v3 in tiny sizes: pipeline 2 x expert 2 x tensor 2 on eight devices. It compiles for a minute."""
    parallel = mj.ParallelConfig(pipeline=2, expert=2, tensor=2, sequence=True)
    return mj.library_debug_config(deepseek_v3(), _debug_model(), parallel=parallel)


def _debug_model() -> mj.DecoderConfig:
    """V3's kinds of layers; wider initial weights than the sizes have, as it is narrow."""
    return replace(mj.deepseek("debug", sequence_length=64, vocabulary_size=257), init_std=0.02)
