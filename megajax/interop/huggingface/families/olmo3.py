"""OLMo 3: OLMo 2 with sliding windows in three of four layers; only full layers have scaled rotary positions."""

from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.families import olmo2
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.rotary import layered_rope, layered_rope_settings, ropes_of
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = olmo2.DEFAULTS | {"sliding_window": 4096}
BASE = 500000.0
"""Default of rope_theta. transformers ignores rope_theta in sliding layers, unless rope_parameters has it for them."""


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    full, local = layered_rope(settings, settings.peek("max_position_embeddings"), base=BASE, local_base=BASE)
    heads = settings.count("num_attention_heads")
    mixer = AttentionConfig(
        heads=heads,
        kv_heads=settings.take("num_key_value_heads", heads),
        head_dim=settings.take("head_dim", settings.peek("hidden_size") // heads),
        bias=settings.take("attention_bias", False),
        qk_norm=RMSNormConfig(epsilon=settings.peek("rms_norm_eps")),
        qk_norm_over="heads",
    )
    mlp = decoders.gated_mlp(settings)
    return decoders.decoder(
        settings,
        mixer,
        lambda _: mlp,
        slides=lambda layer: (layer + 1) % 4 != 0,
        rope_of=lambda _, slides: local if slides else full,
        norm_placement="output",
    )


def _write(cfg: Any) -> dict[str, Any]:
    plain = RopeConfig(base=BASE)
    return {
        **decoders.write(cfg, "sliding_window", "layer_types"),
        **layered_rope_settings(*ropes_of(cfg, full=plain, local=plain), plain),
    }


FAMILIES = [decoders.family("olmo3", "Olmo3ForCausalLM", read=_read, write=_write, rows=olmo2.rows)]
