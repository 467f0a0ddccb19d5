"""Configs of models, one file for each family; imports neither jax nor flax."""

from megajax.models.config.bert import BertConfig
from megajax.models.config.decoder import DecoderConfig, PredictionConfig, WidthScalingConfig, text_schema

__all__ = ["BertConfig", "DecoderConfig", "PredictionConfig", "WidthScalingConfig", "text_schema"]
