"""ViT, with a classifier or alone."""

from typing import Any

from megajax.checkpoint.weights.tensor_table import Row
from megajax.interop.huggingface.family import Family, Settings
from megajax.interop.huggingface.rows import attention, dense, linear, norm, patches
from megajax.interop.huggingface.vision import UNUSED, VIT, class_settings, classes, tower, tower_settings
from megajax.models.configs import ViTConfig
from megajax.models.vision.config import VisionTowerConfig
from megajax.models.vit.config import ClassifierConfig, with_image_head


def _read(settings: Settings) -> ViTConfig | VisionTowerConfig:
    """A tower alone for a ViTModel."""
    model = tower(settings, VIT, qkv_bias=settings.take("qkv_bias", True))
    if settings.architecture() == "ViTModel":
        return model
    return with_image_head(model, ClassifierConfig(classes=classes(settings)))


def _write(cfg: Any) -> dict[str, Any]:
    head = getattr(cfg, "head", None)
    return {
        **({"architectures": ["ViTModel"]} if head is None else class_settings(head.classes)),
        **tower_settings(cfg),
        "qkv_bias": cfg.stack.pattern[0].mixer.has_qkv_bias(),
    }


LAYER, BLOCK, EMBEDDINGS = "vit.encoder.layer.{layer}", "stack.*", "vit.embeddings"


def _rows(cfg: Any) -> list[Row]:
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
        architecture="ViTForImageClassification",
        read=_read,
        write=_write,
        rows=_rows,
        unused=UNUSED | {"encoder_stride", "pooler_act", "pooler_output_size"},
        ignored=("vit.pooler.*",),
        extra=("vit.pooler.*",),
        renamed=((r"^(embeddings|encoder|layernorm|pooler)\.", r"vit.\1."),),
    )
]
