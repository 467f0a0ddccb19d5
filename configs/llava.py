"""LLaVA 1.5 (Liu et al. 2023): Llama 2 or Vicuna reads images by CLIP's tower, a function per stage.

`config()` is llava_7b, the second stage. The first one, llava_7b_projector, trains the projector alone on captions; the
second one the decoder too, on conversations about images. The tower stays as it is in both: it has no gradients and no
moments. llava_7b_debug is the debug twin.

Data:     data/captions.jsonl with {"image": PATH, "caption": TEXT}, data/conversations.jsonl with "conversations"
Plan:     python -m megajax.plan --config=llava.py --devices=h100:8
Run:      python -m megajax.train --config=llava.py:llava_7b_projector
Laptop:   python -m megajax.train --config=llava.py:debug
Hardware: one host of 8 GPUs with 80 GB. Compiled for virtual H100s, not run on one
"""

from dataclasses import replace

import megajax as mj

IMAGE = 32000
"""The image token, behind the vocabulary of Llama 2."""


def config() -> mj.RunConfig:
    """The second stage of the 7B size."""
    return llava_7b()


def debug() -> mj.RunConfig:
    """The debug twin of `config()`."""
    return llava_7b_debug()


def llava_7b() -> mj.RunConfig:
    """Decoder and projector on conversations, 665 thousand rows of up to 2048 positions, 576 of them an image. FSDP."""
    return mj.RunConfig(
        model=_llava("7b"),
        parallel=mj.ParallelConfig(data_sharding="fsdp"),
        data=mj.ImageTextConfig(paths=("data/conversations.jsonl",)),
        tokenizer=_tokenizer(),
        optimizer=mj.AdamWConfig(weight_decay=0.0, trainable=("projector.*", "tokens", "stack.*", "norm.*", "head")),
        schedule=mj.ScheduleConfig(lr=2e-5, warmup_fraction=0.03),
        batch=mj.BatchConfig(global_size=128, micro_size=8),
        evaluation=mj.EvaluationConfig(every=500, batches=8),
        checkpoint=mj.CheckpointConfig(every=500),
        steps=5195,
        run_dir="runs/llava_7b",
    )


def llava_7b_projector() -> mj.RunConfig:
    """The projector alone on captions, 558 thousand rows."""
    return llava_7b().but(
        data=mj.ImageTextConfig(paths=("data/captions.jsonl",)),
        optimizer=mj.AdamWConfig(weight_decay=0.0, trainable=("projector.*",)),
        schedule=mj.ScheduleConfig(lr=1e-3, warmup_fraction=0.03),
        batch=mj.BatchConfig(global_size=256, micro_size=4),
        steps=2180,
        run_dir="runs/llava_7b_projector",
    )


def llava_7b_debug() -> mj.RunConfig:
    """llava_7b in a tiny size on captions of synthetic shapes; all of it is trained, from nothing."""
    cfg = llava_7b()
    language = mj.llama2("debug", sequence_length=40, vocabulary_size=258)
    tower = replace(mj.clip("debug"), height=16, width=16, patch=4, norm=mj.IdentityNormConfig())
    return mj.debug_config(
        cfg,
        mj.llava(language, tower, image_token=257),
        data=mj.MockCaptionsConfig(),
        tokenizer=mj.MultimodalTokenizerConfig(base=mj.ByteTokenizerConfig()),
        optimizer=mj.AdamWConfig(weight_decay=0.1),
        schedule=mj.ScheduleConfig(lr=2e-3, warmup_fraction=0.1),
        batch=mj.BatchConfig(global_size=64, micro_size=16),
        evaluation=mj.EvaluationConfig(every=250, batches=5),
        checkpoint=mj.CheckpointConfig(every=500),
        logging=replace(cfg.logging, every=50),
        steps=1500,
    )


def _llava(size: str) -> mj.LlavaConfig:
    """Positions of images are the states before the last block of CLIP's tower, without its class token."""
    language = mj.llama2(size, sequence_length=2048, vocabulary_size=IMAGE + 1)
    return mj.llava(language, _before_the_last_block(mj.clip("l14-336")), image_token=IMAGE)


def _before_the_last_block(tower: mj.VisionTowerConfig) -> mj.VisionTowerConfig:
    pattern, repeats = tower.stack.pattern, tower.stack.repeats
    return replace(tower, stack=mj.StackConfig(pattern=pattern, repeats=repeats - 1), norm=mj.IdentityNormConfig())


def _tokenizer() -> mj.MultimodalTokenizerConfig:
    return mj.MultimodalTokenizerConfig(base=mj.HuggingFaceTokenizerConfig(path="data/tokenizer.json"))
