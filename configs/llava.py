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

from megajax.checkpoint.config import CheckpointConfig
from megajax.data.configs import DigitCaptionsConfig, ImageTextConfig
from megajax.layers.configs import IdentityNormConfig, StackConfig
from megajax.mesh.config import ParallelConfig
from megajax.models.configs import LlavaConfig
from megajax.models.presets.llama import llama2
from megajax.models.presets.llava import llava
from megajax.models.presets.vit import clip, vit_tower
from megajax.models.vision.config import VisionTowerConfig
from megajax.optim.config import AdamWConfig, ScheduleConfig
from megajax.tokenizers.config import ByteTokenizerConfig, HuggingFaceTokenizerConfig, MultimodalTokenizerConfig
from megajax.training.config import BatchConfig, EvaluationConfig
from megajax.training.presets import debug_config
from megajax.training.run_config import RunConfig

IMAGE = 32000
"""The image token, behind the vocabulary of Llama 2."""


def config() -> RunConfig:
    """The second stage of the 7B size."""
    return llava_7b()


def debug() -> RunConfig:
    """The debug twin of `config()`."""
    return llava_7b_debug()


def llava_7b() -> RunConfig:
    """Decoder and projector on conversations, 665 thousand rows of up to 2048 positions, 576 of them an image. FSDP."""
    return RunConfig(
        model=_llava("7b"),
        parallel=ParallelConfig(data_sharding="fsdp"),
        data=ImageTextConfig(paths=("data/conversations.jsonl",)),
        tokenizer=_tokenizer(),
        optimizer=AdamWConfig(weight_decay=0.0, trainable=("projector.*", "tokens", "stack.*", "norm.*", "head")),
        schedule=ScheduleConfig(lr=2e-5, warmup_fraction=0.03),
        batch=BatchConfig(global_size=128, micro_size=2),
        evaluation=EvaluationConfig(every=500, batches=8),
        checkpoint=CheckpointConfig(every=500),
        steps=5195,
        run_dir="runs/llava_7b",
    )


def llava_7b_projector() -> RunConfig:
    """The projector alone on captions, 558 thousand rows."""
    return llava_7b().but(
        data=ImageTextConfig(paths=("data/captions.jsonl",)),
        optimizer=AdamWConfig(weight_decay=0.0, trainable=("projector.*",)),
        schedule=ScheduleConfig(lr=1e-3, warmup_fraction=0.03),
        batch=BatchConfig(global_size=256, micro_size=4),
        steps=2180,
        run_dir="runs/llava_7b_projector",
    )


def llava_7b_debug() -> RunConfig:
    """llava_7b in a tiny size on captions of scikit-learn's handwritten digits; all of it is trained, from nothing."""
    cfg = llava_7b()
    language = llama2("debug", sequence_length=40, vocabulary_size=258)
    return debug_config(
        cfg,
        llava(language, replace(vit_tower("debug", image=16), patch=4), image_token=257),
        data=DigitCaptionsConfig(phrasings=1),
        tokenizer=MultimodalTokenizerConfig(base=ByteTokenizerConfig()),
        optimizer=AdamWConfig(weight_decay=0.1),
        schedule=ScheduleConfig(lr=2e-3, warmup_fraction=0.1),
        batch=BatchConfig(global_size=64, micro_size=16),
        evaluation=EvaluationConfig(every=250, batches=5),
        checkpoint=CheckpointConfig(every=500),
        logging=replace(cfg.logging, every=50),
        steps=1500,
    )


def _llava(size: str) -> LlavaConfig:
    """Positions of images are the states before the last block of CLIP's tower, without its class token."""
    language = llama2(size, sequence_length=2048, vocabulary_size=IMAGE + 1)
    return llava(language, _before_the_last_block(clip("l14-336")), image_token=IMAGE)


def _before_the_last_block(tower: VisionTowerConfig) -> VisionTowerConfig:
    pattern, repeats = tower.stack.pattern, tower.stack.repeats
    return replace(tower, stack=StackConfig(pattern=pattern, repeats=repeats - 1), norm=IdentityNormConfig())


def _tokenizer() -> MultimodalTokenizerConfig:
    return MultimodalTokenizerConfig(base=HuggingFaceTokenizerConfig(path="data/tokenizer.json"))
