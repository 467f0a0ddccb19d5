"""LLaVA (Liu et al. 2023) and LLaVA 1.5: a decoder combined with a vision tower."""

from dataclasses import fields
from typing import Any

from megajax.models.configs import DecoderConfig, LlavaConfig
from megajax.models.vision.config import VisionTowerConfig


def llava(language: DecoderConfig, vision: VisionTowerConfig, *, image_token: int, **more: Any) -> LlavaConfig:
    """LLaVA with the decoder `language` and the tower `vision`; `more` are other settings of LlavaConfig.

    image_token: id that marks positions of images, below language.vocabulary_size.

    Example: `mj.llava(mj.llama2("7b", vocabulary_size=32_001), mj.clip("l14-336"), image_token=32_000)`
    """
    settings = {field.name: getattr(language, field.name) for field in fields(language)}
    return LlavaConfig(**settings | more, vision=vision, image_token=image_token)
