"""Mixtral: Mistral's blocks with experts."""

from typing import Any

from megajax.checkpoint.huggingface import decoders
from megajax.checkpoint.huggingface.decoders import ATTENTION, LAYER, ends, experts
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.huggingface.rotary import rope, window_settings, windows
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import BlockConfig, MoEConfig, RMSNormConfig
from megajax.models.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    given.assume(DEFAULTS)
    layers, length = given.layers(), given.need("max_position_embeddings")
    moe = MoEConfig(
        experts=given.need("num_local_experts"),
        top_k=given.need("num_experts_per_tok"),
        expert=decoders.gated_mlp(given),
        router=decoders.router(given),
    )
    mixer = decoders.attention(given, rope=rope(given, length, base=1e6))
    block = BlockConfig(mixer=mixer, mlp=moe, norm=RMSNormConfig(epsilon=given.need("rms_norm_eps")))
    return decoders.decoder(given, decoders.windowed(block, windows(given, layers, length, lambda _: True)), length)


def settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model."""
    blocks = decoders.layers_of(cfg)
    moe, _, _ = decoders.mixture_of(cfg)
    return {
        **decoders.settings_of(cfg, "mixtral", "MixtralForCausalLM"),
        **decoders.attention_settings(blocks[0].mixer, cfg.hidden),
        **decoders.activation_setting(moe.expert),
        **decoders.router_settings(moe),
        "intermediate_size": moe.expert.ffn,
        "num_local_experts": moe.experts,
        "sliding_window": window_settings([block.mixer for block in blocks])["sliding_window"],
    }


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table."""
    return [*ends(cfg), *ATTENTION, *experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))]


FAMILIES = [
    decoders.family(
        "mixtral",
        model=model,
        settings=settings,
        rows=rows,
        unused=frozenset({"router_jitter_noise"}),
    )
]
