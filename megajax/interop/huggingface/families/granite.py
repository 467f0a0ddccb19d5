"""Granite: Llama with fixed factors on embeddings, sub-layers, scores and logits."""

from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.layers.norm.config import FixedScaleConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

DEFAULTS = {**llama.COMMON, "intermediate_size": 11008, "max_position_embeddings": 2048}


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    mixer = decoders.attention(
        settings,
        bias=settings.take("attention_bias", False),
        scale=settings.take("attention_multiplier", 1.0),
    )
    mlp = decoders.gated_mlp(settings, bias=settings.take("mlp_bias", False))
    divisor = settings.take("logits_scaling", 1.0)
    if divisor <= 0:
        settings.refuse("logits_scaling", divisor, "must be above 0")
        divisor = 1.0
    scaling = WidthScalingConfig(
        base_hidden=settings.peek("hidden_size"),
        score_power=0.5,
        embedding=settings.take("embedding_multiplier", 1.0),
        output=1 / divisor,
    )
    scale = FixedScaleConfig(factor=settings.take("residual_multiplier", 1.0))
    return decoders.decoder(settings, mixer, lambda _: mlp, layer_scale=scale, width_scaling=scaling)


def _write(cfg: Any) -> dict[str, Any]:
    block, scaling = layers_of(cfg)[0], cfg.width_scaling
    return {
        **decoders.write(cfg),
        "mlp_bias": block.mlp.bias,
        "attention_multiplier": block.mixer.scale,
        "residual_multiplier": block.layer_scale.factor,
        "embedding_multiplier": scaling.embedding,
        "logits_scaling": round(1 / cfg.logit_factor(), 12),
    }


FAMILIES = [decoders.family("granite", "GraniteForCausalLM", read=_read, write=_write, rows=llama.rows)]
