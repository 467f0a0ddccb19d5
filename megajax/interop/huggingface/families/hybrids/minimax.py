"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others, experts in all.

A sub-layer's output is added to its normalised input, each with a fixed factor.
"""

from dataclasses import replace
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import ATTENTION, LAYER, experts, outer_rows
from megajax.interop.huggingface.family import Settings, activation_name, layers_of
from megajax.interop.huggingface.rotary import FULL, LINEAR
from megajax.interop.huggingface.tables import sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.linear.config import PROJECTIONS, LightningAttentionConfig
from megajax.layers.moe.config import MoEConfig
from megajax.layers.norm.config import RMSNormConfig, SumWeightsConfig
from megajax.layers.stack.config import stack_of
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = sizes(32000, 4096, 14336, 32, 32, 8, None, 131072, rms_norm_eps=1e-5, num_local_experts=8)
DEFAULTS |= {"num_experts_per_tok": 2, "block_size": 256}
FACTORS = {
    FULL: {"full_attn_alpha_factor": "mixer_stream", "full_attn_beta_factor": "mixer_output"},
    LINEAR: {"linear_attn_alpha_factor": "mixer_stream", "linear_attn_beta_factor": "mixer_output"},
}
MLP_FACTORS = {"mlp_alpha_factor": "mlp_stream", "mlp_beta_factor": "mlp_output"}
"""Setting -> field of SumWeightsConfig, by the kind of a layer, and in all layers."""


def _read(settings: Settings) -> DecoderConfig:
    settings.assume(DEFAULTS)
    decoders.rotary_dim(settings)
    moe = MoEConfig(
        experts=settings.count("num_local_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=decoders.gated_mlp(settings),
        router=decoders.router(settings),
    )
    layers, length = settings.layers(), settings.peek("max_position_embeddings")
    kinds = decoders.layer_types(settings, layers, LINEAR, lambda layer: layer % 2 > 0)
    window, softmax = settings.take("sliding_window", kind=int), decoders.attention(settings, base=1e6, partial=True)
    softmax = replace(softmax, window=window - 1 if window and window <= length else None)
    lightning = LightningAttentionConfig(
        heads=softmax.heads,
        head_dim=softmax.size(settings.peek("hidden_size")),
        layers=layers,
        activation=moe.expert.activation,
        chunk=settings.count("block_size"),
    )
    norm = RMSNormConfig(epsilon=settings.need("rms_norm_eps"))
    factors = {name: settings.take(name, 1.0) for group in (*FACTORS.values(), MLP_FACTORS) for name in group}
    blocks: dict[str, BlockConfig] = {}
    for kind, names in FACTORS.items():
        weights = SumWeightsConfig(**{field: factors[name] for name, field in (names | MLP_FACTORS).items()})
        mixer = softmax if kind == FULL else lightning
        blocks[kind] = BlockConfig(mixer=mixer, mlp=moe, norm=norm, norm_placement="input", sum_weights=weights)
    return DecoderConfig(
        hidden=settings.need("hidden_size"),
        vocabulary_size=settings.need("vocab_size"),
        sequence_length=settings.need("max_position_embeddings"),
        stack=stack_of([blocks.get(kind, blocks[FULL]) for kind in kinds]),
        norm=norm,
        tied=settings.take("tie_word_embeddings", False),
    )


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    blocks, moe = layers_of(cfg), decoders.feed_forwards(cfg).moe
    settings = decoders.write(cfg, "sliding_window", moe=moe)
    linear = [block for block in blocks if isinstance(block.mixer, LightningAttentionConfig)]
    full = [block for block in blocks if isinstance(block.mixer, AttentionConfig)]
    factors = {}
    for kind, some in ((FULL, full), (LINEAR, linear)):
        for name, field in ((FACTORS[kind] | MLP_FACTORS) if some else {}).items():
            factors[name] = getattr(some[0].sum_weights or SumWeightsConfig(), field)
    return {
        **{name: value for name, value in settings.items() if name != "attention_bias"},
        "hidden_act": activation_name(moe.expert.activation),
        "num_local_experts": moe.experts,
        "layer_types": [LINEAR if isinstance(block.mixer, LightningAttentionConfig) else FULL for block in blocks],
        **({"block_size": linear[0].mixer.chunk} if linear else {}),
        **factors,
    }


def _rows(cfg: DecoderConfig) -> list[Row]:
    mixers = [block.mixer for block in layers_of(cfg)]
    heads = {"n": next((mixer.heads for mixer in mixers if isinstance(mixer, LightningAttentionConfig)), 1)}
    tensor, path = f"{LAYER}.self_attn", "stack.*.mixer"
    inputs = tuple(f"{path}.{name}" for name in PROJECTIONS[:3])
    fused = Row(f"{tensor}.qkv_proj.weight", inputs, "n h d -> d n h", split="(n h) d -> n h d", axis=1, sizes=heads)
    return [
        *outer_rows(cfg),
        *ATTENTION,
        fused,
        Row(f"{tensor}.output_gate.weight", f"{path}.in_gate", "(n h) d -> d n h"),
        Row(f"{tensor}.norm.weight", f"{path}.norm.gain"),
        Row(f"{tensor}.out_proj.weight", f"{path}.out", "d (n h) -> n h d"),
        *experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2")),
    ]


FAMILIES = [
    decoders.family(
        "minimax", "MiniMaxForCausalLM", read=_read, write=_write, rows=_rows,
        unused=frozenset({"router_jitter_noise"}),
        # They follow from the number of a layer.
        ignored=("model.layers.*.self_attn.slope_rate", "model.layers.*.self_attn.*_decay"),
    )
]  # fmt: skip
