"""OLMo 2: Llama's blocks with norms of the sub-layers' outputs, and of queries and keys over all heads."""

from megajax.checkpoint.weights.name_mapping import Row
from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER, gated, outer_rows
from megajax.interop.huggingface.family import Settings, norm
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    bias, epsilon = settings.take("attention_bias", False), settings.peek("rms_norm_eps")
    mixer = decoders.attention(settings, bias=bias, qk_norm=RMSNormConfig(epsilon=epsilon), qk_norm_over="heads")
    mlp = decoders.gated_mlp(settings)
    return decoders.decoder(settings, mixer, lambda _: mlp, norm_placement="output")


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table, which OLMo 3 and EXAONE 4 have too."""
    return [
        *outer_rows(cfg),
        *MIXER,
        *norm(f"{LAYER}.post_attention_layernorm", "stack.*.mixer_norm"),
        *norm(f"{LAYER}.post_feedforward_layernorm", "stack.*.mlp_norm"),
        *gated(f"{LAYER}.mlp", "stack.*.mlp"),
    ]


FAMILIES = [decoders.family("olmo2", "Olmo2ForCausalLM", read=_read, write=decoders.write, rows=rows)]
