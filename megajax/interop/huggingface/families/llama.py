"""Llama 2 and 3, Mistral, Qwen 2 and 3, Phi-3 and Mixtral: pre-norm blocks with rotary positions and gated layers.

Mixtral is Mistral with experts. Phi-3 has queries, keys and values in one tensor, and gate and up in another.
"""

from typing import Any

from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.tables import (
    EVERYWHERE,
    FROM_LAYER,
    FUSED_FEED_FORWARD,
    FUSED_MIXER,
    PLAIN,
    Decoder,
    Positions,
    sizes,
)
from megajax.layers.position.config import LongRopeScalingConfig
from megajax.models.decoder.config import DecoderConfig

QWEN = sizes(151936, 4096, 22016, 32, 32, 32, None, 32768, use_sliding_window=False, sliding_window=4096)
QWEN |= {"max_window_layers": 28}
MISTRAL = sizes(32000, 4096, 14336, 32, 32, 8, None, 131072)
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
EXPERTS = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of tensors of experts."""


def longrope(settings: Settings) -> None:
    """The original length stands beside the factors."""
    original = settings.take("original_max_position_embeddings", kind=int)
    for name in ("rope_scaling", "rope_parameters"):
        positions = settings.remaining.get(name)
        if original is not None and isinstance(positions, dict) and "long_factor" in positions:
            settings.remaining[name] = {"original_max_position_embeddings": original, **positions}


def _original_length(cfg: DecoderConfig) -> dict[str, Any]:
    scaling = layers_of(cfg)[0].mixer.rope.scaling
    return {"original_max_position_embeddings": scaling.original} if isinstance(scaling, LongRopeScalingConfig) else {}


TABLES = {
    # transformers' class of Llama has no windows, whatever config.json says of them.
    "llama": Decoder(
        "llama", "LlamaForCausalLM", sizes(32000, 4096, 11008, 32, 32, None, None, 2048), bias="attention_bias",
        mlp_bias="mlp_bias", unused=WINDOWS,
    ),
    "mistral": Decoder("mistral", "MistralForCausalLM", MISTRAL | {"sliding_window": 4096}, windows=EVERYWHERE),
    "ministral": Decoder(
        "ministral", "MinistralForCausalLM", MISTRAL | {"sliding_window": 4096},
        windows=EVERYWHERE._replace(names=("sliding_window", "layer_types")),
    ),
    "qwen2": Decoder("qwen2", "Qwen2ForCausalLM", QWEN, qkv_bias=True, windows=FROM_LAYER._replace(names=WINDOWS)),
    "qwen3": Decoder(
        "qwen3", "Qwen3ForCausalLM", QWEN | {"head_dim": 128}, bias="attention_bias", qk_norm="head",
        windows=FROM_LAYER._replace(names=WINDOWS),
    ),
}  # fmt: skip
"""Those that LLaVA may have."""
MORE = [
    Decoder(
        "mixtral", "MixtralForCausalLM", MISTRAL | {"rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2},
        {"num_local_experts": "num_experts"}, EXPERTS, positions=Positions(base=1e6), windows=EVERYWHERE,
        experts=PLAIN, unused=("router_jitter_noise",),
    ),
    Decoder(
        "phi3", "Phi3ForCausalLM", sizes(32064, 3072, 8192, 32, 32, None, None, 4096, rms_norm_eps=1e-5),
        positions=Positions(fraction=1.0), windows=EVERYWHERE, prepare=longrope, written=_original_length,
        mixer_rows=FUSED_MIXER, mlp_rows=FUSED_FEED_FORWARD,
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in (*TABLES.values(), *MORE)]
