"""CLIP's and SigLIP's towers that read images, alone, with a classifier, or out of a model of images and text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.checkpoint.huggingface.rows import dense
from megajax.checkpoint.huggingface.vision import (
    CLIP,
    SIGLIP,
    UNUSED,
    Tower,
    class_settings,
    classes,
    tower,
    tower_rows,
    tower_settings,
)
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import IdentityNormConfig
from megajax.models.config import ViTConfig
from megajax.models.config.vision import VisionTowerConfig
from megajax.models.config.vit import ClassifierConfig, MeanPoolingConfig, classifying


def model_of(kind: Tower) -> Callable[[Settings], VisionTowerConfig | ViTConfig]:
    """The function from a config.json to a tower of this kind, or to a classifier."""

    def model(given: Settings) -> VisionTowerConfig | ViTConfig:
        inner = given
        if given.left.get("model_type") != kind.model_type:
            # Both towers; older files say the same twice, and the second one counts.
            newer = given.take("vision_config_dict", {})
            given.left["vision_config"] = {**given.take("vision_config", {}), **newer}
            inner = given.part("vision_config")
            inner.assume({name: given.take(name) for name in ("image_mean", "image_std") if name in given.left})
        one = tower(inner, kind)
        if inner is not given:
            inner.close(UNUSED | {"initializer_factor"})
        if not given.architecture().endswith("ForImageClassification"):
            return one
        # CLIP's classifier reads the patches before the last norm.
        one = replace(one, norm=IdentityNormConfig()) if kind.classes else one
        return classifying(one, ClassifierConfig(classes=classes(given), pooling=MeanPoolingConfig()))

    return model


def settings_of(name: str) -> Callable[[Any], dict[str, Any]]:
    """The config.json of a tower, or of a classifier, whose classes begin with `name`."""

    def settings(cfg: Any) -> dict[str, Any]:
        parts, head = tower_settings(cfg), getattr(cfg, "head", None)
        if head is None:
            return {"architectures": [f"{name}VisionModel"], **parts}
        return {
            "model_type": name.lower(),
            "architectures": [f"{name}ForImageClassification"],
            "vision_config": parts,
            **class_settings(head.classes),
        }

    return settings


def rows(cfg: Any) -> Sequence[Row]:
    """The table."""
    return [*tower_rows(cfg.patch), *dense("classifier", "head.linear")]


FAMILIES = [
    Family(
        name=name.lower(),
        model_types=(name.lower(), kind.model_type),
        model=model_of(kind),
        settings=settings_of(name),
        rows=rows,
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
