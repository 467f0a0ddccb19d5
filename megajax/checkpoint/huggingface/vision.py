"""Towers of ViT, CLIP and SigLIP: their settings and their names, alone or inside of a LLaVA."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.checkpoint.huggingface.family import Settings, activation_name
from megajax.checkpoint.huggingface.rows import attention, linear, norm, patches
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers import config as layers
from megajax.models.config.vision import CLIP_DEVIATION, CLIP_MEAN, VisionTowerConfig


class Tower(NamedTuple):
    """What the towers of a family have in common."""

    model_type: str
    """Of a config.json with a tower alone."""
    activation: str
    epsilon: float
    patch: int
    class_token: bool = True
    """Before the patches."""
    entry_norm: bool = False
    """A norm before the blocks, and no bias of patches."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)


VIT = Tower("vit", "gelu", 1e-12, 16)
CLIP = Tower("clip_vision_model", "quick_gelu", 1e-5, 32, entry_norm=True, mean=CLIP_MEAN, deviation=CLIP_DEVIATION)
SIGLIP = Tower("siglip_vision_model", "gelu_pytorch_tanh", 1e-6, 16, class_token=False)
TOWERS = {tower.model_type: tower for tower in (CLIP, SIGLIP)}

UNUSED = frozenset(
    {"attention_probs_dropout_prob", "dropout", "hidden_dropout_prob", "projection_dim", "vision_use_head"}
)
"""About dropout, and about what reads the tower."""


def pixels(settings: Settings, patch: int) -> dict[str, Any]:
    """height, width and patch: sizes are numbers or pairs of them."""
    settings.only("num_channels", 3)
    (height, width), (side, other) = (
        value if isinstance(value, Sequence) else (value, value)
        for value in (settings.take("image_size", 224, object), settings.take("patch_size", patch, object))
    )
    if side != other:
        settings.refuse("patch_size", [side, other], "only squares are supported")
    return {"height": height, "width": width, "patch": side}


def tower(settings: Settings, kind: Tower, *, qkv_bias: bool = True) -> VisionTowerConfig:
    """The tower of a config.json, or of its part vision_config: pre-norm blocks whose tokens see each other."""
    mixer = layers.AttentionConfig(
        heads=settings.take("num_attention_heads", 12), bias=True, qkv_bias=None if qkv_bias else False, causal=False
    )
    activation: Any = settings.activation("hidden_act", kind.activation)
    mlp = layers.DenseMLPConfig(ffn=settings.take("intermediate_size", 3072), activation=activation)
    norm = layers.LayerNormConfig(epsilon=settings.take("layer_norm_eps", kind.epsilon))
    block = layers.BlockConfig(mixer=mixer, mlp=mlp, norm=norm)
    return VisionTowerConfig(
        hidden=settings.take("hidden_size", 768),
        stack=layers.StackConfig(pattern=(block,), repeats=settings.layers(default=12)),
        **pixels(settings, kind.patch),
        patch_bias=not kind.entry_norm,
        class_tokens=int(kind.class_token),
        entry_norm=norm if kind.entry_norm else None,
        norm=norm,
        mean=tuple(settings.take("image_mean", kind.mean)),
        deviation=tuple(settings.take("image_std", kind.deviation)),
    )


def tower_settings(cfg: Any) -> dict[str, Any]:
    """The reverse of `tower`, with the mean and deviation that preprocessor_config.json has."""
    block = cfg.stack.pattern[0]
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


def vision_config(cfg: Any) -> dict[str, Any]:
    """The settings of a tower of CLIP or SigLIP, with its model_type."""
    if cfg.class_tokens:
        return {"model_type": CLIP.model_type, **tower_settings(cfg)}
    return {"model_type": SIGLIP.model_type, "vision_use_head": False, **tower_settings(cfg)}


def tower_rows(side: int, theirs: str = "vision_model", ours: str = "") -> list[Row]:
    """The table of a tower with patches of this side. theirs, ours: prefixes."""
    layer, block = f"{theirs}.encoder.layers.{{layer}}", f"{ours}stack.*"
    return [
        Row(f"{theirs}.embeddings.class_embedding", f"{ours}class_tokens", "d -> 1 d"),
        patches(f"{theirs}.embeddings.patch_embedding.weight", f"{ours}patches", side),
        Row(f"{theirs}.embeddings.patch_embedding.bias", f"{ours}patch_bias"),
        Row(f"{theirs}.embeddings.position_embedding.weight", f"{ours}positions"),
        *norm(f"{theirs}.pre_layrnorm", f"{ours}entry_norm"),
        *attention(f"{layer}.self_attn", f"{block}.mixer", ("q_proj", "k_proj", "v_proj", "out_proj")),
        *linear(f"{layer}.mlp.fc1", f"{block}.mlp.up"),
        *linear(f"{layer}.mlp.fc2", f"{block}.mlp.down"),
        *norm(f"{layer}.layer_norm1", f"{block}.mixer_norm"),
        *norm(f"{layer}.layer_norm2", f"{block}.mlp_norm"),
        *norm(f"{theirs}.post_layernorm", f"{ours}norm"),
    ]


def classes(settings: Settings) -> int:
    """Classes of a classifier: as many as have names, or num_labels, 2 by default."""
    count, names = settings.take("num_labels", 2), settings.remaining.get("id2label")
    return len(names) if names else count


def class_settings(count: int) -> dict[str, Any]:
    """The reverse of `classes`."""
    names = {str(number): f"LABEL_{number}" for number in range(count)}
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


def inner_tower(settings: Settings) -> Settings:
    """The part vision_config, with the pixels of preprocessor_config.json."""
    inner = settings.part("vision_config")
    inner.assume({name: settings.take(name) for name in ("image_mean", "image_std") if name in settings.remaining})
    return inner


def read_tower(settings: Settings) -> tuple[VisionTowerConfig, bool]:
    """The tower up to the layer that is read, and whether all its positions are."""
    inner = inner_tower(settings)
    kind = inner.remaining.get("model_type", CLIP.model_type)
    if kind not in TOWERS:
        settings.refuse("vision_config.model_type", kind, f"only {', '.join(TOWERS)} is supported")
    whole = tower(inner, TOWERS.get(kind, CLIP))
    inner.close(UNUSED | {"initializer_factor", "vocab_size"})
    strategy = settings.only("vision_feature_select_strategy", "default", "full")
    if strategy == "default" and not whole.class_tokens:
        settings.refuse("vision_feature_select_strategy", strategy, "without a class token it leaves out a patch")
    total, read = whole.stack.layers(), settings.take("vision_feature_layer", -2, object)
    count = total + 1 + read if isinstance(read, int) and read < 0 else read
    if not isinstance(count, int) or not 1 <= count <= total:
        settings.refuse("vision_feature_layer", read, f"only one of the {total} layers is supported")
        count = total
    # What is read comes before the norm behind the blocks.
    stack = replace(whole.stack, repeats=count)
    return replace(whole, stack=stack, norm=layers.IdentityNormConfig()), strategy == "full"
