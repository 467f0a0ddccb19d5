"""Qwen3-VL (Bai et al. 2025) on conversations about images of any size. `config()` is qwen3_vl_4b.

The sizes are those of the released configs; learning rates are examples. To start from released weights,
`--checkpoint.weights` reads a folder from Hugging Face. The debug twin, qwen3_vl_4b_debug or debug, learns captions of
synthetic shapes from random weights.

Data:     data/conversations.jsonl with "image" (a path, or a list) and "messages" or "conversations"
Plan:     python -m megajax.plan --config=qwen3_vl.py --devices=h100:8
Prepare:  hf download Qwen/Qwen3-VL-4B-Instruct --local-dir models/Qwen3-VL-4B-Instruct
Run:      python -m megajax.train --config=qwen3_vl.py \
              --checkpoint.weights='[{hf: models/Qwen3-VL-4B-Instruct}]'
Laptop:   python -m megajax.train --config=qwen3_vl.py:debug
Hardware: one host of 8 GPUs with 80 GB. Planned for virtual H100s, not run on one
"""

from dataclasses import replace

import megajax as mj


def config() -> mj.RunConfig:
    """The 4B size."""
    return qwen3_vl_4b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return qwen3_vl_4b_debug()


def qwen3_vl_2b() -> mj.RunConfig:
    """2.1 B parameters. 8 GPUs with 80 GB, data-parallel with ZeRO."""
    return _run("2b", mj.ParallelConfig(data_sharding="zero1"), lr=2e-5)


def qwen3_vl_4b() -> mj.RunConfig:
    """4.4 B parameters. 8 GPUs with 80 GB, FSDP."""
    return _run("4b", mj.ParallelConfig(data_sharding="fsdp"), lr=1e-5)


def qwen3_vl_8b() -> mj.RunConfig:
    """8.8 B parameters. 8 GPUs with 80 GB, FSDP."""
    parallel = mj.ParallelConfig(data_sharding="fsdp")
    return mj.on_layout(_run("8b", parallel, lr=1e-5), parallel, ("activation",))


def qwen3_vl_2b_debug() -> mj.RunConfig:
    """qwen3_vl_2b in a tiny size, as qwen3_vl_4b_debug."""
    return _debug(qwen3_vl_2b())


def qwen3_vl_4b_debug() -> mj.RunConfig:
    """qwen3_vl_4b in a tiny size on captions of one or two synthetic images of several sizes."""
    return _debug(qwen3_vl_4b())


def qwen3_vl_8b_debug() -> mj.RunConfig:
    """qwen3_vl_8b in a tiny size, as qwen3_vl_4b_debug."""
    return _debug(qwen3_vl_8b())


def _debug(cfg: mj.RunConfig) -> mj.RunConfig:
    model = mj.qwen3_vl("debug", sequence_length=48, vocabulary_size=258, slots=2)
    model = replace(model, vision=replace(model.vision, least=16, most=24, budget=48))
    return mj.debug_config(
        cfg,
        model,
        data=mj.MockCaptionsConfig(images=2),
        tokenizer=mj.MultimodalTokenizerConfig(base=mj.ByteTokenizerConfig()),
        optimizer=mj.AdamWConfig(weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=2e-3, warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=64, micro_size=16),
        evaluation=mj.EvaluationConfig(every=250, batches=5),
        checkpoint=mj.CheckpointConfig(every=500),
        logging=replace(cfg.logging, every=50),
        steps=1500,
    )


def _run(size: str, parallel: mj.ParallelConfig, *, lr: float) -> mj.RunConfig:
    """Rows of 8192 tokens with up to 16 images: at most 2304 patches each, 768 x 768 pixels, and 9216 together."""
    model = mj.qwen3_vl(size, sequence_length=8192, slots=16)
    vision = replace(model.vision, budget=9216, recompute="full")
    heads = () if model.tied else ("head",)
    return mj.RunConfig(
        model=replace(model, vision=vision, recompute="full"),
        parallel=parallel,
        data=mj.ImageTextConfig(
            paths=("data/conversations.jsonl",),
            template="chatml",
            before="<|vision_start|>",
            after="<|vision_end|>",
        ),
        tokenizer=mj.MultimodalTokenizerConfig(
            base=mj.HuggingFaceTokenizerConfig(path="data/tokenizer.json"), image="<|image_pad|>"
        ),
        optimizer=mj.AdamWConfig(
            weight_decay=0.0, trainable=("projector.*", "features.*", "tokens", "stack.*", "norm.*", *heads)
        ),
        schedule=mj.ScheduleConfig(lr=lr, warmup_fraction=0.03),
        batch=mj.BatchConfig(global_size=64, micro_size=2),
        evaluation=mj.EvaluationConfig(every=500, batches=8),
        checkpoint=mj.CheckpointConfig(every=500),
        steps=5000,
        run_dir=f"runs/qwen3_vl_{size}",
    )
