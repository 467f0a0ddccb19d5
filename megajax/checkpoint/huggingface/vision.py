"""Towers of CLIP and SigLIP: their settings and their names, alone or inside of a LLaVA."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megajax.checkpoint.huggingface.activations import ACTIVATIONS, theirs
from megajax.checkpoint.huggingface.family import Settings
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
    classes: bool
    """A class token before the patches, a norm before the blocks, and no bias of patches."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)


CLIP = Tower("clip_vision_model", "quick_gelu", 1e-5, 32, classes=True, mean=CLIP_MEAN, deviation=CLIP_DEVIATION)
SIGLIP = Tower("siglip_vision_model", "gelu_pytorch_tanh", 1e-6, 16, classes=False)
TOWERS = {tower.model_type: tower for tower in (CLIP, SIGLIP)}

UNUSED = frozenset(
    {"attention_probs_dropout_prob", "dropout", "hidden_dropout_prob", "projection_dim", "vision_use_head"}
)
"""About dropout, and about what reads the tower."""


def pixels(given: Settings, patch: int) -> dict[str, Any]:
    """height, width and patch: sizes are numbers or pairs of them."""
    given.only("num_channels", 3)
    (height, width), (side, other) = (
        value if isinstance(value, Sequence) else (value, value)
        for value in (given.take("image_size", 224, object), given.take("patch_size", patch, object))
    )
    if side != other:
        given.refuse("patch_size", [side, other], "only squares are supported")
    return {"height": height, "width": width, "patch": side}


def pixel_settings(cfg: Any) -> dict[str, Any]:
    """The reverse of `pixels`, with what is in preprocessor_config.json else."""
    size = cfg.height if cfg.height == cfg.width else [cfg.height, cfg.width]
    colours = {"image_mean": list(cfg.mean), "image_std": list(cfg.deviation)}
    return {"image_size": size, "patch_size": cfg.patch, "num_channels": 3, **colours}


def block(given: Settings, activation: str, epsilon: float, *, qkv_bias: bool = True) -> layers.BlockConfig:
    """A pre-norm block with biases whose tokens see each other."""
    mixer = layers.AttentionConfig(
        heads=given.take("num_attention_heads", 12), bias=True, qkv_bias=None if qkv_bias else False, causal=False
    )
    function = given.choose("hidden_act", activation, ACTIVATIONS)
    mlp = layers.DenseMLPConfig(ffn=given.take("intermediate_size", 3072), activation=function)
    return layers.BlockConfig(
        mixer=mixer, mlp=mlp, norm=layers.LayerNormConfig(epsilon=given.take("layer_norm_eps", epsilon))
    )


def block_settings(cfg: Any) -> dict[str, Any]:
    """The settings of a tower's blocks."""
    block = cfg.stack.pattern[0]
    return {
        "hidden_size": cfg.hidden,
        "intermediate_size": block.mlp.ffn,
        "num_hidden_layers": cfg.stack.layers(),
        "num_attention_heads": block.mixer.heads,
        "hidden_act": theirs(block.mlp.activation),
        "layer_norm_eps": block.norm.epsilon,
    }


def tower(given: Settings, kind: Tower) -> VisionTowerConfig:
    """The tower of a config.json, or of its part vision_config."""
    one = block(given, kind.activation, kind.epsilon)
    return VisionTowerConfig(
        hidden=given.take("hidden_size", 768),
        stack=layers.StackConfig(pattern=(one,), repeats=given.layers(default=12)),
        **pixels(given, kind.patch),
        patch_bias=not kind.classes,
        class_tokens=int(kind.classes),
        entry_norm=one.norm if kind.classes else None,
        norm=one.norm,
        mean=tuple(given.take("image_mean", kind.mean)),
        deviation=tuple(given.take("image_std", kind.deviation)),
    )


def tower_settings(cfg: Any) -> dict[str, Any]:
    """The reverse of `tower`."""
    kind = CLIP if cfg.class_tokens else SIGLIP
    own = {"model_type": kind.model_type} | ({} if kind.classes else {"vision_use_head": False})
    return {**own, **block_settings(cfg), **pixel_settings(cfg)}


def tower_rows(side: int, theirs: str = "vision_model", ours: str = "") -> list[Row]:
    """The table of a tower with patches of this side. theirs, ours: prefixes."""
    layer, one = f"{theirs}.encoder.layers.{{layer}}", f"{ours}stack.*"
    return [
        Row(f"{theirs}.embeddings.class_embedding", f"{ours}class_tokens", "d -> 1 d"),
        patches(f"{theirs}.embeddings.patch_embedding.weight", f"{ours}patches", side),
        Row(f"{theirs}.embeddings.patch_embedding.bias", f"{ours}patch_bias"),
        Row(f"{theirs}.embeddings.position_embedding.weight", f"{ours}positions"),
        *norm(f"{theirs}.pre_layrnorm", f"{ours}entry_norm"),
        *attention(f"{layer}.self_attn", f"{one}.mixer", ("q_proj", "k_proj", "v_proj", "out_proj")),
        *linear(f"{layer}.mlp.fc1", f"{one}.mlp.up"),
        *linear(f"{layer}.mlp.fc2", f"{one}.mlp.down"),
        *norm(f"{layer}.layer_norm1", f"{one}.mixer_norm"),
        *norm(f"{layer}.layer_norm2", f"{one}.mlp_norm"),
        *norm(f"{theirs}.post_layernorm", f"{ours}norm"),
    ]


def classes(given: Settings) -> int:
    """Classes of a classifier: as many as have names, or num_labels, 2 by default."""
    count, names = given.take("num_labels", 2), given.left.get("id2label")
    return len(names) if names else count


def class_settings(count: int) -> dict[str, Any]:
    """The reverse of `classes`."""
    names = {str(number): f"LABEL_{number}" for number in range(count)}
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


def read_tower(given: Settings) -> tuple[VisionTowerConfig, bool]:
    """The tower up to the layer that is read, and whether all its positions are."""
    inner = given.part("vision_config")
    inner.assume({name: given.take(name) for name in ("image_mean", "image_std") if name in given.left})
    kind = inner.left.get("model_type", CLIP.model_type)
    if kind not in TOWERS:
        given.refuse("vision_config.model_type", kind, f"only {', '.join(TOWERS)} is supported")
    whole = tower(inner, TOWERS.get(kind, CLIP))
    inner.close(UNUSED | {"initializer_factor", "vocab_size"})
    strategy = given.only("vision_feature_select_strategy", "default", "full")
    if strategy == "default" and not whole.class_tokens:
        given.refuse("vision_feature_select_strategy", strategy, "without a class token it leaves out a patch")
    total, read = whole.stack.layers(), given.take("vision_feature_layer", -2, object)
    count = total + 1 + read if isinstance(read, int) and read < 0 else read
    if not isinstance(count, int) or not 1 <= count <= total:
        given.refuse("vision_feature_layer", read, f"only one of the {total} layers is supported")
        count = total
    # What is read comes before the norm behind the blocks.
    return replace(
        whole, stack=replace(whole.stack, repeats=count), norm=layers.IdentityNormConfig()
    ), strategy == "full"
