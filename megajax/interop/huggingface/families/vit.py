"""ViT, and the vision towers of CLIP and SigLIP: with a classifier, alone, or out of a model of images and text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from megajax.interop.huggingface.family import (
    Family,
    Settings,
    activation_name,
    attention,
    class_settings,
    classes,
    dense,
    layers_of,
    linear,
    norm,
    patches,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.vision.config import CLIP_DEVIATION, CLIP_MEAN, VisionTowerConfig
from megajax.models.vit.config import ClassifierConfig, MeanPoolingConfig, ViTConfig, with_image_head


class FamilyTower(NamedTuple):
    """What the towers of a family have in common."""

    model_type: str
    """model_type in the config.json of a standalone tower."""
    activation: str
    epsilon: float
    patch: int
    class_token: bool = True
    """Whether there is a class token before the patches."""
    entry_norm: bool = False
    """Whether there is a norm before the blocks, and no patch bias."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)


VIT = FamilyTower("vit", "gelu", 1e-12, 16)
CLIP = FamilyTower(
    "clip_vision_model", "quick_gelu", 1e-5, 32, entry_norm=True, mean=CLIP_MEAN, deviation=CLIP_DEVIATION
)
SIGLIP = FamilyTower("siglip_vision_model", "gelu_pytorch_tanh", 1e-6, 16, class_token=False)
TOWERS = {tower.model_type: tower for tower in (CLIP, SIGLIP)}

UNUSED = frozenset(
    {"attention_probs_dropout_prob", "dropout", "hidden_dropout_prob", "projection_dim", "vision_use_head"}
)
"""Settings of dropout, and of heads that read the tower's output."""


def pixels(settings: Settings, patch: int) -> dict[str, Any]:
    """height, width and patch. In config.json, sizes are numbers or pairs of numbers."""
    settings.only("num_channels", 3)
    (height, width), (patch_height, patch_width) = (
        value if isinstance(value, Sequence) else (value, value)
        for value in (settings.take("image_size", 224, object), settings.take("patch_size", patch, object))
    )
    if patch_height != patch_width:
        settings.refuse("patch_size", [patch_height, patch_width], "only squares are supported")
    return {"height": height, "width": width, "patch": patch_height}


def tower(settings: Settings, kind: FamilyTower, *, qkv_bias: bool = True) -> VisionTowerConfig:
    """The tower of a config.json, or of its vision_config: pre-norm blocks with bidirectional attention."""
    mixer = AttentionConfig(
        heads=settings.take("num_attention_heads", 12), bias=True, qkv_bias=None if qkv_bias else False, causal=False
    )
    activation = settings.activation("hidden_act", kind.activation)
    mlp = DenseMLPConfig(ffn=settings.take("intermediate_size", 3072), activation=activation)
    norm = LayerNormConfig(epsilon=settings.take("layer_norm_eps", kind.epsilon))
    block = BlockConfig(mixer=mixer, mlp=mlp, norm=norm)
    return VisionTowerConfig(
        hidden=settings.take("hidden_size", 768),
        stack=StackConfig(pattern=(block,), repeats=settings.layers(default=12)),
        **pixels(settings, kind.patch),
        patch_bias=not kind.entry_norm,
        class_tokens=int(kind.class_token),
        entry_norm=norm if kind.entry_norm else None,
        norm=norm,
        mean=tuple(settings.take("image_mean", kind.mean)),
        deviation=tuple(settings.take("image_std", kind.deviation)),
    )


def tower_settings(cfg: VisionTowerConfig) -> dict[str, Any]:
    """The reverse of `tower`, including the mean and deviation of preprocessor_config.json."""
    block = layers_of(cfg)[0]
    return {
        "hidden_size": cfg.hidden,
        "intermediate_size": block.mlp.ffn,
        "num_hidden_layers": cfg.stack.layers(),
        "num_attention_heads": block.mixer.heads,
        "hidden_act": activation_name(block.mlp.activation),
        "layer_norm_eps": block.norm.epsilon,
        "image_size": cfg.height if cfg.height == cfg.width else [cfg.height, cfg.width],
        "patch_size": cfg.patch,
        "num_channels": 3,
        "image_mean": list(cfg.mean),
        "image_std": list(cfg.deviation),
    }


def vision_config(cfg: VisionTowerConfig) -> dict[str, Any]:
    """The settings of a tower of CLIP or SigLIP, with its model_type."""
    if cfg.class_tokens:
        return {"model_type": CLIP.model_type, **tower_settings(cfg)}
    return {"model_type": SIGLIP.model_type, "vision_use_head": False, **tower_settings(cfg)}


def tower_rows(side: int, tensor: str = "vision_model", path: str = "") -> list[Row]:
    """The table of a tower with patches of this side. tensor, path: prefixes."""
    layer, block = f"{tensor}.encoder.layers.{{layer}}", f"{path}stack.*"
    return [
        Row(f"{tensor}.embeddings.class_embedding", f"{path}class_tokens", "d -> 1 d"),
        patches(f"{tensor}.embeddings.patch_embedding.weight", f"{path}patches", side),
        Row(f"{tensor}.embeddings.patch_embedding.bias", f"{path}patch_bias"),
        Row(f"{tensor}.embeddings.position_embedding.weight", f"{path}positions"),
        *norm(f"{tensor}.pre_layrnorm", f"{path}entry_norm"),
        *attention(f"{layer}.self_attn", f"{block}.mixer", ("q_proj", "k_proj", "v_proj", "out_proj")),
        *linear(f"{layer}.mlp.fc1", f"{block}.mlp.up"),
        *linear(f"{layer}.mlp.fc2", f"{block}.mlp.down"),
        *norm(f"{layer}.layer_norm1", f"{block}.mixer_norm"),
        *norm(f"{layer}.layer_norm2", f"{block}.mlp_norm"),
        *norm(f"{tensor}.post_layernorm", f"{path}norm"),
    ]


def inner_tower(settings: Settings) -> Settings:
    """vision_config, with the mean and deviation of preprocessor_config.json."""
    inner = settings.part("vision_config")
    inner.assume({name: settings.take(name) for name in ("image_mean", "image_std") if name in settings.remaining})
    return inner


def read_tower(settings: Settings) -> tuple[VisionTowerConfig, bool]:
    """The tower up to the layer that the model reads, and whether it reads all positions."""
    inner = inner_tower(settings)
    kind = inner.remaining.get("model_type", CLIP.model_type)
    if kind not in TOWERS:
        settings.refuse("vision_config.model_type", kind, f"only {', '.join(TOWERS)} is supported")
    full_tower = tower(inner, TOWERS.get(kind, CLIP))
    inner.close(UNUSED | {"initializer_factor", "vocab_size"})
    strategy = settings.only("vision_feature_select_strategy", "default", "full")
    if strategy == "default" and not full_tower.class_tokens:
        settings.refuse("vision_feature_select_strategy", strategy, "without a class token it drops a patch")
    total, layer = full_tower.stack.layers(), settings.take("vision_feature_layer", -2, object)
    count = total + 1 + layer if isinstance(layer, int) and layer < 0 else layer
    if not isinstance(count, int) or not 1 <= count <= total:
        settings.refuse("vision_feature_layer", layer, f"only one of the {total} layers is supported")
        count = total
    # The model reads the output of the last block, before the final norm.
    stack = replace(full_tower.stack, repeats=count)
    return replace(full_tower, stack=stack, norm=IdentityNormConfig()), strategy == "full"


def _read(settings: Settings) -> ViTConfig | VisionTowerConfig:
    """A tower alone for a ViTModel."""
    model = tower(settings, VIT, qkv_bias=settings.take("qkv_bias", True))
    if settings.architecture() == "ViTModel":
        return model
    return with_image_head(model, ClassifierConfig(classes=classes(settings)))


def _write(cfg: ViTConfig) -> dict[str, Any]:
    head = getattr(cfg, "head", None)
    return {
        **({"architectures": ["ViTModel"]} if head is None else class_settings(head.classes)),
        **tower_settings(cfg),
        "qkv_bias": layers_of(cfg)[0].mixer.has_qkv_bias(),
    }


LAYER, BLOCK, EMBEDDINGS = "vit.encoder.layer.{layer}", "stack.*", "vit.embeddings"


def _rows(cfg: ViTConfig) -> list[Row]:
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


def _read_towers(kind: FamilyTower, settings: Settings) -> VisionTowerConfig | ViTConfig:
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


def _write_towers(name: str, cfg: ViTConfig) -> dict[str, Any]:
    if (head := getattr(cfg, "head", None)) is None:
        return {"architectures": [f"{name}VisionModel"], **vision_config(cfg)}
    return {"vision_config": vision_config(cfg), **class_settings(head.classes)}


def _rows_towers(cfg: ViTConfig) -> list[Row]:
    return [*tower_rows(cfg.patch), *dense("classifier", "head.linear")]


FAMILIES = [
    *[
        Family(
            name=name.lower(),
            other_types=(kind.model_type,),
            architecture=f"{name}ForImageClassification",
            read=partial(_read_towers, kind),
            write=partial(_write_towers, name),
            rows=_rows_towers,
            unused=UNUSED | {"logit_scale_init_value", "text_config", "text_config_dict"},
            # Weights of the tower of text, of projections, and of SigLIP's pooling, which a tower has not.
            ignored=(
                *("text_model.*", "text_projection.*", "visual_projection.*", "logit_scale", "logit_bias"),
                *("vision_model.head.*", "vision_model.post_layernorm.*", "vision_model.embeddings.position_ids"),
            ),
            renamed=((r"^(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.", r"vision_model.\1."),),
        )
        for name, kind in (("CLIP", CLIP), ("Siglip", SIGLIP))
    ],
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
    ),
]
