"""ViT, with a classifier or alone."""

from collections.abc import Sequence
from typing import Any

from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.checkpoint.huggingface.rows import attention, dense, linear, norm, patches
from megajax.checkpoint.huggingface.vision import (
    UNUSED,
    block,
    block_settings,
    class_settings,
    classes,
    pixel_settings,
    pixels,
)
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import StackConfig
from megajax.models.config import ViTConfig
from megajax.models.config.vision import VisionTowerConfig
from megajax.models.config.vit import ClassifierConfig, classifying


def model(given: Settings) -> ViTConfig | VisionTowerConfig:
    """The model of a config.json: a tower alone for a ViTModel."""
    one = block(given, "gelu", 1e-12, qkv_bias=given.take("qkv_bias", True))
    tower = VisionTowerConfig(
        hidden=given.take("hidden_size", 768),
        stack=StackConfig(pattern=(one,), repeats=given.layers(default=12)),
        **pixels(given, 16),
        norm=one.norm,
        mean=tuple(given.take("image_mean", (0.5, 0.5, 0.5))),
        deviation=tuple(given.take("image_std", (0.5, 0.5, 0.5))),
    )
    if given.architecture() == "ViTModel":
        return tower
    return classifying(tower, ClassifierConfig(classes=classes(given)))


def settings(cfg: Any) -> dict[str, Any]:
    """The config.json of a model."""
    head = getattr(cfg, "head", None)
    return {
        "model_type": "vit",
        "architectures": ["ViTModel" if head is None else "ViTForImageClassification"],
        **block_settings(cfg),
        **pixel_settings(cfg),
        "qkv_bias": cfg.stack.pattern[0].mixer.has_qkv_bias(),
        **({} if head is None else class_settings(head.classes)),
    }


LAYER, BLOCK, EMBEDDINGS = "vit.encoder.layer.{layer}", "stack.*", "vit.embeddings"


def rows(cfg: Any) -> Sequence[Row]:
    """The table."""
    names = ("attention.query", "attention.key", "attention.value", "output.dense")
    return [
        Row(f"{EMBEDDINGS}.cls_token", "class_tokens", "1 n d -> n d"),
        Row(f"{EMBEDDINGS}.position_embeddings", "positions", "1 s d -> s d"),
        patches(f"{EMBEDDINGS}.patch_embeddings.projection.weight", "patches", cfg.patch),
        Row(f"{EMBEDDINGS}.patch_embeddings.projection.bias", "patch_bias"),
        *attention(f"{LAYER}.attention", f"{BLOCK}.mixer", names),
        *linear(f"{LAYER}.intermediate.dense", f"{BLOCK}.mlp.up"),
        *linear(f"{LAYER}.output.dense", f"{BLOCK}.mlp.down"),
        *norm(f"{LAYER}.layernorm_before", f"{BLOCK}.mixer_norm"),
        *norm(f"{LAYER}.layernorm_after", f"{BLOCK}.mlp_norm"),
        *norm("vit.layernorm", "norm"),
        *dense("classifier", "head.linear"),
    ]


FAMILIES = [
    Family(
        name="vit",
        model_types=("vit",),
        model=model,
        settings=settings,
        rows=rows,
        unused=UNUSED | {"encoder_stride", "pooler_act", "pooler_output_size"},
        ignored=("vit.pooler.*",),
        renamed=((r"^(embeddings|encoder|layernorm|pooler)\.", r"vit.\1."),),
    )
]
