"""Decoders without experts that differ from Llama in biases, norms, positions or the feed-forward."""

from typing import Any

from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.tables import (
    EVERYWHERE,
    FUSED_FEED_FORWARD,
    Decoder,
    LayeredPositions,
    LayerPositions,
    Positions,
    SlidingPositions,
    Windows,
    all_but_every,
    sizes,
)
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.models.decoder.config import WidthScalingConfig

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
GLM = sizes(151552, 4096, 13696, 40, 32, 2, 128, 131072, rms_norm_eps=1.5625e-7, attention_bias=True)
OLMO2 = sizes(50304, 4096, 11008, 32, 32, None, None, 2048, rms_norm_eps=1e-5)
COHERE = sizes(256000, 8192, 22528, 40, 64, None, None, 8192, rms_norm_eps=1e-5, tie_word_embeddings=True)
COHERE |= {"logit_scale": 0.0625}
COHERE_NOTES = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block",
)  # fmt: skip
"""Notes on the architecture that transformers does not read."""
TWO_MATRICES = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
GLM4_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _stablelm(settings: Settings) -> dict[str, Any]:
    settings.only("qk_layernorm", False)
    return {"norm_placement": "parallel"} if settings.take("use_parallel_residual", False) else {}


def _cohere(settings: Settings) -> dict[str, Any]:
    settings.only("use_qk_norm", False)
    hidden, scale = settings.peek("hidden_size"), settings.need("logit_scale", float)
    return {"width_scaling": WidthScalingConfig(base_hidden=hidden, score_power=0.5, output=scale)}


TABLES = [
    Decoder(
        "olmo2", "Olmo2ForCausalLM", OLMO2, bias="attention_bias", placement="output", qk_norm="heads",
        norm=RMSNormConfig(),
    ),
    Decoder(
        "olmo3", "Olmo3ForCausalLM", OLMO2 | {"sliding_window": 4096}, bias="attention_bias", placement="output",
        # transformers ignores rope_theta in sliding layers, unless rope_parameters has it for them.
        qk_norm="heads", positions=LayeredPositions(base=500000.0, local=500000.0), windows=all_but_every(4),
    ),
    Decoder(
        "exaone4", "Exaone4ForCausalLM",
        sizes(102400, 4096, 16384, 32, 32, 32, None, 2048, rms_norm_eps=1e-5, sliding_window=4096)
        | {"sliding_window_pattern": 4},
        placement="output", qk_norm="head", positions=SlidingPositions(),
        windows=all_but_every("sliding_window_pattern"),
    ),
    Decoder(
        "smollm3", "SmolLM3ForCausalLM",
        sizes(128256, 2048, 11008, 36, 16, 4, None, 32768, tie_word_embeddings=True, no_rope_layer_interval=4)
        | {"use_sliding_window": False},
        bias="attention_bias", mlp_bias="mlp_bias", positions=LayerPositions(base=2e6),
        windows=Windows(lambda _: lambda _: False, ("sliding_window", "use_sliding_window", "layer_types")),
    ),
    Decoder(
        "cohere2", "Cohere2ForCausalLM", COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        {"layer_norm_eps": "rms_norm_eps"}, bias="attention_bias", norm=LayerNormConfig(bias=False),
        placement="parallel", positions=SlidingPositions(interleaved=True, always=True),
        windows=all_but_every("sliding_window_pattern"), model=_cohere,
        written=lambda cfg: {"logit_scale": cfg.logit_factor()}, unused=COHERE_NOTES,
    ),
    Decoder(
        "cohere", "CohereForCausalLM", COHERE, {"layer_norm_eps": "rms_norm_eps"}, bias="attention_bias",
        norm=LayerNormConfig(bias=False), placement="parallel", positions=Positions(base=500000.0, interleaved=True),
        model=_cohere, written=lambda cfg: {"logit_scale": cfg.logit_factor()}, unused=COHERE_NOTES,
    ),
    Decoder(
        "glm", "GlmForCausalLM", GLM, qkv_bias="attention_bias", mlp_rows=FUSED_FEED_FORWARD,
        positions=Positions(interleaved=True, fraction=0.5),
    ),
    Decoder(
        "glm4", "Glm4ForCausalLM", GLM, tensors=GLM4_NORMS, qkv_bias="attention_bias", mlp_rows=FUSED_FEED_FORWARD,
        positions=Positions(interleaved=True, fraction=0.5), placement="sandwich",
    ),
    Decoder(
        "seed_oss", "SeedOssForCausalLM", sizes(155136, 4096, 27648, 64, 80, 8, 128, 524288, attention_bias=True),
        bias="attention_out_bias", qkv_bias="attention_bias", mlp_bias="mlp_bias", unused=("residual_dropout",),
    ),
    Decoder(
        "ernie4_5", "Ernie4_5ForCausalLM",
        sizes(103424, 1024, 3072, 18, 16, 2, 128, 131072, rms_norm_eps=1e-5, tie_word_embeddings=True),
        bias="use_bias", mlp_bias="use_bias", positions=Positions(base=500000.0, interleaved=True),
    ),
    Decoder(
        "arcee", "ArceeForCausalLM",
        sizes(32000, 2560, 18432, 32, 32, None, None, 4096, rms_norm_eps=1e-5, hidden_act="relu2"),
        bias="attention_bias", mlp_bias="mlp_bias", gate=False,
    ),
    Decoder(
        "nemotron", "NemotronForCausalLM",
        sizes(256000, 6144, 24576, 32, 48, None, None, 4096, rms_norm_eps=1e-5, hidden_act="relu2"),
        {"norm_eps": "rms_norm_eps"}, bias="attention_bias", mlp_bias="mlp_bias", gate=False,
        norm=LayerNormConfig(zero_centred=True), positions=Positions(fraction=0.5),
    ),
    Decoder(
        "starcoder2", "Starcoder2ForCausalLM",
        sizes(49152, 3072, 12288, 30, 24, 2, None, 4096, rms_norm_eps=1e-5, tie_word_embeddings=True, use_bias=True)
        | {"hidden_act": "gelu_pytorch_tanh"},
        {"norm_epsilon": "rms_norm_eps"}, TWO_MATRICES, bias="use_bias", mlp_bias="use_bias", gate=False,
        norm=LayerNormConfig(), windows=EVERYWHERE._replace(names=("sliding_window", "layer_types")),
        unused=("residual_dropout", "embedding_dropout", "use_sliding_window"),
    ),
    Decoder(
        "stablelm", "StableLmForCausalLM", sizes(50304, 2560, 6912, 32, 32, 32, None, 4096, rms_norm_eps=1e-5),
        {"layer_norm_eps": "rms_norm_eps"}, qkv_bias="use_qkv_bias", norm=LayerNormConfig(),
        positions=Positions(fraction=0.25), model=_stablelm,
        written=lambda cfg: {"use_parallel_residual": layers_of(cfg)[0].norm_placement == "parallel"},
    ),
    Decoder(
        "helium", "HeliumForCausalLM", sizes(48000, 2560, 7040, 24, 20, 20, 128, 4096, rms_norm_eps=1e-8),
        qkv_bias="attention_bias", mlp_bias="mlp_bias", positions=Positions(base=100000.0, interleaved=True),
    ),
    Decoder(
        "cwm", "CwmForCausalLM",
        sizes(128256, 6144, 21504, 64, 48, 8, 128, 131072, rms_norm_eps=1e-5, sliding_window=8192),
        positions=Positions(base=1e6, assumed=LLAMA3), windows=Windows(lambda _: lambda layer: layer % 4 > 0),
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
