"""LLaVA 1.5: a Llama, Mistral or Qwen reads images by the tower of CLIP or SigLIP, through an MLP."""

from dataclasses import fields, replace
from typing import Any

from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.families.vit import read_tower, tower_rows, vision_config
from megajax.interop.huggingface.family import Family, Settings, activation_name, linear
from megajax.interop.weights.model_differences import differences
from megajax.interop.weights.name_mapping import Row
from megajax.models.decoder.config import DecoderConfig
from megajax.models.llava.config import LlavaConfig, ProjectorConfig

LANGUAGES = {family.name: family for family in llama.FAMILIES if family.name in llama.TABLES}


def _read(settings: Settings) -> LlavaConfig:
    text = settings.part("text_config")
    kind = text.remaining.get("model_type", "llama")
    if kind not in LANGUAGES:
        settings.refuse("text_config.model_type", kind, f"only {', '.join(LANGUAGES)} is supported")
    family = LANGUAGES.get(kind, LANGUAGES["llama"])
    language = family.read(text)
    text.close(family.unused)
    vision, all_positions = read_tower(settings)
    activation = settings.activation("projector_hidden_act", "gelu")
    projector = ProjectorConfig(activation=activation, bias=settings.take("multimodal_projector_bias", True))
    token, tied = settings.take("image_token_id", 32000), settings.take("tie_word_embeddings", False)
    shared = {field.name: getattr(language, field.name) for field in fields(DecoderConfig)}
    return LlavaConfig(
        **{**shared, "tied": language.tied or tied},
        vision=vision,
        image_token=settings.take("image_token_index", token),
        projector=projector,
        keep_class_tokens=all_positions and vision.class_tokens > 0,
        slots=settings.take("slots", 1),
    )


def _write(cfg: LlavaConfig) -> dict[str, Any]:
    """The tower has no layers but those that are read."""
    return {
        "text_config": text_config(cfg),
        "vision_config": vision_config(cfg.vision),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full" if cfg.keep_class_tokens or not cfg.vision.class_tokens else "default",
        "image_token_index": cfg.image_token,
        "image_seq_length": cfg.image_positions(),
        "projector_hidden_act": activation_name(cfg.projector.activation),
        "multimodal_projector_bias": cfg.projector.bias,
        "tie_word_embeddings": cfg.tied,
        "slots": cfg.slots,
    }


def language_of(cfg: LlavaConfig) -> DecoderConfig:
    """The decoder alone."""
    return DecoderConfig(**{field.name: getattr(cfg, field.name) for field in fields(DecoderConfig)})


def text_config(cfg: LlavaConfig) -> dict[str, Any]:
    """The decoder alone, as the first family that loses nothing of it; of the first if all do."""
    language = language_of(cfg)
    configs = [family.config_json(language) for family in LANGUAGES.values()]
    readers = zip(configs, LANGUAGES.values(), strict=True)
    lossless = (config for config, family in readers if not differences(language, family.read(Settings(config))))
    return next(lossless, configs[0])


TOWER, PROJECTOR = "vision_tower.vision_model", "multi_modal_projector"


def _rows(cfg: LlavaConfig) -> list[Row]:
    return [
        *[replace(row, tensor=f"language_model.{row.tensor}") for row in llama.TABLES["llama"].rows(cfg)],
        *tower_rows(cfg.vision.patch, TOWER, "vision."),
        *linear(f"{PROJECTOR}.linear_1", "projector.up"),
        *linear(f"{PROJECTOR}.linear_2", "projector.down"),
    ]


FAMILIES = [
    Family(
        name="llava",
        architecture="LlavaForConditionalGeneration",
        read=_read,
        write=_write,
        rows=_rows,
        unused=frozenset({"image_seq_length", "ignore_index", "vocab_size"}),
        # Layers of the tower behind the one that is read.
        ignored=(
            *(f"{TOWER}.encoder.layers.*", f"{TOWER}.post_layernorm.*", f"{TOWER}.head.*"),
            *(f"{TOWER}.embeddings.position_ids", "language_model.model.layers.*.self_attn.rotary_emb.inv_freq"),
        ),
        extra=(f"{TOWER}.encoder.layers.*", f"{TOWER}.post_layernorm.*", f"{TOWER}.head.*"),
        extra_settings=("vision_config", "vision_feature_layer"),
        renamed=(
            (r"^lm_head\.", "language_model.lm_head."),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
            (r"^vision_tower\.(?!vision_model\.)", f"{TOWER}."),
        ),
        heads={"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
    )
]
