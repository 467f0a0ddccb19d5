"""Configs of layers, one file for each type of layer; imports neither jax nor flax.

Sizes that all layers share (hidden size, number of layers, standard deviation of initial weights) belong to the model.
"""

from megajax.layers.config.attention import AttentionConfig, LatentAttentionConfig, SelfAttentionConfig
from megajax.layers.config.block import (
    AnyBlockConfig,
    BlockConfig,
    FeedForwardBlockConfig,
    MixerBlockConfig,
    PostNormBlockConfig,
    StackConfig,
    shared_bias,
)
from megajax.layers.config.checks import LARGEST, above_zero, below_one
from megajax.layers.config.lora import LoRAConfig
from megajax.layers.config.mamba import Mamba1Config, Mamba2Config
from megajax.layers.config.mlp import DenseMLPConfig, GatedMLPConfig, MLPConfig
from megajax.layers.config.moe import (
    CapacityConfig,
    DispatchConfig,
    FeedForwardConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
)
from megajax.layers.config.norm import (
    IdentityNormConfig,
    L2NormConfig,
    LayerNormConfig,
    LayerScaleConfig,
    NormConfig,
    RMSNormConfig,
)
from megajax.layers.config.position import Llama3ScalingConfig, RelativeBiasConfig, RopeConfig, YarnScalingConfig
from megajax.layers.config.quantization import QuantizationConfig
from megajax.layers.config.residual import MixerConfig

__all__ = [
    "LARGEST",
    "AnyBlockConfig",
    "AttentionConfig",
    "BlockConfig",
    "CapacityConfig",
    "DenseMLPConfig",
    "DispatchConfig",
    "FeedForwardBlockConfig",
    "FeedForwardConfig",
    "GatedMLPConfig",
    "IdentityNormConfig",
    "L2NormConfig",
    "LatentAttentionConfig",
    "LayerNormConfig",
    "LayerScaleConfig",
    "Llama3ScalingConfig",
    "LoRAConfig",
    "MLPConfig",
    "Mamba1Config",
    "Mamba2Config",
    "MixerBlockConfig",
    "MixerConfig",
    "MoEConfig",
    "NormConfig",
    "PostNormBlockConfig",
    "QuantizationConfig",
    "RMSNormConfig",
    "RelativeBiasConfig",
    "RopeConfig",
    "RouterConfig",
    "SelfAttentionConfig",
    "SharedExpertConfig",
    "StackConfig",
    "YarnScalingConfig",
    "above_zero",
    "below_one",
    "shared_bias",
]
