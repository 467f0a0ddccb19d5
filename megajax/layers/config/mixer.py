"""The layers that mix tokens of a row; imports neither jax nor flax."""

from megajax.layers.config.attention import AttentionConfig, LatentAttentionConfig
from megajax.layers.config.mamba import Mamba1Config, Mamba2Config

type MixerConfig = AttentionConfig | LatentAttentionConfig | Mamba2Config | Mamba1Config
