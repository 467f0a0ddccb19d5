"""Gemma: Llama's blocks with zero-centred norms, GeGLU, embeddings times sqrt(hidden size), and a tied head."""

from typing import Any

from megajax.checkpoint.huggingface import decoders
from megajax.checkpoint.huggingface.families import llama
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.huggingface.rotary import rope
from megajax.layers.config import BlockConfig, RMSNormConfig
from megajax.models.config import DecoderConfig
from megajax.models.config.decoder import WidthScalingConfig

DEFAULTS = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256000,
    "intermediate_size": 24576,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    given.assume(DEFAULTS)
    if given.left["hidden_act"] == "gelu":  # of the first files, which mean the other
        given.left["hidden_act"] = "gelu_pytorch_tanh"
    layers, length = given.layers(), given.need("max_position_embeddings")
    hidden = given.seen("hidden_size")
    mixer = decoders.attention(given, bias=given.take("attention_bias", False), rope=rope(given, length))
    norm = RMSNormConfig(epsilon=given.need("rms_norm_eps"), zero_centred=True)
    block = BlockConfig(mixer=mixer, mlp=decoders.gated_mlp(given), norm=norm)
    scaling = WidthScalingConfig(base_hidden=hidden, score_power=0.5, embedding=hidden**0.5)
    return decoders.decoder(given, [block] * layers, length, width_scaling=scaling)


def settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model."""
    block = decoders.layers_of(cfg)[0]
    return {
        **decoders.settings_of(cfg, "gemma", "GemmaForCausalLM"),
        **decoders.attention_settings(block.mixer, cfg.hidden),
        **decoders.activation_setting(block.mlp),
        "intermediate_size": block.mlp.ffn,
    }


FAMILIES = [
    decoders.family(
        "gemma",
        model=model,
        settings=settings,
        rows=llama.rows,
        unused=frozenset({"hidden_activation"}),
    )
]
