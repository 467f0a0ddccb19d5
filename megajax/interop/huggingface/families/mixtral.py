"""Mixtral: Mistral's blocks with experts."""

from typing import Any

from megajax.checkpoint.weights.tensor_table import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, experts, outer_rows
from megajax.interop.huggingface.family import Settings
from megajax.layers.configs import MoEConfig
from megajax.models.configs import DecoderConfig

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


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    moe = MoEConfig(
        experts=settings.need("num_local_experts"),
        top_k=settings.need("num_experts_per_tok"),
        expert=decoders.gated_mlp(settings),
        router=decoders.router(settings),
    )
    return decoders.decoder(settings, decoders.attention(settings, base=1e6), lambda _: moe, slides=lambda _: True)


def _write(cfg: Any) -> dict[str, Any]:
    moe = decoders.feed_forwards(cfg).moe
    return {**decoders.write(cfg, "sliding_window", moe=moe), "num_local_experts": moe.experts}


def _rows(cfg: DecoderConfig) -> list[Row]:
    return [*outer_rows(cfg), *ATTENTION, *experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))]


FAMILIES = [
    decoders.family(
        "mixtral",
        "MixtralForCausalLM",
        read=_read,
        write=_write,
        rows=_rows,
        unused=frozenset({"router_jitter_noise"}),
    )
]
