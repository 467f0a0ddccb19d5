"""Families of decoders: names and shapes of transformers, round trips of config.json and bytes, refusals.

Names are written by hand after transformers 5.23.0, whose own tiny models gave the same names. Further families are
compared with files of transformers in tests/oracle/test_decoders.py.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import Arrays
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop.huggingface.family import Settings, layers_of
from megajax.interop.huggingface.folder import rename_tensors
from megajax.interop.huggingface.format import config_for
from megajax.interop.huggingface.registry import families, family_of, lost_settings
from megajax.interop.weights.foreign import declared_by, demand_fit
from megajax.interop.weights.name_mapping import resolved
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.position.config import RopeConfig, YarnScalingConfig
from megajax.models.decoder.config import PredictionConfig
from megajax.models.presets import llama, qwen, windowed
from megajax.models.presets.hybrids import linear_attention
from tests.models.test_presets_and_formulas import FAMILIES as OF_PRESETS

type Shapes = dict[str, tuple[int, ...]]

D, F, E, V, LAYER = 8, 12, 3, 40, "model.layers.1"
TINY: Mapping[str, Any] = {
    **{"hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2, "vocab_size": V},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32},
}
NORMS: Shapes = {f"{LAYER}.input_layernorm.weight": (D,), f"{LAYER}.post_attention_layernorm.weight": (D,)}


def matrices(prefix: str, ffn: int, names: str = "gate_proj up_proj down_proj") -> Shapes:
    gate, up, down = names.split()
    return {f"{prefix}.{gate}.weight": (ffn, D), f"{prefix}.{up}.weight": (ffn, D), f"{prefix}.{down}.weight": (D, ffn)}


def biases(prefix: str, **sizes: int) -> Shapes:
    return {f"{prefix}.{name}.bias": (size,) for name, size in sizes.items()}


ATTENTION: Shapes = {
    f"{LAYER}.self_attn.q_proj.weight": (16, D),
    f"{LAYER}.self_attn.k_proj.weight": (8, D),
    f"{LAYER}.self_attn.v_proj.weight": (8, D),
    f"{LAYER}.self_attn.o_proj.weight": (D, 16),
    **NORMS,
}
QKV_BIASES = biases(f"{LAYER}.self_attn", q_proj=16, k_proj=8, v_proj=8)
QK_NORMS: Shapes = {f"{LAYER}.self_attn.q_norm.weight": (4,), f"{LAYER}.self_attn.k_norm.weight": (4,)}
MLP = matrices(f"{LAYER}.mlp", F)


def experts(names: str = "gate_proj up_proj down_proj", prefix: str = f"{LAYER}.mlp") -> Shapes:
    experts = [matrices(f"{prefix}.experts.{number}", 6, names) for number in range(E)]
    return {f"{prefix}.gate.weight": (E, D)} | {name: shape for expert in experts for name, shape in expert.items()}


LATENT: Shapes = {
    f"{LAYER}.self_attn.q_a_proj.weight": (6, D),
    f"{LAYER}.self_attn.q_a_layernorm.weight": (6,),
    f"{LAYER}.self_attn.q_b_proj.weight": (4 * (5 + 2), 6),
    f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": (7 + 2, D),
    f"{LAYER}.self_attn.kv_a_layernorm.weight": (7,),
    f"{LAYER}.self_attn.kv_b_proj.weight": (4 * (5 + 3), 7),
    f"{LAYER}.self_attn.o_proj.weight": (D, 4 * 3),
    **NORMS,
}
LATENT_SIZES = {
    **{"q_lora_rank": 6, "kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 2, "v_head_dim": 3},
    **{"n_routed_experts": E, "moe_intermediate_size": 6, "num_experts_per_tok": 2, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
DELTA_SIZES = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5},
    **{"shared_expert_intermediate_size": 10, "partial_rotary_factor": 0.5},
}
DELTA: Shapes = {
    f"{LAYER}.linear_attn.conv1d.weight": (2 * 6 + 20, 1, 4),
    f"{LAYER}.linear_attn.dt_bias": (4,),
    f"{LAYER}.linear_attn.A_log": (4,),
    f"{LAYER}.linear_attn.norm.weight": (5,),
    f"{LAYER}.linear_attn.out_proj.weight": (D, 20),
}
FEW = {"num_experts": E, "moe_intermediate_size": 6, "num_experts_per_tok": 2}

CASES: Mapping[str, tuple[Mapping[str, Any], Shapes]] = {
    "llama": ({"attention_bias": True, "mlp_bias": True}, {
        **ATTENTION, **QKV_BIASES, **biases(f"{LAYER}.self_attn", o_proj=D), **MLP,
        **biases(f"{LAYER}.mlp", gate_proj=F, up_proj=F, down_proj=D),
    }),
    "mistral": ({"sliding_window": 8}, {**ATTENTION, **MLP}),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {**ATTENTION, **QKV_BIASES, **MLP},
    ),
    "qwen3": ({"tie_word_embeddings": True}, {**ATTENTION, **QK_NORMS, **MLP}),
    "mixtral": (
        {"intermediate_size": 6, "num_local_experts": E},
        {**ATTENTION, **experts("w1 w3 w2", f"{LAYER}.block_sparse_moe")},
    ),
    "qwen2_moe": ({**FEW, "shared_expert_intermediate_size": 10, "mlp_only_layers": [0]}, {
        **ATTENTION, **QKV_BIASES, **experts(), **matrices(f"{LAYER}.mlp.shared_expert", 10),
        f"{LAYER}.mlp.shared_expert_gate.weight": (1, D),
    }),
    "qwen3_moe": ({**FEW, "decoder_sparse_step": 2, "norm_topk_prob": True}, {**ATTENTION, **QK_NORMS, **experts()}),
    "qwen3_next": ({**FEW, **DELTA_SIZES, "layer_types": ["full_attention", "linear_attention"]}, {
        **NORMS, **experts(), **matrices(f"{LAYER}.mlp.shared_expert", 10), **DELTA,
        f"{LAYER}.mlp.shared_expert_gate.weight": (1, D),
        f"{LAYER}.linear_attn.in_proj_qkvz.weight": (2 * (3 + 3 + 10 + 10), D),
        f"{LAYER}.linear_attn.in_proj_ba.weight": (8, D),
    }),
    "qwen3_5_moe_text": ({**FEW, **DELTA_SIZES, "full_attention_interval": 2, "attention_bias": True}, {
        **ATTENTION, **QK_NORMS, **QKV_BIASES, **biases(f"{LAYER}.self_attn", q_proj=32, o_proj=D),
        f"{LAYER}.self_attn.q_proj.weight": (32, D), **experts(), **matrices(f"{LAYER}.mlp.shared_expert", 10),
        f"{LAYER}.mlp.shared_expert_gate.weight": (1, D),
    }),
    "deepseek_v2": (
        {**LATENT_SIZES, "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7, "mscale_all_dim": 0.7}},
        {**LATENT, **experts(), **matrices(f"{LAYER}.mlp.shared_experts", 12)},
    ),
    "deepseek_v3": ({**LATENT_SIZES, "num_nextn_predict_layers": 0, "attention_bias": True}, {
        **LATENT, **biases(f"{LAYER}.self_attn", q_a_proj=6, kv_a_proj_with_mqa=9, o_proj=D),
        **experts(), **matrices(f"{LAYER}.mlp.shared_experts", 12),
        f"{LAYER}.mlp.gate.e_score_correction_bias": (E,),
    }),
    "gpt_oss": ({"intermediate_size": 6, "num_local_experts": E, "num_experts_per_tok": 2, "sliding_window": 8}, {
        **ATTENTION, **QKV_BIASES, **biases(f"{LAYER}.self_attn", o_proj=D), f"{LAYER}.self_attn.sinks": (4,),
        f"{LAYER}.mlp.router.weight": (E, D), f"{LAYER}.mlp.router.bias": (E,),
        f"{LAYER}.mlp.experts.gate_up_proj": (E, D, 12), f"{LAYER}.mlp.experts.gate_up_proj_bias": (E, 12),
        f"{LAYER}.mlp.experts.down_proj": (E, 6, D), f"{LAYER}.mlp.experts.down_proj_bias": (E, D),
    }),
    "gemma": ({}, {**ATTENTION, **MLP}),
    "phi3": ({"partial_rotary_factor": 0.5}, {
        f"{LAYER}.self_attn.qkv_proj.weight": (32, D), f"{LAYER}.self_attn.o_proj.weight": (D, 16), **NORMS,
        f"{LAYER}.mlp.gate_up_proj.weight": (2 * F, D), f"{LAYER}.mlp.down_proj.weight": (D, F),
    }),
}  # fmt: skip
"""model_type -> settings, and the tensors of the second layer."""


def read(kind: str, **settings: Any) -> Any:
    """The model of a config.json. Raises one UserError that lists every unsupported setting."""
    json_settings = Settings({"model_type": kind, **settings})
    family = family_of(json_settings)
    model = family.read(json_settings)
    json_settings.finish(family.unused)
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, Any, Shapes]:
    settings, layer = CASES[request.param]
    model = read(request.param, **{**TINY, **settings})
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    return request.param, model, layer | shapes | ({} if model.tied else {"lm_head.weight": (V, D)})


def test_names_and_shapes_are_those_of_transformers(case: tuple[str, Any, Shapes]) -> None:
    kind, model, expected = case
    table = resolved(families()[kind].rows(model), declared_by(model))
    actual = {tensor.name: tensor.shape() for tensor in table}
    assert {name: shape for name, shape in actual.items() if ".layers.0." not in name} == expected


def test_the_style_of_transformers_5_is_read_and_kept(case: tuple[str, Any, Shapes]) -> None:
    """rope_parameters and dtype instead of rope_theta, rope_scaling and torch_dtype, as by transformers 5.23."""
    kind, model, _ = case
    family = families()[kind]
    published = {**family.config_json(model), "torch_dtype": "bfloat16", "transformers_version": "4.41.2"}
    newer = {**published, "dtype": published["torch_dtype"], "transformers_version": "5.23.0"}
    inner = newer.pop("rope_parameters", {}) or newer.pop("rope_scaling") or {"rope_type": "default"}
    outer = {name: newer.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in newer}
    newer = {name: value for name, value in newer.items() if name not in ("torch_dtype", "rope_scaling")}
    newer["rope_parameters"] = inner | outer
    for config in (published, newer):
        settings = {name: value for name, value in config.items() if name != "model_type"}
        assert read(kind, **settings) == model
        assert json.dumps(config_for(model, family, config, ())) == json.dumps(config)


def test_the_class_without_a_head_has_no_prefix() -> None:
    """Embedding models are stored so."""
    model = replace(read("qwen3"), tied=True)
    family = families()["qwen3"]
    table = resolved(family.rows(model), declared_by(model))
    tensors = {tensor.name: np.zeros(tensor.shape(), np.float32) for tensor in table}
    stored = Arrays({name.removeprefix("model."): array for name, array in tensors.items()})
    by_name, adjusted = rename_tensors(stored, family, model)
    demand_fit(by_name, table, family.ignored)
    assert adjusted == model
    assert by_name.names == {name: name.removeprefix("model.") for name in tensors}


@pytest.mark.parametrize("name", OF_PRESETS)
def test_our_sizes_have_a_config(name: str) -> None:
    """The family is the one that a preset says it is of."""
    make, sizes = OF_PRESETS[name]
    models = [make(size) for size in sizes]
    models += [make("8b", llama3_scaling=True)] if name == "llama3" else []
    models += [make("v3", yarn=True), make("v2-lite", yarn=True)] if name == "deepseek" else []
    assert [losses for model in models if (losses := lost_settings(model, families()[model.family]))] == []


@pytest.mark.parametrize(
    ("kind", "model", "tensors"),
    [("llama", llama.llama3("8b"), 291), ("qwen2", qwen.qwen2("7b"), 339), ("mixtral", llama.mixtral("8x7b"), 995)],
)
def test_released_sizes_have_as_many_tensors_as_their_indices_list(kind: str, model: Any, tensors: int) -> None:
    assert len(resolved(families()[kind].rows(model), declared_by(model))) == tensors


def test_absent_settings_are_those_of_transformers() -> None:
    mistral, qwen3, mix, oss = (read(kind) for kind in ("mistral", "qwen3", "mixtral", "gpt_oss"))
    assert [mistral.stack.pattern[0].mixer.window, mistral.sequence_length] == [4095, 131072]
    assert read("mistral", sliding_window=None).stack.pattern[0].mixer.window is None
    assert [qwen3.stack.pattern[0].mixer.head_dim, qwen3.stack.pattern[0].mixer.window] == [128, None]
    assert [mix.stack.pattern[0].mixer.rope.base, mix.norm.epsilon] == [1e6, 1e-5]
    assert [block.mixer.window for block in oss.stack.pattern] == [127, None]
    assert oss == replace(windowed.gpt_oss("120b"), stack=oss.stack, family="")
    third = read("deepseek_v3")
    assert lost_settings(third, families()["deepseek_v3"]) == [] and third.prediction == PredictionConfig(weight=0.3)
    assert read("deepseek_v3", num_experts_per_tok=4).stack.pattern[-1].mlp.router.group_scores == 2


def test_the_older_spelling_of_rotary_positions_takes_precedence() -> None:
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}}
    mixer = read("llama", **TINY, **linear, rope_theta=7.0).stack.pattern[0].mixer
    assert mixer.rope == RopeConfig(base=7.0, interpolation=2.0)
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 3.0}
    assert read("llama", **TINY, rope_parameters=dynamic).stack.pattern[0].mixer.rope == RopeConfig(base=3.0)


@pytest.mark.parametrize(
    ("settings", "magnitude"),
    [
        ({}, 0.1 * log(4) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.5}, 0.1 * log(4) + 1),
        ({"mscale_all_dim": 0.5}, 0.1 * log(4) + 1),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * log(4) + 1) / (0.2 * log(4) + 1)),
        ({"mscale": 0.5, "mscale_all_dim": 2.0, "attention_factor": 1.5}, 1.5),
    ],
)
def test_yarn_scales_rotated_heads_by_any_of_its_settings(settings: dict[str, float], magnitude: float) -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": None, **settings}
    model = read("deepseek_v3", **TINY, **LATENT_SIZES, rope_parameters=given)
    scaling = model.stack.pattern[0].mixer.rope.scaling
    assert isinstance(scaling, YarnScalingConfig) and scaling.magnitude() == pytest.approx(magnitude, rel=1e-9)
    assert scaling.fast == 32 and (scaling.mscale_all or 0) == settings.get("mscale_all_dim", 0)
    assert read("deepseek_v3", **families()["deepseek_v3"].config_json(model)) == model


def test_blocks_that_predict_further_tokens_are_numbered_after_the_layers() -> None:
    family, model = families()["deepseek_v3"], read("deepseek_v3", **TINY, **LATENT_SIZES)
    names = {tensor.name: tensor.pieces for tensor in resolved(family.rows(model), declared_by(model))}
    halves = ["predictions.0.from_embedding", "predictions.0.from_state"]
    assert [piece.path for piece in names["model.layers.2.eh_proj.weight"]] == halves
    assert names["model.layers.2.mlp.gate.e_score_correction_bias"][0].path == "predictions.0.block.mlp.load.sum"
    behind = {name.replace(".2.", ".1.", 1) for name in names if ".layers.2." in name}
    prediction_names = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}
    own = {f"{LAYER}.{name}.weight" for name in prediction_names}
    assert behind == {name for name in names if ".layers.1." in name} | own
    assert family.adjusted(model, names) == model
    assert family.adjusted(model, {"model.norm.weight"}) == replace(model, prediction=None)


REFUSED: Mapping[str, tuple[str, Mapping[str, Any], list[str]]] = {
    "several": ("llama",
        {"hidden_act": "mish", "rope_scaling": {"rope_type": "ntk", "factor": 2}, "residual_multiplier": 0.2},
        ["hidden_act=mish: only", "rope_type=ntk: only", "residual_multiplier=0.2: this setting"]),
    "rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "depth": 1}, "partial_rotary_factor": 0.5},
        ["rope_scaling.depth=1: this setting", "partial_rotary_factor=0.5: this family rotates whole heads"]),
    "latent": ("deepseek_v3", {"num_experts_per_tok": 1, "topk_method": "greedy"},
        ["num_experts_per_tok=1", "topk_method=greedy"]),
    "layered rope": ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters={...}: transfo"]),
    "no rope": ("smollm3", {"no_rope_layers": [1]}, ["no_rope_layers=(1 layers): num_hidden_layers=36"]),
    "windows": ("qwen3", {"layer_types": ["chunked_attention"] * 32}, ["layer_types=chunked_attention: only"]),
    "layers": ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types=(1 layers): num_hidden_layers=32"]),
    "gpt_oss": ("gpt_oss", {"swiglu_alpha": 1.0}, ["swiglu_alpha=1.0: only 1.702"]),
    "soft caps": ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0: only None"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_all_unsupported_settings_are_listed(case: str) -> None:
    kind, settings, expected = REFUSED[case]
    with pytest.raises(UserError) as error:
        read(kind, **settings)
    assert [line for line in expected if line not in str(error.value)] == []


def test_models_that_a_family_lacks_are_refused_as_such() -> None:
    assert lost_settings(llama.llama3("debug"), families()["mixtral"])
    losses = lost_settings(qwen.qwen2("debug"), families()["llama"])
    assert losses == ["layers 0 to 1: mixer.qkv_bias: True here, None there"]


def test_a_part_of_each_head_is_rotated_in_minimax() -> None:
    """The released file gives the part as rotary_dim."""
    model = read("minimax", **TINY, rotary_dim=2)
    ropes = [block.mixer.rope for block in layers_of(model) if isinstance(block.mixer, AttentionConfig)]
    assert ropes == [RopeConfig(base=1e6, fraction=0.5)]
    assert lost_settings(model, families()["minimax"]) == []


def test_a_head_that_transformers_does_not_tie_is_not_exported_as_tied() -> None:
    """transformers would draw a head of Kimi Linear at random."""
    tied = replace(linear_attention.kimi_linear("debug"), tied=True)
    assert lost_settings(tied, families()["kimi_linear"]) == ["tied: True here, False there"]


def test_values_that_a_table_refuses_have_the_names_of_config_json() -> None:
    with pytest.raises(UserError) as error:
        read("hunyuan_v1_moe", **TINY, num_experts=3, moe_topk=[1, 2])
    assert "moe_topk=[1, 2]: only one number for all layers is supported" in str(error.value)
    with user_error("config.json"):
        read("gptj", n_head=0)
