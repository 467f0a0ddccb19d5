"""Gemma (Gemma team 2024 and 2025): zero-centred norms, embeddings multiplied by sqrt(hidden).

Gemma 2 and 3 (text) have norms before and after sub-layers, a fixed factor on scores and windows. Gemma 2 has soft caps
and windows in every other layer; Gemma 3 has norms of queries and keys, windows in five of six layers, and rotary
positions of another base there.
"""

from typing import Any

from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.tables import Decoder, LayeredPositions, all_but_every, sizes
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

TANH = "gelu_pytorch_tanh"
GEMMA = sizes(256000, 3072, 24576, 28, 16, 16, 256, 8192, hidden_act=TANH, tie_word_embeddings=True)
GEMMA2 = sizes(256000, 2304, 9216, 26, 8, 4, 256, 8192, hidden_activation=TANH, tie_word_embeddings=True)
GEMMA2 |= {"query_pre_attn_scalar": 256, "sliding_window": 4096}
GEMMA3 = GEMMA2 | {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _legacy(settings: Settings) -> None:
    """gelu of the first files means the other."""
    if settings.remaining["hidden_act"] == "gelu":
        settings.remaining["hidden_act"] = TANH


def _scores(settings: Settings) -> dict[str, Any]:
    scale, cap = settings.count("query_pre_attn_scalar"), settings.take("attn_logit_softcapping", kind=float)
    return {"scale": scale**-0.5, "score_cap": cap}


def _uncapped(settings: Settings) -> dict[str, Any]:
    """transformers does not cap scores of Gemma 3, whatever attn_logit_softcapping says."""
    settings.only("attn_logit_softcapping", None)
    return _scores(settings)


def _scaled(settings: Settings) -> dict[str, Any]:
    hidden = settings.peek("hidden_size")
    return {"width_scaling": WidthScalingConfig(base_hidden=hidden, score_power=0.5, embedding=hidden**0.5)}


def _capped(settings: Settings) -> dict[str, Any]:
    return {**_scaled(settings), "logit_cap": settings.take("final_logit_softcapping", kind=float)}


def _written(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    return {
        "query_pre_attn_scalar": round((mixer.scale or mixer.size(cfg.hidden) ** -0.5) ** -2),
        "attn_logit_softcapping": mixer.score_cap,
        "final_logit_softcapping": cfg.logit_cap,
    }


COMMON: dict[str, Any] = {"norm": RMSNormConfig(zero_centred=True), "bias": "attention_bias"}
CAPPED: dict[str, Any] = {"model": _capped, "written": _written, "activation": "hidden_activation"}
CAPPED |= {"unused": ("hidden_act",)}
TABLES = [
    Decoder(
        "gemma", "GemmaForCausalLM", GEMMA, **COMMON, prepare=_legacy, model=_scaled, unused=("hidden_activation",)
    ),
    Decoder(
        "gemma2", "Gemma2ForCausalLM", GEMMA2, **COMMON, **CAPPED, placement="sandwich", windows=all_but_every(2),
        mixer=_scores,
    ),
    Decoder(
        "gemma3_text", "Gemma3ForCausalLM", GEMMA3, **COMMON, **CAPPED, placement="sandwich", qk_norm="head",
        mixer=_uncapped,
        windows=all_but_every("sliding_window_pattern"),
        positions=LayeredPositions(base=1e6, local=1e4, named=True),
    ),
    Decoder(
        "vaultgemma", "VaultGemmaForCausalLM", GEMMA2, **COMMON, **CAPPED, mixer=_scores,
        norms={"pre": {"input_layernorm": "mixer_norm", "pre_feedforward_layernorm": "mlp_norm"}},
        windows=all_but_every(2),
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
