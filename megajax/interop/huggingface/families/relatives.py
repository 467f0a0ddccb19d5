"""Decoders without experts that differ from Llama in biases, norms, positions or the feed-forward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.rotary import rope_settings
from megajax.interop.huggingface.tables import (
    EVERYWHERE,
    FEED_FORWARD,
    FUSED_FEED_FORWARD,
    OUTPUT,
    Decoder,
    Experts,
    FeedForwardOf,
    LayeredPositions,
    LayerPositions,
    Positions,
    SlidingPositions,
    Windows,
    all_but_every,
    fused,
    one_group,
    sizes,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mlp.config import XieluMLPConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.position.config import TemperatureConfig, YarnScalingConfig
from megajax.models.decoder.config import DecoderConfig, WidthScalingConfig

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
APERTUS = LLAMA3 | {"rope_theta": 12e6, "factor": 8.0}
MINISTRAL3 = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
MINISTRAL3 |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
XIELU = [Row(f"{LAYER}.mlp.act_fn.alpha_{name[0]}", f"stack.*.mlp.{name}") for name in ("positive", "negative")]
XIELU_FIXED = ("model.layers.*.mlp.act_fn.beta", "model.layers.*.mlp.act_fn.eps")
"""Constants that transformers stores: 0.5 and -1e-6."""
GLM = sizes(151552, 4096, 13696, 40, 32, 2, 128, 131072, rms_norm_eps=1.5625e-7, attention_bias=True)
OLMO2 = sizes(50304, 4096, 11008, 32, 32, None, None, 2048, rms_norm_eps=1e-5)
COHERE = sizes(256000, 8192, 22528, 40, 64, None, None, 8192, rms_norm_eps=1e-5, tie_word_embeddings=True)
COHERE |= {"logit_scale": 0.0625}
COHERE_NOTES = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block",
)  # fmt: skip
"""Notes on the architecture that transformers does not read."""
TWO_MATRICES = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
GLM4_NORMS = {
    "input_layernorm": "mixer_norm",
    "post_self_attn_layernorm": "mixer_output_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_output_norm",
}


HUNYUAN = sizes(290943, 4096, 11008, 32, 32, None, None, 2048, rms_norm_eps=1e-5)
HUNYUAN_NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
HUNYUAN_UNUSED = (
    "attention_head_dim", "cla_share_factor", "use_cla", "norm_type", "use_rotary_pos_emb", "add_classification_head",
    "class_num", "pool_type", "dense_list", "use_qk_norm",
)  # fmt: skip
"""Settings of published files that transformers does not read."""
BY_HEAD = {
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
OF_NEOX = "gpt_neox.layers.{layer}.attention.query_key_value"
OF_PERSIMMON = "model.layers.{layer}.self_attn.query_key_value"
LAYER_NORM = {"layer_norm_eps": "rms_norm_eps"}


def fixed_alpha(settings: Settings) -> None:
    """HunYuan's alpha: a larger base of the rotary positions, alpha ** (size / (size - 2)) times."""
    size = decoders.head_size(settings)
    for name in ("rope_scaling", "rope_parameters"):
        values = settings.remaining.get(name)
        if isinstance(values, dict) and isinstance(values.get("alpha"), int | float) and size > 2:
            base = values.get("rope_theta") or settings.remaining.get("rope_theta") or 10000.0
            settings.remaining[name] = {"rope_theta": base * values["alpha"] ** (size / (size - 2))}


def _olmo(settings: Settings) -> None:
    """The epsilon is none of the settings."""
    settings.remaining["rms_norm_eps"] = 1e-5


def _head_norms(settings: Settings) -> dict[str, Any]:
    normalised, epsilon = settings.take("qk_layernorm", False), settings.peek("rms_norm_eps")
    return {"qk_norm": LayerNormConfig(epsilon=epsilon)} if normalised else {}


def _neox(settings: Settings) -> dict[str, Any]:
    return {"norm_placement": "parallel_norms" if settings.take("use_parallel_residual", True) else "pre"}


def _stablelm(settings: Settings) -> dict[str, Any]:
    settings.only("qk_layernorm", False)
    return {"norm_placement": "parallel"} if settings.take("use_parallel_residual", False) else {}


def _cohere(settings: Settings) -> dict[str, Any]:
    settings.only("use_qk_norm", False)
    hidden, scale = settings.peek("hidden_size"), settings.need("logit_scale", float)
    return {"width_scaling": WidthScalingConfig(base_hidden=hidden, score_power=0.5, output=scale)}


def _xielu(settings: Settings) -> None:
    """The layers below have the function: the tables know those without weights."""
    settings.only("hidden_act", "xielu")


def _read_xielu(settings: Settings, mlp: Any) -> FeedForwardOf:
    del settings
    layer = XieluMLPConfig(ffn=mlp.ffn, bias=mlp.bias)
    return lambda _: layer


def _scaled(settings: Settings) -> None:
    """The factor on queries stands among the rotary positions."""
    if not settings.remaining.get("rope_parameters") and not settings.remaining.get("rope_scaling"):
        settings.remaining["rope_parameters"] = MINISTRAL3
    for name in ("rope_scaling", "rope_parameters"):
        positions = settings.remaining.get(name)
        if isinstance(positions, dict):
            positions = dict(positions)
            positions.pop("max_position_embeddings", None)
            settings.remaining["llama_4_scaling_beta"] = positions.pop("llama_4_scaling_beta", None)
            settings.remaining[name] = positions


def _tempered(settings: Settings, attention: Sequence[Any]) -> Sequence[Any]:
    scale, scaling = settings.take("llama_4_scaling_beta", kind=float), attention[0].rope.scaling
    if not scale:
        return attention
    if not isinstance(scaling, YarnScalingConfig):
        settings.refuse("llama_4_scaling_beta", scale, "needs the original length of YaRN")
        return attention
    temperature = TemperatureConfig(scale=scale, length=scaling.original, first=0)
    return [replace(mixer, temperature=temperature) for mixer in attention]


def _write_tempered(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    scaling = rope_settings(mixer.rope)["rope_scaling"]
    return {"rope_scaling": scaling and {**scaling, "llama_4_scaling_beta": mixer.temperature.scale}}


TABLES = [
    Decoder(
        "olmo2", "Olmo2ForCausalLM", OLMO2, bias="attention_bias", placement="output", qk_norm="heads",
        norm=RMSNormConfig(),
    ),
    Decoder(
        "olmo3", "Olmo3ForCausalLM", OLMO2 | {"sliding_window": 4096}, bias="attention_bias", placement="output",
        # transformers ignores rope_theta in sliding layers, unless rope_parameters has it for them.
        qk_norm="heads", positions=LayeredPositions(base=500000.0, local=500000.0), windows=all_but_every(4),
    ),
    Decoder(
        "exaone4", "Exaone4ForCausalLM",
        sizes(102400, 4096, 16384, 32, 32, 32, None, 2048, rms_norm_eps=1e-5, sliding_window=4096)
        | {"sliding_window_pattern": 4},
        placement="output", qk_norm="head", positions=SlidingPositions(),
        windows=all_but_every("sliding_window_pattern"),
    ),
    Decoder(
        "smollm3", "SmolLM3ForCausalLM",
        sizes(128256, 2048, 11008, 36, 16, 4, None, 32768, tie_word_embeddings=True, no_rope_layer_interval=4)
        | {"use_sliding_window": False},
        bias="attention_bias", mlp_bias="mlp_bias", positions=LayerPositions(base=2e6),
        windows=Windows(lambda _: lambda _: False, ("sliding_window", "use_sliding_window", "layer_types")),
    ),
    Decoder(
        "cohere2", "Cohere2ForCausalLM", COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        {"layer_norm_eps": "rms_norm_eps"}, bias="attention_bias", norm=LayerNormConfig(bias=False),
        placement="parallel", positions=SlidingPositions(interleaved=True, always=True),
        windows=all_but_every("sliding_window_pattern"), model=_cohere,
        written=lambda cfg: {"logit_scale": cfg.logit_factor()}, unused=COHERE_NOTES,
    ),
    Decoder(
        "cohere", "CohereForCausalLM", COHERE, {"layer_norm_eps": "rms_norm_eps"}, bias="attention_bias",
        norm=LayerNormConfig(bias=False), placement="parallel", positions=Positions(base=500000.0, interleaved=True),
        model=_cohere, written=lambda cfg: {"logit_scale": cfg.logit_factor()}, unused=COHERE_NOTES,
    ),
    Decoder(
        "glm", "GlmForCausalLM", GLM, qkv_bias="attention_bias", mlp_rows=FUSED_FEED_FORWARD,
        positions=Positions(interleaved=True, fraction=0.5),
    ),
    Decoder(
        "glm4", "Glm4ForCausalLM", GLM, norms={"sandwich": GLM4_NORMS}, qkv_bias="attention_bias",
        mlp_rows=FUSED_FEED_FORWARD, positions=Positions(interleaved=True, fraction=0.5), placement="sandwich",
    ),
    Decoder(
        "seed_oss", "SeedOssForCausalLM", sizes(155136, 4096, 27648, 64, 80, 8, 128, 524288, attention_bias=True),
        bias="attention_out_bias", qkv_bias="attention_bias", mlp_bias="mlp_bias", unused=("residual_dropout",),
    ),
    Decoder(
        "ernie4_5", "Ernie4_5ForCausalLM",
        sizes(103424, 1024, 3072, 18, 16, 2, 128, 131072, rms_norm_eps=1e-5, tie_word_embeddings=True),
        bias="use_bias", mlp_bias="use_bias", positions=Positions(base=500000.0, interleaved=True),
    ),
    Decoder(
        "arcee", "ArceeForCausalLM",
        sizes(32000, 2560, 18432, 32, 32, None, None, 4096, rms_norm_eps=1e-5, hidden_act="relu2"),
        bias="attention_bias", mlp_bias="mlp_bias", gate=False,
    ),
    Decoder(
        "nemotron", "NemotronForCausalLM",
        sizes(256000, 6144, 24576, 32, 48, None, None, 4096, rms_norm_eps=1e-5, hidden_act="relu2"),
        {"norm_eps": "rms_norm_eps"}, bias="attention_bias", mlp_bias="mlp_bias", gate=False,
        norm=LayerNormConfig(zero_centred=True), positions=Positions(fraction=0.5),
    ),
    Decoder(
        "starcoder2", "Starcoder2ForCausalLM",
        sizes(49152, 3072, 12288, 30, 24, 2, None, 4096, rms_norm_eps=1e-5, tie_word_embeddings=True, use_bias=True)
        | {"hidden_act": "gelu_pytorch_tanh"},
        {"norm_epsilon": "rms_norm_eps"}, TWO_MATRICES, bias="use_bias", mlp_bias="use_bias", gate=False,
        norm=LayerNormConfig(), windows=EVERYWHERE._replace(names=("sliding_window", "layer_types")),
        unused=("residual_dropout", "embedding_dropout", "use_sliding_window"),
    ),
    Decoder(
        "stablelm", "StableLmForCausalLM", sizes(50304, 2560, 6912, 32, 32, 32, None, 4096, rms_norm_eps=1e-5),
        {"layer_norm_eps": "rms_norm_eps"}, qkv_bias="use_qkv_bias", norm=LayerNormConfig(),
        positions=Positions(fraction=0.25), model=_stablelm,
        written=lambda cfg: {"use_parallel_residual": layers_of(cfg)[0].norm_placement == "parallel"},
    ),
    Decoder(
        "helium", "HeliumForCausalLM", sizes(48000, 2560, 7040, 24, 20, 20, 128, 4096, rms_norm_eps=1e-8),
        qkv_bias="attention_bias", mlp_bias="mlp_bias", positions=Positions(base=100000.0, interleaved=True),
    ),
    Decoder(
        "cwm", "CwmForCausalLM",
        sizes(128256, 6144, 21504, 64, 48, 8, 128, 131072, rms_norm_eps=1e-5, sliding_window=8192),
        positions=Positions(base=1e6, assumed=LLAMA3), windows=Windows(lambda _: lambda layer: layer % 4 > 0),
    ),
    Decoder(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", HUNYUAN, tensors=HUNYUAN_NORMS, bias="attention_bias",
        qk_norm="head", mixer=lambda _: {"qk_norm_after_rope": True}, prepare=fixed_alpha, unused=HUNYUAN_UNUSED,
    ),
    Decoder(
        "olmo", "OlmoForCausalLM", sizes(50304, 4096, 11008, 32, 32, None, None, 2048), bias="attention_bias",
        norm=LayerNormConfig(gain=False, bias=False), prepare=_olmo,
        mixer=lambda settings: {"qkv_clip": settings.take("clip_qkv", kind=float)},
        written=lambda cfg: {"clip_qkv": layers_of(cfg)[0].mixer.qkv_clip},
    ),
    Decoder(
        "gpt_neox", "GPTNeoXForCausalLM", sizes(50432, 6144, 24576, 44, 64, None, None, 2048, rms_norm_eps=1e-5)
        | {"attention_bias": True, "hidden_act": "gelu"},
        LAYER_NORM | {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        {"model.embed_tokens": "gpt_neox.embed_in", "lm_head": "embed_out", "model.norm": "gpt_neox.final_layer_norm"}
        | {"model.layers": "gpt_neox.layers"} | BY_HEAD,
        bias="attention_bias", mlp_bias=True, gate=False, norm=LayerNormConfig(), positions=Positions(fraction=0.25),
        prepare=one_group, model=_neox, mixer_rows=OUTPUT, finish=fused(OF_NEOX, lambda mixer: mixer.heads),
        unused=("classifier_dropout",),
        written=lambda cfg: {"use_parallel_residual": layers_of(cfg)[0].norm_placement == "parallel_norms"},
        parts={"ignored": ("gpt_neox.layers.*.attention.*bias", "gpt_neox.layers.*.attention.rotary_emb.inv_freq")},
    ),
    Decoder(
        "persimmon", "PersimmonForCausalLM", sizes(262144, 4096, 16384, 36, 64, None, None, 16384, rms_norm_eps=1e-5)
        | {"hidden_act": "relu2", "qk_layernorm": True},
        LAYER_NORM, BY_HEAD | {"self_attn.o_proj": "self_attn.dense", "model.norm": "model.final_layernorm"}
        | {"q_norm": "q_layernorm", "k_norm": "k_layernorm"},
        bias=True, mlp_bias=True, gate=False, norm=LayerNormConfig(), positions=Positions(base=25000.0, fraction=0.5),
        prepare=one_group, mixer=_head_norms, mixer_rows=OUTPUT, finish=fused(OF_PERSIMMON, lambda mixer: mixer.heads),
        written=lambda cfg: {"qk_layernorm": layers_of(cfg)[0].mixer.qk_norm is not None},
    ),
    Decoder(
        "phi", "PhiForCausalLM", sizes(51200, 2048, 8192, 24, 32, None, None, 2048, rms_norm_eps=1e-5)
        | {"hidden_act": "gelu_new"},
        LAYER_NORM, {"self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
        | {"model.norm": "model.final_layernorm", "q_norm": "q_layernorm", "k_norm": "k_layernorm"},
        bias=True, mlp_bias=True, gate=False, norm=LayerNormConfig(), placement="parallel", mixer=_head_norms,
        positions=Positions(fraction=0.5), model=lambda _: {"head_bias": True},
        written=lambda cfg: {"qk_layernorm": layers_of(cfg)[0].mixer.qk_norm is not None},
    ),
    Decoder(
        "apertus", "ApertusForCausalLM", sizes(131072, 4096, 14336, 32, 32, None, None, 65536, rms_norm_eps=1e-5),
        {}, {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
        bias="attention_bias", qk_norm="head", gate=False, positions=Positions(base=12e6, assumed=APERTUS),
        prepare=_xielu, mlp_rows=[*FEED_FORWARD, *XIELU],
        experts=Experts(_read_xielu, lambda cfg: {"hidden_act": "xielu"}),
        parts={"ignored": XIELU_FIXED, "extra": XIELU_FIXED},
    ),
    Decoder(
        "ministral3", "Ministral3ForCausalLM", sizes(131072, 4096, 14336, 34, 32, 8, 128, 262144, rms_norm_eps=1e-5),
        positions=Positions(base=1e6), windows=EVERYWHERE, prepare=_scaled, mixers=_tempered,
        written=_write_tempered,
    ),
    Decoder(
        "jais2", "Jais2ForCausalLM",
        sizes(150272, 3328, 26624, 32, 26, None, None, 8192, rms_norm_eps=1e-5, hidden_act="relu2")
        | {"attention_bias": True, "mlp_bias": True},
        {"layer_norm_eps": "rms_norm_eps"}, bias="attention_bias", mlp_bias="mlp_bias", gate=False,
        norm=LayerNormConfig(),
    ),
    Decoder(
        "internlm3", "LlamaForCausalLM", sizes(128512, 4096, 10240, 48, 32, 2, 128, 32768, rms_norm_eps=1e-5),
        {"qkv_bias": "attention_bias", "bias": "mlp_bias"}, bias="attention_bias", mlp_bias="mlp_bias",
    ),
    Decoder(
        "iquestcoder", "LlamaForCausalLM", sizes(76800, 5120, 27648, 80, 40, 8, 128, 131072, rms_norm_eps=1e-5),
        bias="attention_bias", mlp_bias="mlp_bias",
    ),
    Decoder(
        "exaone", "LlamaForCausalLM", sizes(102400, 4096, 14336, 32, 32, 8, None, 4096, rms_norm_eps=1e-5),
        {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"},
        {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h"}
        | {"self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1"}
        | {"post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj"},
        bias="attention_bias", mlp_bias="mlp_bias", positions=Positions(base=500000.0),
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
