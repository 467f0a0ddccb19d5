"""Megatron-LM's weights of settings without a stored case survive a round trip."""

from typing import Any

import numpy as np
import pytest
from megatron_config import decoder_config
from megatron_run import OneDevice
from megatron_weights import to_megatron, to_ours

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
    "experts without biases": {"num_moe_experts": 2, "moe_layer_freq": 2, "add_bias_linear": False,
        "moe_router_load_balancing_type": "sinkhorn", "moe_router_pre_softmax": True},
    "window and no rope": {"window_size": [5, 0], "window_attn_skip_freq": 2, "no_rope_freq": [0, 0, 0, 1]},
    "window by list": {"window_size": [5, 0], "window_attn_skip_freq": [1, 0, 1, 0]},
    "gated": GATED,
    "two further": {"mtp_num_layers": 2, "activation_func": "squared_relu", "layernorm_zero_centered_gamma": True},
    "latent": LATENT | {"q_lora_rank": 7, "add_bias_linear": True},
    "latent without query rank": LATENT | {"q_lora_rank": None, "rope_type": "rope", "add_bias_linear": False},
}  # fmt: skip
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


def test_a_gated_query_has_its_gate_beside_it_in_each_group():
    cfg = model("gated")
    theirs = to_megatron(cfg, OneDevice(cfg).zeros())
    name = "decoder.layers.0.self_attention"
    assert theirs[f"{name}.linear_qkv.weight"].shape == (2 * (2 + 2 + 1 + 1) * 8, 32)
    assert theirs[f"{name}.linear_qkv.bias"].shape == (96,)
    assert theirs[f"{name}.core_attention.softmax_offset"].shape == (4,)
    assert f"{name}.linear_proj.bias" not in theirs
    assert cfg.stack.pattern[0].mlp.clamp == 7.0
