"""Gemma: Llama's blocks with zero-centred norms, GeGLU, embeddings times sqrt(hidden size), and a tied head."""

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import Settings
from megajax.models.configs import DecoderConfig
from megajax.models.decoder.config import WidthScalingConfig

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


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    if settings.remaining["hidden_act"] == "gelu":  # of the first files, which mean the other
        settings.remaining["hidden_act"] = "gelu_pytorch_tanh"
    mixer = decoders.attention(settings, bias=settings.take("attention_bias", False))
    mlp, hidden = decoders.gated_mlp(settings), settings.peek("hidden_size")
    scaling = WidthScalingConfig(base_hidden=hidden, score_power=0.5, embedding=hidden**0.5)
    return decoders.decoder(settings, mixer, lambda _: mlp, zero_centred=True, width_scaling=scaling)


FAMILIES = [
    decoders.family(
        "gemma",
        "GemmaForCausalLM",
        read=_read,
        write=decoders.write,
        rows=llama.rows,
        unused=frozenset({"hidden_activation"}),
    )
]
