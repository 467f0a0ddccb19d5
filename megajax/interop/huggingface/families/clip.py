"""CLIP's and SigLIP's towers that read images, alone, with a classifier, or out of a model of images and text."""

from dataclasses import replace
from functools import partial
from typing import Any

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface.families.vit import (
    CLIP,
    SIGLIP,
    UNUSED,
    Tower,
    class_settings,
    classes,
    inner_tower,
    tower,
    tower_rows,
    vision_config,
)
from megajax.interop.huggingface.family import Family, Settings, dense
from megajax.layers.norm.config import IdentityNormConfig
from megajax.models.vision.config import VisionTowerConfig
from megajax.models.vit.config import ClassifierConfig, MeanPoolingConfig, ViTConfig, with_image_head


def _read(kind: Tower, settings: Settings) -> VisionTowerConfig | ViTConfig:
    """A tower, or a classifier."""
    if settings.remaining.get("model_type") == kind.model_type:
        model = tower(settings, kind)
    else:
        # Both towers; older files say the same twice, and the second one counts.
        newer = settings.take("vision_config_dict", {})
        settings.remaining["vision_config"] = {**settings.take("vision_config", {}), **newer}
        inner = inner_tower(settings)
        model = tower(inner, kind)
        inner.close(UNUSED | {"initializer_factor"})
    if not settings.architecture().endswith("ForImageClassification"):
        return model
    # CLIP's classifier reads the patches before the last norm.
    model = replace(model, norm=IdentityNormConfig()) if kind is CLIP else model
    return with_image_head(model, ClassifierConfig(classes=classes(settings), pooling=MeanPoolingConfig()))


def _write(name: str, cfg: Any) -> dict[str, Any]:
    if (head := getattr(cfg, "head", None)) is None:
        return {"architectures": [f"{name}VisionModel"], **vision_config(cfg)}
    return {"vision_config": vision_config(cfg), **class_settings(head.classes)}


def _rows(cfg: Any) -> list[Row]:
    return [*tower_rows(cfg.patch), *dense("classifier", "head.linear")]


FAMILIES = [
    Family(
        name=name.lower(),
        other_types=(kind.model_type,),
        architecture=f"{name}ForImageClassification",
        read=partial(_read, kind),
        write=partial(_write, name),
        rows=_rows,
        unused=UNUSED | {"logit_scale_init_value", "text_config", "text_config_dict"},
        # Weights of the tower of text, of projections, and of SigLIP's pooling, which a tower has not.
        ignored=(
            *("text_model.*", "text_projection.*", "visual_projection.*", "logit_scale", "logit_bias"),
            *("vision_model.head.*", "vision_model.post_layernorm.*", "vision_model.embeddings.position_ids"),
        ),
        renamed=((r"^(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.", r"vision_model.\1."),),
    )
    for name, kind in (("CLIP", CLIP), ("Siglip", SIGLIP))
]
