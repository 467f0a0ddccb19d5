"""LLaVA 1.5: a Llama, Mistral or Qwen reads images by the tower of CLIP or SigLIP, through an MLP."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from megajax.checkpoint.huggingface.activations import ACTIVATIONS, theirs
from megajax.checkpoint.huggingface.families import llama
from megajax.checkpoint.huggingface.family import Family, Settings
from megajax.checkpoint.huggingface.rows import linear
from megajax.checkpoint.huggingface.vision import read_tower, tower_rows, tower_settings
from megajax.checkpoint.weights.tensor_table import Row
from megajax.models.config import DecoderConfig, LlavaConfig
from megajax.models.config.llava import ProjectorConfig

LANGUAGES = {family.name: family for family in llama.FAMILIES}


def model(given: Settings) -> LlavaConfig:
    """The model of a config.json."""
    text = given.part("text_config")
    kind = text.left.get("model_type", "llama")
    if kind not in LANGUAGES:
        given.refuse("text_config.model_type", kind, f"only {', '.join(LANGUAGES)} is supported")
    family = LANGUAGES.get(kind, LANGUAGES["llama"])
    language = family.model(text)
    text.close(family.unused)
    vision, whole = read_tower(given)
    projector = ProjectorConfig(
        activation=given.choose("projector_hidden_act", "gelu", ACTIVATIONS),
        bias=given.take("multimodal_projector_bias", True),
    )
    token, tied = given.take("image_token_id", 32000), given.take("tie_word_embeddings", False)
    shared = {field.name: getattr(language, field.name) for field in fields(DecoderConfig)}
    return LlavaConfig(
        **{**shared, "tied": language.tied or tied},
        vision=vision,
        image_token=given.take("image_token_index", token),
        projector=projector,
        keep_class_tokens=whole and vision.class_tokens > 0,
        slots=given.take("slots", 1),
    )


def settings(cfg: Any) -> dict[str, Any]:
    """The config.json of a model. The tower has no layers but those that are read."""
    language = language_of(cfg)
    mixer = cfg.stack.pattern[0].mixer
    kind = "qwen3" if mixer.qk_norm is not None else "llama"
    kind = "qwen2" if mixer.has_qkv_bias() and not mixer.bias else kind
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": LANGUAGES[kind].settings(language),
        "vision_config": tower_settings(cfg.vision),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full" if cfg.keep_class_tokens or not cfg.vision.class_tokens else "default",
        "image_token_index": cfg.image_token,
        "image_seq_length": cfg.image_positions(),
        "projector_hidden_act": theirs(cfg.projector.activation),
        "multimodal_projector_bias": cfg.projector.bias,
        "tie_word_embeddings": cfg.tied,
        "slots": cfg.slots,
    }


def language_of(cfg: LlavaConfig) -> DecoderConfig:
    """The decoder alone."""
    return DecoderConfig(**{field.name: getattr(cfg, field.name) for field in fields(DecoderConfig)})


TOWER, PROJECTOR = "vision_tower.vision_model", "multi_modal_projector"


def rows(cfg: Any) -> Sequence[Row]:
    """The table."""
    return [
        *[replace(row, theirs=f"language_model.{row.theirs}") for row in llama.rows(cfg)],
        *tower_rows(cfg.vision.patch, TOWER, "vision."),
        *linear(f"{PROJECTOR}.linear_1", "projector.up"),
        *linear(f"{PROJECTOR}.linear_2", "projector.down"),
    ]


FAMILIES = [
    Family(
        name="llava",
        model_types=("llava",),
        model=model,
        settings=settings,
        rows=rows,
        unused=frozenset({"image_seq_length", "ignore_index", "vocab_size"}),
        # Layers of the tower behind the one that is read.
        ignored=(
            *(f"{TOWER}.encoder.layers.*", f"{TOWER}.post_layernorm.*", f"{TOWER}.head.*"),
            *(f"{TOWER}.embeddings.position_ids", "language_model.model.layers.*.self_attn.rotary_emb.inv_freq"),
        ),
        renamed=(
            (r"^lm_head\.", "language_model.lm_head."),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
            (r"^vision_tower\.(?!vision_model\.)", f"{TOWER}."),
        ),
        heads={"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
    )
]
