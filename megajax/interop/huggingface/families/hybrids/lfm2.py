"""LFM2 (Liquid AI): gated short convolutions in most layers, attention in the others; with experts in LFM2-MoE.

The norm after the last layer is called embedding_norm.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import LAYER, gated
from megajax.interop.huggingface.family import Settings, attention, final_norm, layers_of, linear, norm, tokens
from megajax.interop.huggingface.rotary import FULL
from megajax.interop.weights.name_mapping import Row
from megajax.layers.linear.config import ShortConvConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import FeedForwardConfig, MoEConfig, RouterConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.models.decoder.config import DecoderConfig

COMMON: Mapping[str, Any] = {
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "vocab_size": 65536,
    "intermediate_size": 12288,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
LFM2 = COMMON | {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
LFM2_MOE = COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
}
CONV = "conv"
UNUSED = frozenset({
    # Duplicates of sizes, and settings that transformers does not read.
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "hidden_act", "num_heads",
    "output_router_logits", "router_aux_loss_coef", "use_pos_enc",
})  # fmt: skip


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(LFM2)
    mlp = GatedMLPConfig(ffn=_width(settings))
    return _decoder(settings, lambda _: mlp)


def _width(settings: Settings) -> int:
    """Width of the feed-forwards: intermediate_size, or two thirds of it, rounded up."""
    width = settings.take("block_ff_dim", settings.count("intermediate_size"))
    factor, multiple = settings.take("block_ffn_dim_multiplier", kind=float), settings.count("block_multiple_of")
    if not settings.take("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _read_moe(settings: Settings) -> DecoderConfig:
    settings.assume(LFM2_MOE)
    mlp = GatedMLPConfig(ffn=settings.count("intermediate_size"))
    biased, normalised = settings.take("use_expert_bias", True), settings.take("norm_topk_prob", True)
    moe = MoEConfig(
        experts=settings.count("num_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=replace(mlp, ffn=settings.count("moe_intermediate_size")),
        router=RouterConfig(
            score="sigmoid",
            normalise="chosen" if normalised else "all",
            scale=settings.need("routed_scaling_factor", float),
            balance_rate=0.001 if biased else None,
        ),
    )
    if moe.top_k == 1 and normalised:
        balanced_experts.refuse_single(settings)
    dense = settings.take("num_dense_layers", 0)
    return _decoder(settings, lambda layer: mlp if layer < dense else moe)


def _decoder(settings: Settings, mlp: Callable[[int], FeedForwardConfig]) -> DecoderConfig:
    if "tie_embedding" in settings.remaining:
        settings.remaining["tie_word_embeddings"] = settings.take("tie_embedding", True)
    layers, norm = settings.peek("num_hidden_layers"), RMSNormConfig(epsilon=settings.need("norm_eps"))
    with_attention = settings.take("full_attn_idxs", [*range(layers)])
    kinds = decoders.layer_types(settings, layers, CONV, lambda layer: layer not in with_attention)
    bias = settings.take("conv_bias", False)
    convolution = ShortConvConfig(
        channels=settings.count("hidden_size"), conv_kernel=settings.count("conv_L_cache"), conv_bias=bias, bias=bias
    )
    settings.remaining["hidden_size"] = convolution.channels
    mixer = decoders.attention(settings, base=1e6, qk_norm=norm)
    return decoders.decoder(settings, [convolution if kind == CONV else mixer for kind in kinds], mlp, norm=norm)


def _settings(cfg: DecoderConfig, ffn: int, moe: MoEConfig | None = None) -> dict[str, Any]:
    """The settings of both. ffn: width of layers without experts."""
    mixers = [block.mixer for block in layers_of(cfg)]
    convolution = next((mixer for mixer in mixers if isinstance(mixer, ShortConvConfig)), None)
    convolution = convolution or ShortConvConfig(channels=cfg.hidden)
    settings = {**decoders.write(cfg, moe=moe), "intermediate_size": ffn, "norm_eps": final_norm(cfg).epsilon}
    return {
        **{name: value for name, value in settings.items() if name not in ("attention_bias", "rms_norm_eps")},
        "conv_L_cache": convolution.conv_kernel,
        "conv_bias": convolution.bias,
        "layer_types": [CONV if isinstance(mixer, ShortConvConfig) else FULL for mixer in mixers],
    }


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    return {**_settings(cfg, layers_of(cfg)[0].mlp.ffn), "block_auto_adjust_ff_dim": False}


def _write_moe(cfg: DecoderConfig) -> dict[str, Any]:
    moe, dense, ffn = decoders.feed_forwards(cfg)
    return {
        **_settings(cfg, ffn, moe),
        "moe_intermediate_size": moe.expert.ffn,
        "num_experts": moe.experts,
        "num_dense_layers": len(dense),
        "routed_scaling_factor": moe.router.scale,
        "norm_topk_prob": moe.router.normalise == "chosen",
        "use_expert_bias": moe.router.balance_rate is not None,
    }


def _rows(cfg: DecoderConfig, *, experts: bool) -> list[Row]:
    tensor, path, feed, mlp = f"{LAYER}.conv", "stack.*.mixer", f"{LAYER}.feed_forward", "stack.*.mlp"
    heads = attention(f"{LAYER}.self_attn", path, ("q_proj", "k_proj", "v_proj", "out_proj"))
    factors, names = ("in_b", "in_c", "in_x"), ("w1", "w3", "w2")
    biased = experts and decoders.feed_forwards(cfg).moe.router.balance_rate is not None
    return [
        *tokens(cfg, "model.embed_tokens.weight", "lm_head.weight"),
        *norm("model.embedding_norm", "norm"),
        *norm(f"{LAYER}.operator_norm", "stack.*.mixer_norm"),
        *norm(f"{LAYER}.ffn_norm", "stack.*.mlp_norm"),
        *[replace(row, requires=f"{path}.query") for row in heads],
        *norm(f"{LAYER}.self_attn.q_layernorm", f"{path}.query_norm"),
        *norm(f"{LAYER}.self_attn.k_layernorm", f"{path}.key_norm"),
        Row(f"{tensor}.in_proj.weight", tuple(f"{path}.{name}" for name in factors), "o i -> i o"),
        Row(f"{tensor}.in_proj.bias", tuple(f"{path}.{name}_bias" for name in factors)),
        Row(f"{tensor}.conv.weight", f"{path}.conv.kernel", "i 1 k -> k i"),
        Row(f"{tensor}.conv.bias", f"{path}.conv.bias"),
        *[replace(row, requires=f"{path}.in_x") for row in linear(f"{tensor}.out_proj", f"{path}.output")],
        *gated(feed, mlp, names),
        *gated(f"{feed}.experts.{{expert}}", f"{mlp}.experts", names),
        Row(f"{feed}.gate.weight", f"{mlp}.router", "e d -> d e"),
        *[Row(f"{feed}.expert_bias", f"{mlp}.load.sum", index=(0,))] * biased,
    ]


FAMILIES = [
    decoders.family(name, architecture, read=read, write=write, rows=rows, unused=UNUSED)
    for name, architecture, read, write, rows in (
        ("lfm2", "Lfm2ForCausalLM", _read, _write, partial(_rows, experts=False)),
        ("lfm2_moe", "Lfm2MoeForCausalLM", _read_moe, _write_moe, partial(_rows, experts=True)),
    )
]
