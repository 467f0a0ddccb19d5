"""gpt-oss: sinks, biases everywhere, windows in every other layer, all experts of a layer in one tensor."""

from typing import Any

from megajax.checkpoint.huggingface import decoders
from megajax.checkpoint.huggingface.decoders import ATTENTION, LAYER, ends
from megajax.checkpoint.huggingface.family import Settings
from megajax.checkpoint.huggingface.rotary import rope, window_settings, windows
from megajax.checkpoint.weights.tensor_table import Row
from megajax.layers.config import BlockConfig, GatedMLPConfig, MoEConfig, RMSNormConfig
from megajax.models.config import DecoderConfig

DEFAULTS = {
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""rope_parameters, where config.json says nothing of them."""


def model(given: Settings) -> DecoderConfig:
    """The model of a config.json."""
    given.assume(DEFAULTS)
    if not given.left.get("rope_parameters") and not given.left.get("rope_scaling"):
        given.left["rope_parameters"] = YARN
    given.only("swiglu_alpha", 1.702)
    layers, length = given.layers(), given.need("max_position_embeddings")
    ffn, limit = given.need("intermediate_size"), given.need("swiglu_limit")
    moe = MoEConfig(
        experts=given.need("num_local_experts"),
        top_k=given.need("num_experts_per_tok"),
        expert=GatedMLPConfig(ffn=ffn, activation="quick_gelu", bias=True, clamp=limit, offset=1.0),
        router=decoders.router(given, bias=True),
    )
    bias = given.take("attention_bias", False)
    mixer = decoders.attention(given, bias=bias, sink="learned", rope=rope(given, length, base=150000.0))
    block = BlockConfig(mixer=mixer, mlp=moe, norm=RMSNormConfig(epsilon=given.need("rms_norm_eps")))
    sizes = windows(given, layers, length, lambda layer: layer % 2 == 0)
    return decoders.decoder(given, decoders.windowed(block, sizes), length)


def settings(cfg: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model."""
    mixers = [block.mixer for block in decoders.layers_of(cfg)]
    windows, (moe, _, _) = window_settings(mixers), decoders.mixture_of(cfg)
    scaling = mixers[0].rope.scaling
    return {
        **decoders.settings_of(cfg, "gpt_oss", "GptOssForCausalLM"),
        **decoders.attention_settings(mixers[0], cfg.hidden),
        # Without any, transformers would stretch.
        **({"rope_parameters": {"rope_type": "default"}} if scaling is None else {}),
        **decoders.router_settings(moe),
        "hidden_act": "silu",
        "intermediate_size": moe.expert.ffn,
        "num_local_experts": moe.experts,
        "swiglu_limit": moe.expert.clamp,
        "sliding_window": windows["sliding_window"],
        "layer_types": windows["layer_types"],
    }


def rows(cfg: DecoderConfig) -> list[Row]:
    """The table. Columns of gate and up alternate."""
    theirs, ours = f"{LAYER}.mlp", "stack.*.mlp"
    two = {"two": 2}
    matrices = (f"{ours}.experts.gate", f"{ours}.experts.up")
    biases = (f"{ours}.experts.gate_bias", f"{ours}.experts.up_bias")
    return [
        *ends(cfg),
        *ATTENTION,
        Row(f"{LAYER}.self_attn.sinks", "stack.*.mixer.core.sink"),
        Row(f"{theirs}.router.weight", f"{ours}.router", "e d -> d e"),
        Row(f"{theirs}.router.bias", f"{ours}.router_bias"),
        Row(
            f"{theirs}.experts.gate_up_proj",
            matrices,
            "e d f 1 -> e d f",
            cut="e d (f two) -> e d f two",
            axis=3,
            sizes=two,
        ),
        Row(
            f"{theirs}.experts.gate_up_proj_bias", biases, "e f 1 -> e f", cut="e (f two) -> e f two", axis=2, sizes=two
        ),
        Row(f"{theirs}.experts.down_proj", f"{ours}.experts.down"),
        Row(f"{theirs}.experts.down_proj_bias", f"{ours}.experts.down_bias"),
    ]


FAMILIES = [
    decoders.family(
        "gpt_oss",
        model=model,
        settings=settings,
        rows=rows,
        # The first has no effect there; the others repeat what others say.
        unused=frozenset({"hidden_act", "experts_per_token", "initial_context_length"}),
    )
]
