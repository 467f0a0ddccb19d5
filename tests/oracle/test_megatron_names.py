"""Megatron-LM's settings and weights without a stored case: the resulting configs; weights survive a round trip."""

from typing import Any

import numpy as np
import pytest
from megatron_config import decoder_config
from megatron_moe import pattern
from megatron_run import OneDevice
from megatron_weights import layer_places, to_megatron, to_ours

from megajax.layers.moe.config import MoEConfig

PLAIN = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 24,
         "hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm"}  # fmt: skip
GATED = {"gated_linear_unit": True, "activation_func": "quick_gelu", "activation_func_clamp_value": 7.0,
         "glu_linear_offset": 1.0, "add_bias_linear": False, "add_qkv_bias": True, "attention_output_gate": True,
         "softmax_type": "learnable", "kv_channels": 8, "qk_layernorm": True}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "qk_layernorm": True}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 20,
           "moe_shared_expert_gate": True, "moe_layer_freq": [0, 1, 1, 1], "moe_router_topk": 2,
           "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2],
           "moe_router_score_function": "sqrtsoftplus", "moe_router_enable_expert_bias": True, "moe_z_loss_coeff": 0.3,
           "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 2.5,
           "moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "probs", "mtp_num_layers": 1}  # fmt: skip
LAYERS = {
    "experts": EXPERTS | {"gated_linear_unit": True, "activation_func": "silu"},
    "experts without biases": {
        "num_moe_experts": 2,
        "moe_layer_freq": 2,
        "add_bias_linear": False,
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_router_pre_softmax": True,
    },
    "window and no rope": {"window_size": [5, 0], "window_attn_skip_freq": 2, "no_rope_freq": [0, 0, 0, 1]},
    "window by list": {"window_size": [5, 0], "window_attn_skip_freq": [1, 0, 1, 0]},
    "gated": GATED,
    "two further": {"mtp_num_layers": 2, "activation_func": "squared_relu", "layernorm_zero_centered_gamma": True},
    "latent": LATENT | {"q_lora_rank": 7, "add_bias_linear": True},
    "latent without query rank": LATENT | {"q_lora_rank": None, "rope_type": "rope", "add_bias_linear": False},
}
MODEL = {"position_embedding_type": "rope", "rotary_percent": 0.5, "share_embeddings_and_output_weights": True}


def model(case: str) -> Any:
    latent = case.startswith("latent")
    return decoder_config(PLAIN | LAYERS[case], MODEL, vocabulary=61, positions=16, latent=latent)


@pytest.mark.parametrize("case", LAYERS)
def test_weights_round_trip(case):
    device = OneDevice(model(case))
    rng = np.random.default_rng(0)
    ours = {path: rng.normal(size=w.shape).astype(np.float32) for path, w in device.zeros().items()}
    # Padding rows are not theirs.
    ours["tokens"][device.cfg.vocabulary_size :] = 0
    back = to_ours(device.cfg, to_megatron(device.cfg, ours))
    assert back.keys() == ours.keys()
    for path, w in ours.items():
        np.testing.assert_array_equal(back[path], w, err_msg=path)


def test_which_layers_have_windows_and_positions():
    mixers = [block.mixer for block in model("window and no rope").stack.pattern]
    assert [mixer.window for mixer in mixers] == [5, None, 5, None]
    assert [mixer.rope is None for mixer in mixers] == [False, False, False, True]
    cfg = model("window by list")
    assert [block.mixer.window for block in cfg.stack.pattern] == [5, None]
    assert cfg.stack.repeats == 2


def test_a_gated_query_has_its_gate_beside_it_in_each_group():
    cfg = model("gated")
    theirs = to_megatron(cfg, OneDevice(cfg).zeros())
    name = "decoder.layers.0.self_attention"
    assert theirs[f"{name}.linear_qkv.weight"].shape == (2 * (2 + 2 + 1 + 1) * 8, 32)
    assert theirs[f"{name}.linear_qkv.bias"].shape == (96,)
    assert theirs[f"{name}.core_attention.softmax_offset"].shape == (4,)
    assert f"{name}.linear_proj.bias" not in theirs
    assert cfg.stack.pattern[0].mlp.clamp == 7.0


def test_defaults_of_latent_attention():
    scaling = model("latent").stack.pattern[0].mixer.rope.scaling
    assert (scaling.factor, scaling.original, scaling.mscale, scaling.mscale_all) == (40.0, 4096, 1.0, 0.0)
    plain = model("latent without query rank").stack.pattern[0].mixer
    assert plain.query_rank is None and plain.rope.scaling is None and plain.rope.fraction == 1.0


def test_settings_of_experts():
    cfg = model("experts")
    dense, *others = [block.mlp for _, _, block in layer_places(cfg)]
    assert dense.ffn == 24 and all(other == others[0] for other in others)
    moe = others[0]
    assert (moe.experts, moe.top_k, moe.expert.ffn, moe.shared.mlp.ffn, moe.shared.gate) == (4, 2, 12, 20, True)
    router = moe.router
    assert (router.aux_loss, router.row_loss, router.global_loss, router.z_loss) == (0, 0.1, 0.2, 0.3)
    assert (router.score, router.normalise, router.scale, router.bias) == ("sqrt_softplus", "chosen", 2.5, True)
    assert (router.groups, router.chosen_groups, router.balance_rate) == (2, 1, 1e-3)
    assert (router.capacity.factor, router.capacity.drop) == (1.5, "probability")
    assert cfg.predicting_blocks()[0].mlp == moe
    assert [isinstance(block.mlp, MoEConfig) for _, _, block in layer_places(model("experts without biases"))] == [
        *(True, False, True, False)
    ]
    assert pattern("([0]*3+[1]*58)") == [0] * 3 + [1] * 58
    assert pattern("[0,1]*2") == [0, 1, 0, 1] and pattern("2") == 2
