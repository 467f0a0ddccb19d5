"""Decoders from before Llama: LayerNorm, MLPs without a gate, ALiBi or learned positions, fused matrices.

transformers fixes some settings, such as the width of BLOOM's MLPs: other values are refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import MIXER
from megajax.interop.huggingface.family import Settings, layers_of, norm
from megajax.interop.huggingface.tables import (
    FUSED_MIXER,
    OUTPUT,
    PLACES,
    QKV,
    Decoder,
    NoPositions,
    Positions,
    RopeOf,
    fused,
    one_group,
    sizes,
)
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.norm.config import LayerNormConfig
from megajax.layers.position.config import AlibiConfig
from megajax.models.decoder.config import DecoderConfig

NORM = LayerNormConfig()
GPT2 = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
GPT2 |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
GPT2 |= {"activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"}
"""Names of settings since GPT-2."""
GPT2_TENSORS = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
}
GPT2_TENSORS |= {"input_layernorm": "ln_1", "self_attn": "attn"}
GPTJ_TENSORS = GPT2_TENSORS | {"self_attn.o_proj": "attn.out_proj"}
GPTJ_TENSORS |= {"mlp.up_proj": "mlp.fc_in", "mlp.down_proj": "mlp.fc_out"}
SUMMARY = ("summary_*", "scale_attn_weights", "gradient_checkpointing", "rotary", "partial_rotary_factor", "n_ctx")
BLOOM_UNUSED = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
BLOOM_UNUSED += ("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id")
FALCON_PLACES = {**PLACES, "parallel_norms": {"ln_attn": "mixer_norm", "ln_mlp": "mlp_norm"}}
OF_BLOOM = {"self_attn.o_proj": "self_attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h"}
OF_BLOOM |= {"mlp.down_proj": "mlp.dense_4h_to_h", "model.embed_tokens": "transformer.word_embeddings"}
OF_BLOOM |= {"model.layers": "transformer.h", "model.norm": "transformer.ln_f"}
IN_FALCON = "transformer.h.{layer}.self_attention.query_key_value"
POSITIONS = "model.embed_positions.weight"


def _wide(settings: Settings) -> None:
    """MLPs are four times as wide as the model, unless a setting says otherwise."""
    one_group(settings)
    if settings.remaining.get("intermediate_size") is None:
        settings.remaining["intermediate_size"] = 4 * settings.peek("hidden_size")


def _fixed(settings: Settings, activation: str) -> None:
    """The activation function and the width of MLPs, which are no settings."""
    _wide(settings)
    settings.remaining["hidden_act"] = settings.only("hidden_act", activation)
    settings.remaining["intermediate_size"] = settings.only("intermediate_size", 4 * settings.peek("hidden_size"))


def _old_width(settings: Settings) -> None:
    """The oldest name of the hidden size."""
    if settings.remaining.get("n_embed") is not None:
        settings.remaining["hidden_size"] = settings.remaining.pop("n_embed")


def _bloom(settings: Settings) -> None:
    _old_width(settings)
    _fixed(settings, "gelu_new")


def _bloom_model(settings: Settings) -> dict[str, Any]:
    normalised = settings.take("apply_residual_connection_post_layernorm", False)
    embedding = {"embedding_norm": LayerNormConfig(epsilon=settings.peek("rms_norm_eps"))}
    return embedding | ({"norm_placement": "input"} if normalised else {})


def _mpt(settings: Settings) -> dict[str, Any]:
    inner = settings.part("attn_config")
    for name, value in (("alibi", True), ("prefix_lm", False), ("qk_ln", False), ("attn_uses_sequence_id", False)):
        inner.only(name, value)
    inner.only("attn_type", "multihead_attention")
    inner.only("alibi_bias_max", 8)
    clip, scale = inner.take("clip_qkv", kind=float), inner.take("softmax_scale", kind=float)
    inner.close(("attn_pdrop", "attn_impl"))
    return {"relative": AlibiConfig(), "qkv_clip": clip or None, "scale": scale}


def _mpt_written(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    return {"attn_config": {"clip_qkv": mixer.qkv_clip, "softmax_scale": mixer.scale}}


class _FalconPositions(Positions):
    """Rotary positions, or ALiBi."""

    def read(self, settings: Settings) -> RopeOf:
        rotated, alibi = super().read(settings), settings.remaining["alibi"]
        return (lambda layer, slides: None) if alibi else rotated


def _falcon(settings: Settings) -> None:
    _old_width(settings)
    heads, grouped = settings.peek("num_attention_heads"), settings.peek("new_decoder_architecture")
    groups, shared = settings.take("num_kv_heads", heads, int), settings.take("multi_query", True)
    _wide(settings)
    settings.remaining["num_key_value_heads"] = groups if grouped else 1 if shared else heads


def _falcon_model(settings: Settings) -> dict[str, Any]:
    grouped, parallel = settings.take("new_decoder_architecture", False), settings.take("parallel_attn", True)
    norms = settings.take("num_ln_in_parallel_attn", 2 if grouped else 1)
    if (norms == 2 and not grouped) or (grouped and not parallel):
        settings.refuse("num_ln_in_parallel_attn", norms, f"with new_decoder_architecture={grouped} transformers fails")
    return {"norm_placement": ("parallel_norms" if norms == 2 else "parallel") if parallel else "pre"}


def _falcon_mixers(settings: Settings, attention: Sequence[AttentionConfig]) -> Sequence[AttentionConfig]:
    if not settings.take("alibi", False):
        return attention
    return [replace(mixer, relative=AlibiConfig(factor=mixer.size(1) ** -0.5)) for mixer in attention]


def _falcon_written(cfg: DecoderConfig) -> dict[str, Any]:
    block = layers_of(cfg)[0]
    mixer, two = block.mixer, block.norm_placement == "parallel_norms"
    grouped = two or mixer.groups() not in (1, mixer.heads)
    return {
        "alibi": mixer.relative is not None,
        "new_decoder_architecture": grouped,
        "multi_query": mixer.groups() == 1,
        "num_kv_heads": mixer.groups(),
        "parallel_attn": block.norm_placement != "pre",
        "num_ln_in_parallel_attn": 2 if two else 1,
    }


def _bigcode(settings: Settings) -> None:
    _wide(settings)
    groups = 1 if settings.take("multi_query", True) else settings.peek("num_attention_heads")
    settings.remaining["num_key_value_heads"] = groups


def _bigcode_mixer(settings: Settings) -> dict[str, Any]:
    return {} if settings.take("scale_attn_weights", True) else {"scale": 1.0}


def _bigcode_written(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    return {"multi_query": mixer.groups() == 1, "scale_attn_weights": mixer.scale is None}


def _gptj(settings: Settings) -> None:
    _wide(settings)
    settings.only("rope_theta", 10000.0)
    settings.only("rope_scaling", None)
    decoders.rotary_dim(settings)


def _gptj_written(cfg: DecoderConfig) -> dict[str, Any]:
    mixer = layers_of(cfg)[0].mixer
    return {"rotary_dim": mixer.rope.rotated(mixer.size(cfg.hidden))}


def _opt(settings: Settings) -> None:
    one_group(settings)
    settings.only("do_layer_norm_before", True)
    settings.only("layer_norm_elementwise_affine", True)
    settings.only("_remove_final_layer_norm", False)
    settings.only("word_embed_proj_dim", settings.peek("hidden_size"))
    settings.remaining["rms_norm_eps"] = 1e-5


GPTJ: dict[str, Any] = {
    "mlp_bias": True, "gate": False, "norm": NORM, "placement": "parallel", "prepare": _gptj, "unused": SUMMARY,
    "positions": Positions(interleaved=True, fraction=1.0), "model": lambda _: {"head_bias": True},
    "written": _gptj_written, "parts": {"ignored": ("transformer.h.*.attn.*bias", "transformer.h.*.attn.causal_mask")},
}  # fmt: skip
TABLES = [
    Decoder(
        "gptj", "GPTJForCausalLM", sizes(50400, 4096, None, 28, 16, None, None, 2048, rms_norm_eps=1e-5)
        | {"hidden_act": "gelu_new", "rotary_dim": 64}, GPT2, GPTJ_TENSORS, **GPTJ,
    ),
    Decoder(
        "codegen", "CodeGenForCausalLM", sizes(50400, 4096, None, 28, 16, None, None, 2048, rms_norm_eps=1e-5)
        | {"hidden_act": "gelu_new", "rotary_dim": 64}, GPT2, GPTJ_TENSORS, mixer_rows=OUTPUT,
        finish=fused("transformer.h.{layer}.attn.qkv_proj", lambda _: 4, (QKV[0], QKV[2], QKV[1])), **GPTJ,
    ),
    Decoder(
        "gpt_bigcode", "GPTBigCodeForCausalLM", sizes(50257, 768, None, 12, 12, None, None, 1024, rms_norm_eps=1e-5)
        | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        GPT2, GPT2_TENSORS | {"post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj"}
        | {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj", POSITIONS: "transformer.wpe.weight"},
        bias=True, mlp_bias=True, gate=False, norm=NORM, positions=NoPositions(), prepare=_bigcode,
        mixer=_bigcode_mixer, model=lambda _: {"learned_positions": True}, written=_bigcode_written,
        mixer_rows=[*OUTPUT, Row(POSITIONS, "positions")],
        finish=fused("transformer.h.{layer}.attn.c_attn", lambda mixer: mixer.groups()),
        unused=(*SUMMARY, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner",
                "max_batch_size", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
        parts={"ignored": ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")},
    ),
    Decoder(
        "opt", "OPTForCausalLM", sizes(50272, 768, 3072, 12, 12, None, None, 2048) | {"hidden_act": "relu"}
        | {"tie_word_embeddings": True, "enable_bias": True},
        {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        {"model.embed_tokens": "model.decoder.embed_tokens", "model.layers": "model.decoder.layers"}
        | {"model.norm": "model.decoder.final_layer_norm", POSITIONS: "model.decoder.embed_positions.weight"}
        | {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"}
        | {"mlp.up_proj": "fc1", "mlp.down_proj": "fc2", "self_attn.o_proj": "self_attn.out_proj"},
        bias="enable_bias", mlp_bias="enable_bias", gate=False, norm=NORM, positions=NoPositions(), prepare=_opt,
        model=lambda _: {"learned_positions": True, "first_position": 2}, unused=("dropout", "layerdrop", "init_std"),
        mixer_rows=[*MIXER, Row(POSITIONS, "positions")],
    ),
    Decoder(
        "bloom", "BloomForCausalLM", sizes(250880, 64, None, 2, 8, None, None, 2048, rms_norm_eps=1e-5)
        | {"hidden_act": "gelu_new", "tie_word_embeddings": True},
        {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "layer_norm_epsilon": "rms_norm_eps"}
        | {"seq_length": "max_position_embeddings"},
        OF_BLOOM, bias=True, mlp_bias=True, gate=False, norm=NORM, positions=NoPositions(), prepare=_bloom,
        mixer=lambda _: {"relative": AlibiConfig()}, model=_bloom_model, unused=BLOOM_UNUSED,
        written=lambda cfg: {
            "apply_residual_connection_post_layernorm": layers_of(cfg)[0].norm_placement == "input"
        },
        mixer_rows=[*OUTPUT, *norm("transformer.word_embeddings_layernorm", "embedding_norm")],
        finish=fused(IN_FALCON, lambda mixer: mixer.heads),
    ),
    Decoder(
        "mpt", "MptForCausalLM", sizes(50368, 2048, None, 24, 16, None, None, 2048, rms_norm_eps=1e-5)
        | {"hidden_act": "gelu", "tie_word_embeddings": True, "attn_config": {}},
        {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
        | {"max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps"},
        {"model.embed_tokens": "transformer.wte", "model.layers": "transformer.blocks", "input_layernorm": "norm_1"}
        | {"model.norm": "transformer.norm_f", "post_attention_layernorm": "norm_2", "self_attn.qkv_proj": "attn.Wqkv"}
        | {"self_attn.o_proj": "attn.out_proj", "mlp.": "ffn."},
        gate=False, norm=LayerNormConfig(bias=False), positions=NoPositions(), mixer=_mpt, written=_mpt_written,
        prepare=lambda settings: _fixed(settings, "gelu"), mixer_rows=FUSED_MIXER,
        unused=("expansion_ratio", "emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb",
                "no_bias", "norm_type", "verbose"),
    ),
    Decoder(
        "falcon", "FalconForCausalLM", sizes(65024, 4544, None, 32, 71, None, None, 2048, rms_norm_eps=1e-5)
        | {"hidden_act": "gelu", "tie_word_embeddings": True, "alibi": False, "new_decoder_architecture": False},
        {"layer_norm_epsilon": "rms_norm_eps", "activation": "hidden_act", "ffn_hidden_size": "intermediate_size"},
        OF_BLOOM, bias="bias", mlp_bias="bias", gate=False, norm=NORM, norms=FALCON_PLACES,
        positions=_FalconPositions(), prepare=_falcon, mixers=_falcon_mixers, model=_falcon_model,
        written=_falcon_written, mixer_rows=OUTPUT, finish=fused(IN_FALCON, lambda mixer: mixer.groups()),
        unused=("apply_residual_connection_post_layernorm",),
    ),
]  # fmt: skip
FAMILIES = [table.family() for table in TABLES]
