"""Configs of models, one file for each family; imports neither jax nor flax."""

from megajax.models.config.bert import BertConfig
from megajax.models.config.classifier import (
    BertClassifierConfig,
    ChoiceHeadConfig,
    ClassHeadConfig,
    DecoderClassifierConfig,
    RegressionHeadConfig,
    SpanHeadConfig,
)
from megajax.models.config.decoder import DecoderConfig, PredictionConfig, WidthScalingConfig, text_schema
from megajax.models.config.llava import LlavaConfig, ProjectorConfig
from megajax.models.config.t5 import T5Config
from megajax.models.config.vision import VisionTowerConfig
from megajax.models.config.vit import ViTConfig

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
