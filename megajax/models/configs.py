"""Configs of models, one file for each family; imports neither jax nor flax."""

from megajax.models.bert.config import BertConfig
from megajax.models.classifier.config import (
    BertClassifierConfig,
    ChoiceHeadConfig,
    ClassHeadConfig,
    DecoderClassifierConfig,
    RegressionHeadConfig,
    SpanHeadConfig,
)
from megajax.models.decoder.config import DecoderConfig, PredictionConfig, WidthScalingConfig, text_schema
from megajax.models.llava.config import LlavaConfig, ProjectorConfig
from megajax.models.t5.config import T5Config
from megajax.models.vision.config import VisionTowerConfig
from megajax.models.vit.config import ViTConfig

__all__ = [
    "BertClassifierConfig",
    "BertConfig",
    "ChoiceHeadConfig",
    "ClassHeadConfig",
    "DecoderClassifierConfig",
    "DecoderConfig",
    "LlavaConfig",
    "PredictionConfig",
    "ProjectorConfig",
    "RegressionHeadConfig",
    "SpanHeadConfig",
    "T5Config",
    "ViTConfig",
    "VisionTowerConfig",
    "WidthScalingConfig",
    "text_schema",
]
