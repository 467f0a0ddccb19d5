"""Configs of layers, one file for each type of layer; imports neither jax nor flax.

Sizes that all layers share (hidden size, number of layers, standard deviation of initial weights) belong to the model.
"""

from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.attention.latent_config import LatentAttentionConfig, SelfAttentionConfig
from megajax.layers.block.config import (
    BlockConfig,
    MixerConfig,
    NormPlacement,
    shared_bias,
)
from megajax.layers.checks import LARGEST, above_zero, below_one
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.mamba.config import Mamba1Config, Mamba2Config
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig, MLPConfig
from megajax.layers.moe.config import (
    CapacityConfig,
    DispatchConfig,
    FeedForwardConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
)
from megajax.layers.norm.config import (
    IdentityNormConfig,
    L2NormConfig,
    LayerNormConfig,
    LayerScaleConfig,
    NormConfig,
    RMSNormConfig,
)
from megajax.layers.position.config import Llama3ScalingConfig, RelativeBiasConfig, RopeConfig, YarnScalingConfig
from megajax.layers.quantization.config import QuantizationConfig
from megajax.layers.stack.config import StackConfig

__all__ = [
    "LARGEST",
    "AttentionConfig",
    "BlockConfig",
    "CapacityConfig",
    "CrossAttentionConfig",
    "DenseMLPConfig",
    "DispatchConfig",
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
    "MixerConfig",
    "MoEConfig",
    "NormConfig",
    "NormPlacement",
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
