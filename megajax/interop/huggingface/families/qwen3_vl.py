"""Qwen3-VL without experts: Qwen 3 reads images of any size, with DeepStack and positions along three axes."""

from collections.abc import Iterator
from dataclasses import fields, replace
from math import lcm
from typing import Any

from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.families.llava import LANGUAGES, language_of
from megajax.interop.huggingface.families.vit import inner_tower
from megajax.interop.huggingface.family import Family, Settings, activation_name, layers_of, linear, norm
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.position.config import AxialRopeConfig, InterleavedRopeConfig, RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.qwen_vl.config import DynamicTowerConfig, QwenVLConfig, qwen_vl

SECTIONS = [24, 20, 20]
TEXT = {"rope_theta": 500000.0, "max_position_embeddings": 128000, "num_key_value_heads": 32}
SLOTS, MOST, SIZE = 4, 2304, {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
"""Of a model from transformers: images of a row, and patches of an image, for which it has no limits; and the least and
most pixels of an image without preprocessor_config.json."""
EPSILON = 1e-6
POSITIONS = 8
"""Rows of the tower have a multiple of this many patches."""


def _read(settings: Settings) -> QwenVLConfig:
    text = settings.part("text_config")
    text.assume(TEXT)
    sections = SECTIONS
    for name in ("rope_scaling", "rope_parameters"):
        positions = dict(text.remaining.get(name) or {})
        sections = positions.pop("mrope_section", sections)
        if not positions.pop("mrope_interleaved", True):
            settings.refuse(f"text_config.{name}.mrope_interleaved", False, "only true is supported")
        if positions:
            text.remaining[name] = positions
        else:
            text.remaining.pop(name, None)
    tied = settings.take("tie_word_embeddings", text.remaining.get("tie_word_embeddings", False))
    language = LANGUAGES["qwen3"].read(text)
    text.close(LANGUAGES["qwen3"].unused)
    blocks = [replace(block, mixer=_turning(block.mixer, tuple(sections))) for block in layers_of(language)]
    language = replace(language, stack=language.stack.with_pattern(blocks[: len(language.stack.pattern)]), tied=tied)
    return qwen_vl(
        language,
        _read_tower(settings, language, slots := settings.take("slots", SLOTS)),
        image_token=settings.take("image_token_id", 151655),
        slots=slots,
    )


def _turning(mixer: Any, sections: tuple[Any, ...]) -> AttentionConfig:
    plain = {field.name: getattr(mixer.rope, field.name) for field in fields(RopeConfig)}
    return replace(mixer, rope=InterleavedRopeConfig(**plain, sections=sections))


def _read_tower(settings: Settings, language: DecoderConfig, slots: int) -> DynamicTowerConfig:
    """All images of a row fit into it at their largest."""
    size, inner = {**SIZE, **settings.take("size", {})}, inner_tower(settings)
    if (width := inner.take("out_hidden_size", 3584)) != language.hidden:
        settings.refuse("vision_config.out_hidden_size", width, f"must be text_config.hidden_size={language.hidden}")
    inner.only("in_channels", 3)
    table, patch = inner.take("num_position_embeddings", 2304), inner.take("patch_size", 16)
    side = round(table**0.5)
    if side**2 != table:
        settings.refuse("vision_config.num_position_embeddings", table, "must be a square")
    rotation = inner.take("rope_parameters", {})
    if rotation.get("rope_type", "axial") != "axial":
        settings.refuse("vision_config.rope_parameters.rope_type", rotation["rope_type"], "only axial is supported")
    rope = AxialRopeConfig(base=float(rotation.get("rope_theta", 10000.0)))
    mixer = AttentionConfig(heads=inner.take("num_heads", 16), bias=True, causal=False, rope=rope)
    activation = inner.activation("hidden_act", "gelu_pytorch_tanh")
    mlp = DenseMLPConfig(ffn=inner.take("intermediate_size", 4304), activation=activation)
    layer_norm = LayerNormConfig(epsilon=EPSILON)
    merge = inner.take("spatial_merge_size", 2)
    room, unit = (language.sequence_length - 1) // slots * merge**2, lcm(merge**2, POSITIONS)
    most = max(unit, min(MOST, size["longest_edge"] // patch**2, room) // unit * unit)
    most = settings.take("most_patches", most)
    tower = DynamicTowerConfig(
        hidden=inner.take("hidden_size", 1152),
        stack=StackConfig(
            pattern=(BlockConfig(mixer=mixer, mlp=mlp, norm=layer_norm),), repeats=inner.layers("depth", 27)
        ),
        height=side * patch,
        width=side * patch,
        patch=patch,
        class_tokens=0,
        norm=layer_norm,
        merge=merge,
        frames=inner.take("temporal_patch_size", 2),
        features=tuple(inner.take("deepstack_visual_indexes", [8, 16, 24])),
        least=settings.take("least_patches", min(most, size["shortest_edge"] // patch**2)),
        most=most,
        budget=settings.take("row_patches", None),
        positions_multiple=POSITIONS,
        mean=tuple(inner.take("image_mean", (0.5, 0.5, 0.5))),
        deviation=tuple(inner.take("image_std", (0.5, 0.5, 0.5))),
    )
    inner.close({"model_type"})
    return tower


def _write(cfg: QwenVLConfig) -> dict[str, Any]:
    rope, block = layers_of(cfg)[0].mixer.rope, layers_of(cfg.vision)[0]
    text = {**LANGUAGES["qwen3"].write(language_of(cfg)), "model_type": "qwen3_vl_text"}
    scaling = {"rope_type": "default", **(text["rope_scaling"] or {})}
    text["rope_scaling"] = {**scaling, "mrope_section": list(rope.sections), "mrope_interleaved": True}
    return {
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": cfg.vision.stack.layers(),
            "hidden_size": cfg.vision.hidden,
            "hidden_act": activation_name(block.mlp.activation),
            "intermediate_size": block.mlp.ffn,
            "num_heads": block.mixer.heads,
            "in_channels": 3,
            "patch_size": cfg.vision.patch,
            "spatial_merge_size": cfg.vision.merge,
            "temporal_patch_size": cfg.vision.frames,
            "out_hidden_size": cfg.hidden,
            "num_position_embeddings": cfg.vision.patches(),
            "deepstack_visual_indexes": list(cfg.vision.features),
            **({} if block.mixer.rope.base == 10000.0 else {"rope_parameters": _axial(block.mixer.rope)}),
        },
        "image_token_id": cfg.image_token,
        "tie_word_embeddings": cfg.tied,
        # Here and not in vision_config, which thereby stays that of the source.
        "slots": cfg.slots,
        "least_patches": cfg.vision.least,
        "most_patches": cfg.vision.most,
        **({} if cfg.vision.budget is None else {"row_patches": cfg.vision.budget}),
        "image_mean": list(cfg.vision.mean),
        "image_std": list(cfg.vision.deviation),
    }


def _axial(rope: RopeConfig) -> dict[str, Any]:
    return {"rope_type": "axial", "rope_theta": rope.base}


VISUAL, TEXT_MODEL = "model.visual", "model.language_model."


def _rows(cfg: QwenVLConfig) -> Iterator[Row]:
    tower, first = cfg.vision, 0
    for row in llama.TABLES["qwen3"].rows(cfg):
        yield replace(row, tensor=row.tensor.replace("model.", TEXT_MODEL, 1))
    sizes = {"t": tower.frames, "y": tower.patch, "x": tower.patch}
    yield Row(f"{VISUAL}.patch_embed.proj.weight", "vision.patches", "d c t y x -> (t y x c) d", sizes=sizes)
    yield Row(f"{VISUAL}.patch_embed.proj.bias", "vision.patch_bias")
    yield Row(f"{VISUAL}.pos_embed.weight", "vision.positions")
    for number, stack in enumerate(tower.stages()):
        yield from (replace(row, first=first) for row in _blocks(f"vision.stages.{number}.stack.*"))
        first += stack.layers()
    yield from norm(f"{VISUAL}.merger.norm", f"vision.stages.{len(tower.stages()) - 1}.norm")
    for place, path in enumerate(cfg.projectors()):
        tensor = f"{VISUAL}.deepstack_merger_list.{place - 1}" if place else f"{VISUAL}.merger"
        yield from norm(f"{tensor}.norm", f"{path}.norm")
        yield from linear(f"{tensor}.linear_fc1", f"{path}.up")
        yield from linear(f"{tensor}.linear_fc2", f"{path}.down")


def _blocks(path: str) -> list[Row]:
    """The rows of a stage of the tower."""
    layer = f"{VISUAL}.blocks.{{layer}}"
    inputs = tuple(f"{path}.mixer.{name}" for name in ("query", "key", "value"))
    return [
        Row(f"{layer}.attn.qkv.weight", inputs, "(n h) d -> d n h"),
        Row(f"{layer}.attn.qkv.bias", tuple(f"{name}_bias" for name in inputs), "(n h) -> n h"),
        Row(f"{layer}.attn.proj.weight", f"{path}.mixer.output", "d (n h) -> n h d"),
        Row(f"{layer}.attn.proj.bias", f"{path}.mixer.output_bias"),
        *linear(f"{layer}.mlp.linear_fc1", f"{path}.mlp.up"),
        *linear(f"{layer}.mlp.linear_fc2", f"{path}.mlp.down"),
        *norm(f"{layer}.norm1", f"{path}.mixer_norm"),
        *norm(f"{layer}.norm2", f"{path}.mlp_norm"),
    ]


FAMILIES = [
    Family(
        name="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        read=_read,
        write=_write,
        rows=lambda cfg: list(_rows(cfg)),
        unused=frozenset({"vision_start_token_id", "vision_end_token_id", "video_token_id"}),
        heads={"lm_head.weight": f"{TEXT_MODEL}embed_tokens.weight"},
    )
]
