"""Writes decoder_families.tar.xz: tiny decoders of transformers with random weights, their logits and greedy tokens.

Run with transformers 5.24.0 and torch 2.13 on a CPU, for all families or for some, whose folders are replaced:

    python tests/oracle/make_decoder_families.py [NAME ...]

Each folder has config.json as transformers 5 writes it, config_published_style.json as older versions did, weights
that float16 holds exactly, and io.npz: input_ids [2, 24], logits in float32, loss, greedy (8 tokens after the first
16 of input_ids). Both config files give the same logits.
"""

import io
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

FILE = Path(__file__).parent / "decoder_families.tar.xz"
SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
WINDOWS = {"sliding_window": 8}
YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 12}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 5.0]}
WHOLE = {"original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
DELTA = {"num_hidden_layers": 4, "head_dim": 8, "full_attention_interval": 2, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
INTERVAL = {"layer_types": None, "full_attention_interval": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
TWO = {"num_hidden_layers": 2}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}}
ROUTED = {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}
ROUTED |= {"routed_scaling_factor": 1.5, "n_shared_experts": 1}
DENSE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 3.0}
FACTORS = DENSE | {"num_local_experts": 4}
CAPS = {"head_dim": 12, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4}
TEMPERED = YARN | {"original_max_position_embeddings": 8, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}
TEMPERED |= {"llama_4_scaling_beta": 0.5}
OF_FALCON = {"intermediate_size": None, "num_key_value_heads": None, "ffn_hidden_size": 40}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", WINDOWS
        | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
        {"rope_local_base_freq": 1e4, "layer_types": None}),
    "gemma2": ("Gemma2ForCausalLM", WINDOWS | CAPS, {"layer_types": None}),
    "granite": ("GraniteForCausalLM", DENSE | {"tie_word_embeddings": True}, {}),
    "phi3": ("Phi3ForCausalLM", {"original_max_position_embeddings": 12, "rope_parameters": LONGROPE}, {}),
    "cohere2": ("Cohere2ForCausalLM", WINDOWS | {"logit_scale": 0.5}, {"layer_types": None}),
    "glm4_moe": ("Glm4MoeForCausalLM",
        {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}
        | {"routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True, "head_dim": 8}, {}),
    "olmo3": ("Olmo3ForCausalLM", WINDOWS
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
        {"layer_types": None}),
    "exaone4": ("Exaone4ForCausalLM", WINDOWS | {"sliding_window_pattern": 4}, {"layer_types": None}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", DELTA, INTERVAL),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", DELTA | FEW, INTERVAL),
    "smollm3": ("SmolLM3ForCausalLM", {}, {"layer_types": None, "no_rope_layers": None}),
    "llama4_text": ("Llama4ForCausalLM",
        {"head_dim": 8, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 7, "floor_scale": 5}
        | {"attn_scale": 0.5, "no_rope_layer_interval": 3, "rope_parameters": LLAMA3},
        {"layer_types": None, "no_rope_layers": [], "moe_layers": None}),
    "lfm2": ("Lfm2ForCausalLM",
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": True, "block_multiple_of": 16},
        {"layer_types": None, "full_attn_idxs": [2], "tie_embedding": True, "tie_word_embeddings": None}
        | {"block_ff_dim": 48, "intermediate_size": None}),
    "lfm2_moe": ("Lfm2MoeForCausalLM",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "routed_scaling_factor": 1.5, "conv_L_cache": 4}
        | {"tie_word_embeddings": False}, {}),
    "minimax": ("MiniMaxForCausalLM",
        {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
        | {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 5, "head_dim": 12}
        | {"full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7, "linear_attn_alpha_factor": 1.2}
        | {"linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.3, "mlp_beta_factor": 0.9}, {}),
    "kimi_linear": ("KimiLinearForCausalLM",
        {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
        | {"linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 6}
        | {"qk_rope_head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"routed_scaling_factor": 2.0, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
        {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1, "linear_num_heads": None}
        | {"linear_head_dim": None, "linear_conv_kernel_dim": None, "mla_use_nope": True}
        | {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "num_heads": 4, "head_dim": 8,
                                  "short_conv_kernel_size": 4}}),
    "nemotron_h": ("NemotronHForCausalLM",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"], "head_dim": 8}
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "routed_scaling_factor": 2.0}
        | {"moe_shared_expert_intermediate_size": 20, "moe_latent_size": 16, "n_group": 2, "topk_group": 1},
        {"layers_block_type": None, "hybrid_override_pattern": "ME*EM"}),
    "glm": ("GlmForCausalLM", TWO | HALF | {"head_dim": 8}, {}),
    "glm4": ("Glm4ForCausalLM", TWO | HALF | {"head_dim": 8, "tie_word_embeddings": True}, {}),
    "seed_oss": ("SeedOssForCausalLM", TWO | {"head_dim": 12, "mlp_bias": True, "attention_out_bias": True}, {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", TWO | {"head_dim": 12, "use_bias": True}, {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM",
        {"moe_intermediate_size": 12, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2, "head_dim": 8}
        | {"moe_layer_start_index": 1, "moe_layer_interval": 2}, {}),
    "arcee": ("ArceeForCausalLM", TWO | {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}, {}),
    "nemotron": ("NemotronForCausalLM", TWO | HALF | {"head_dim": 12, "mlp_bias": True}, {}),
    "starcoder2": ("Starcoder2ForCausalLM", TWO | WINDOWS, {}),
    "stablelm": ("StableLmForCausalLM", TWO | HALF | {"use_qkv_bias": True}, {}),
    "helium": ("HeliumForCausalLM", TWO | {"head_dim": 8, "attention_bias": True, "mlp_bias": True}, {}),
    "cwm": ("CwmForCausalLM", WINDOWS | {"head_dim": 12, "rope_parameters": LLAMA3}, {"layer_types": None}),
    "cohere": ("CohereForCausalLM", TWO | {"logit_scale": 0.5, "attention_bias": True}, {}),
    "ministral": ("MinistralForCausalLM", TWO | WINDOWS
        | {"head_dim": 12, "layer_types": ["full_attention", "sliding_attention"]}, {}),
    "olmoe": ("OlmoeForCausalLM", TWO | {"num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}, {}),
    "flex_olmo": ("FlexOlmoForCausalLM", TWO | {"num_experts": 4, "num_experts_per_tok": 2}, {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", TWO | HALF
        | {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
        {"rotary_dim": 4, "partial_rotary_factor": None}),
    "dots1": ("Dots1ForCausalLM", ROUTED | WINDOWS
        | {"max_window_layers": 2, "first_k_dense_replace": 1, "head_dim": 12}, {"layer_types": None}),
    "solar_open": ("SolarOpenForCausalLM", TWO | ROUTED | {"head_dim": 8, "attention_bias": True}, {}),
    "exaone_moe": ("ExaoneMoeForCausalLM", WINDOWS
        | {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3, "n_group": 2},
        {"layer_types": None, "mlp_layer_types": None}),
    "granitemoe": ("GraniteMoeForCausalLM", TWO | FACTORS, {}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", TWO | FACTORS
        | {"shared_intermediate_size": 20, "attention_bias": True, "tie_word_embeddings": True}, {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", FACTORS | MAMBA
        | {"shared_intermediate_size": 20, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
        | {"num_hidden_layers": 3}, {"layer_types": ["mamba", "mamba", "attention"]}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", TWO | ROUTED | LATENT | {"n_group": 1, "rope_interleave": False}, {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", TWO
        | {"head_dim": 12}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}}, {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", TWO
        | {"head_dim": 12, "num_experts": 4, "moe_topk": 2, "intermediate_size": 24}, {"moe_topk": [2, 2]}),
    "olmo": ("OlmoForCausalLM", TWO | {"clip_qkv": 0.8}, {}),
    "gpt_neox": ("GPTNeoXForCausalLM", TWO | HALF,
        {"rope_theta": None, "partial_rotary_factor": None, "rotary_emb_base": 5e4, "rotary_pct": 0.5}),
    "persimmon": ("PersimmonForCausalLM", TWO | HALF, {}),
    "phi": ("PhiForCausalLM", TWO | HALF | {"qk_layernorm": True}, {}),
    "gptj": ("GPTJForCausalLM", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, {}),
    "jamba": ("JambaForCausalLM",
        {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 4}
        | {"intermediate_size": 24, "mamba_dt_rank": 3}, {}),
    "falcon_mamba": ("FalconMambaForCausalLM", TWO
        | {"state_size": 4, "time_step_rank": 3, "mixer_rms_eps": 1e-5, "intermediate_size": None}
        | {"num_attention_heads": None, "num_key_value_heads": None}, {}),
    "jais2": ("Jais2ForCausalLM", TWO, {}),
    "internlm3": ("LlamaForCausalLM", TWO | {"head_dim": 12},
        {"qkv_bias": False, "bias": False, "attention_bias": None, "mlp_bias": None}),
    "iquestcoder": ("LlamaForCausalLM", TWO | {"head_dim": 12}, {}),
    "exaone": ("LlamaForCausalLM", TWO | {"rope_parameters": LLAMA3}, {}),
    "vaultgemma": ("VaultGemmaForCausalLM", WINDOWS | CAPS, {"layer_types": None}),
    "granite_swa": ("GraniteSWAForCausalLM", WINDOWS | DENSE | {"layer_rope_theta": [0, 1e4, 5e4, 1e4]},
        {"layer_types": None}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", TWO | WINDOWS | FACTORS
        | {"shared_intermediate_size": 20, "layer_types": ["sliding_attention", "full_attention"]}, {}),
    "hyperclovax": ("HyperCLOVAXForCausalLM", TWO | DENSE | {"logits_scaling": 0.7}, {}),
    "bamba": ("BambaForCausalLM", MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
        {"partial_rotary_factor": None}),
    "falcon_h1": ("FalconH1ForCausalLM", MAMBA
        | {"num_hidden_layers": 2, "head_dim": 12, "mamba_d_ssm": 48, "mamba_n_heads": 6, "key_multiplier": 0.7}
        | {"embedding_multiplier": 2.0, "lm_head_multiplier": 0.3, "attention_in_multiplier": 1.3}
        | {"attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.7, 0.4], "mlp_bias": True}
        | {"ssm_in_multiplier": 0.8, "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.1]}, {"mamba_rms_norm": False}),
    "falcon_h1-normalised": ("FalconH1ForCausalLM", MAMBA | TWO | {"mamba_d_ssm": 64, "mamba_rms_norm": True}, {}),
    "sarvam_moe": ("Glm4MoeForCausalLM", TWO | ROUTED | {"head_dim": 8, "first_k_dense_replace": 1}, {}),
    "afmoe": ("AfmoeForCausalLM", WINDOWS
        | {"head_dim": 12, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3, "route_scale": 1.5}
        | {"mup_enabled": True, "num_shared_experts": 2},
        {"layer_types": None, "score_func": "sigmoid", "route_norm": True}),
    "mellum": ("MellumForCausalLM", WINDOWS
        | {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]}, {"keep": True}),
    "bloom": ("BloomForCausalLM", TWO | {"hidden_size": 36, "num_attention_heads": 6, "intermediate_size": None},
        {"hidden_size": None, "n_embed": 36, "seq_length": 64, "max_position_embeddings": None, "n_inner": None}),
    "bloom-normalised": ("BloomForCausalLM", TWO
        | {"intermediate_size": None, "apply_residual_connection_post_layernorm": True}, {}),
    "mpt": ("MptForCausalLM", TWO | {"intermediate_size": None, "max_position_embeddings": None, "max_seq_len": 64}
        | {"attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3}}, {}),
    "falcon": ("FalconForCausalLM", TWO | OF_FALCON, {}),
    "falcon-grouped": ("FalconForCausalLM", TWO | OF_FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        {}),
    "falcon-alibi": ("FalconForCausalLM", TWO | OF_FALCON
        | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        {"rope_theta": None, "rope_scaling": None}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", TWO | {"intermediate_size": None, "n_inner": 40}, {}),
    "codegen": ("CodeGenForCausalLM", TWO
        | {"n_positions": 64, "num_attention_heads": 8, "rotary_dim": 2, "intermediate_size": None}, {}),
    "opt": ("OPTForCausalLM", TWO | {"intermediate_size": None, "ffn_dim": 48}, {}),
    "dbrx": ("DbrxForCausalLM", TWO
        | {"num_key_value_heads": None, "intermediate_size": None, "max_position_embeddings": None, "max_seq_len": 64}
        | {"hidden_size": None, "d_model": 32}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 5e5}}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}}, {}),
    # transformers 5.24 has the short factors for texts of any length.
    "phimoe": ("PhimoeForCausalLM", TWO
        | {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2}
        | {"rope_parameters": LONGROPE | WHOLE | {"short_mscale": 1.2, "long_mscale": 1.2}}, {}),
    "apertus": ("ApertusForCausalLM", TWO | {"head_dim": 8, "hidden_act": "xielu"}, {}),
    "ministral3": ("Ministral3ForCausalLM", TWO | {"head_dim": 12, "rope_parameters": TEMPERED}, {}),
    "sarvam_mla": ("DeepseekV3ForCausalLM", TWO | ROUTED | LATENT | {"n_group": 1, "first_k_dense_replace": 1}, {}),
    "youtu": ("YoutuForCausalLM", TWO | LATENT | {"pad_token_id": None}, {}),
}  # fmt: skip
"""Name, with a note after a dash -> class, settings, None for those that the class lacks, and further settings of older
config.json, None for those that it lacks."""


def older(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """config.json as versions before 5 wrote it."""
    config, changes = dict(config), dict(changes)
    config["torch_dtype"] = config.pop("dtype")
    # One style has the rotary positions of each kind of layers alone.
    if not changes.pop("keep", False) and (parameters := config.pop("rope_parameters", None)) is not None:
        full = dict(parameters.get("full_attention", parameters))
        config["rope_theta"] = full.pop("rope_theta")
        if "partial_rotary_factor" in full:
            config["partial_rotary_factor"] = full.pop("partial_rotary_factor")
        config["rope_scaling"] = None if full == {"rope_type": "default"} else full
    return {
        name: value for name, value in (config | changes).items() if name not in changes or changes[name] is not None
    }


def randomise(model: torch.nn.Module) -> None:
    """Weights for which every setting matters: norms, biases and tables are random too."""
    torch.manual_seed(0)
    ends = ("correction_bias", "expert_bias")
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(ends)}
    for name, weight in [*model.named_parameters(), *biases.items()]:
        if weight.ndim == 1:
            base = 0.0 if name.endswith("bias") or float(weight.abs().max()) == 0 else 1.0
            weight.copy_(base + 0.3 * torch.randn(weight.shape))
        else:
            weight.copy_(torch.randn(weight.shape) * 1.5 / weight.shape[-1] ** 0.5)


def opened(folder: Path) -> Any:
    """The model in float32, with its tables of rotary positions made anew."""
    # Falcon's eager attention adds its biases twice.
    kind = "sdpa" if folder.name.startswith("falcon") else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind)
    return model.eval()


def rename_dense(file: Path) -> None:
    """Layers of Kimi Linear without experts by their published names; transformers writes those of experts."""
    tensors, dense = load_file(file), r"\.block_sparse_moe\.(gate|up|down)_proj"
    if any(re.search(dense, name) for name in tensors):
        save_file({re.sub(dense, r".mlp.\1_proj", name): x for name, x in tensors.items()}, file, {"format": "pt"})


@torch.no_grad()
def make(root: Path, name: str) -> None:
    architecture, settings, changes = CASES[name]
    kind, folder, other = getattr(transformers, architecture), root / name, root / f"{name}_published"
    shutil.rmtree(folder, ignore_errors=True)
    given = {setting: value for setting, value in (SIZES | settings).items() if value is not None}
    model = kind(transformers.AutoConfig.for_model(name.partition("-")[0], **given))
    randomise(model)
    # MiniMax' decays follow from the number of a layer; float16 would round them.
    kept = {name: x for name, x in model.half().state_dict().items() if not name.endswith(("slope_rate", "_decay"))}
    model.save_pretrained(folder, state_dict=kept)
    rename_dense(folder / "model.safetensors")
    torch.manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 24))
    model = opened(folder)
    out = model(ids, labels=ids)
    model.generation_config.eos_token_id = None
    greedy = model.generate(ids[:, :16], max_new_tokens=8, do_sample=False)
    published = older(json.loads((folder / "config.json").read_text()), changes)
    (folder / "config_published_style.json").write_text(json.dumps(published, indent=1))
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copytree(folder, other, dirs_exist_ok=True)
    shutil.copy(folder / "config_published_style.json", other / "config.json")
    assert torch.equal(opened(other)(ids).logits, out.logits)
    shutil.rmtree(other)
    tops = model(greedy).logits[:, 15:-1].topk(2).values
    margin = float((tops[..., 0] - tops[..., 1]).min())
    print(name, "std", float(out.logits.std()), "least margin of greedy tokens", margin)
    results = {"input_ids": ids, "logits": out.logits, "loss": out.loss, "greedy": greedy}
    np.savez_compressed(folder / "io.npz", **{key: value.numpy() for key, value in results.items()})


def main(names: list[str]) -> None:
    root = Path("/tmp/families/cases")
    root.mkdir(parents=True, exist_ok=True)
    if FILE.exists():
        with tarfile.open(FILE) as archive:
            archive.extractall(root)
    for name in names or CASES:
        make(root, name)
    with tarfile.open(FILE, "w:xz") as archive:
        for path in sorted(path for path in root.rglob("*") if path.is_file() and path.parent.name in CASES):
            entry = tarfile.TarInfo(str(path.relative_to(root)))
            data = path.read_bytes()
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    print(FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
