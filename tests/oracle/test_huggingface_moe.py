"""Hugging Face's mixtures of experts in our decoder: logits, loss and greedy tokens, in float32."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from megatron_cases import Settings, cases, unsupported
from megatron_config import stack_of
from megatron_weights import layer_places
from test_huggingface import (
    GATED,
    Checkpoint,
    Tensors,
    check_case,
    gated,
    kinds,
    llama_attention,
    llama_config,
    llama_rope,
    load_case,
    stacked_layers,
)

from megajax.layers.config import (
    BlockConfig,
    GatedMLPConfig,
    LatentAttentionConfig,
    MoEConfig,
    RMSNormConfig,
    RouterConfig,
    SharedExpertConfig,
)
from megajax.models.config import DecoderConfig

MIXTRAL = ("w1", "w3", "w2")
"""Its names of gate, up and down."""


def with_experts(cfg: DecoderConfig, moe: MoEConfig, dense: set[int]) -> DecoderConfig:
    """dense: numbers of the layers that have none."""
    blocks = [block for _, _, block in layer_places(cfg)]
    mixed = [block if number in dense else replace(block, mlp=moe) for number, block in enumerate(blocks)]
    return replace(cfg, stack=stack_of(mixed))


def mixtral_config(given: Settings) -> DecoderConfig:
    if given.take("router_jitter_noise", 0.0):
        unsupported("random numbers in training")
    moe = MoEConfig(
        experts=given.take("num_local_experts"),
        top_k=given.take("num_experts_per_tok"),
        expert=GatedMLPConfig(ffn=given.left["intermediate_size"]),
    )
    ignore_losses(given)
    return with_experts(llama_config(given), moe, set())


def ignore_losses(given: Settings) -> None:
    for name in ("router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux"):
        given.take(name)


def qwen_config(given: Settings) -> DecoderConfig:
    """Qwen2-MoE and Qwen3-MoE."""
    cfg_layers, every = given.left["num_hidden_layers"], given.take("decoder_sparse_step", 1)
    alone = set(given.take("mlp_only_layers", []))
    dense = {number for number in range(cfg_layers) if number in alone or (number + 1) % every}
    shared = given.take("shared_expert_intermediate_size")
    moe = MoEConfig(
        experts=given.take("num_experts"),
        top_k=given.take("num_experts_per_tok"),
        expert=GatedMLPConfig(ffn=given.take("moe_intermediate_size")),
        router=RouterConfig(normalise="chosen" if given.take("norm_topk_prob", False) else "all"),
        shared=None if shared is None else SharedExpertConfig(mlp=GatedMLPConfig(ffn=shared), gate=True),
    )
    ignore_losses(given)
    given.take("qkv_bias")
    return with_experts(llama_config(given), moe, dense)


def deepseek_config(given: Settings) -> DecoderConfig:
    norm, parameters = RMSNormConfig(epsilon=given.left["rms_norm_eps"]), given.left.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default" or given.left.get("rope_scaling"):
        unsupported("stretched rotary positions of DeepSeek")
    content, place = given.take("qk_nope_head_dim"), given.take("qk_rope_head_dim")
    rope = replace(llama_rope(given), interleaved=given.take("rope_interleave", True))
    given.take("qk_head_dim")
    mixer = LatentAttentionConfig(
        heads=given.left["num_attention_heads"],
        query_rank=given.take("q_lora_rank"),
        key_value_rank=given.take("kv_lora_rank"),
        content_dim=content,
        position_dim=place,
        value_dim=given.take("v_head_dim"),
        bias=given.left.get("attention_bias", False),
        norm=RMSNormConfig(epsilon=1e-6),
        rope=rope,
    )
    groups, chosen, top_k = given.take("n_group", 1), given.take("topk_group", 1), given.take("num_experts_per_tok")
    if groups > 1 and top_k != 2 * chosen:
        unsupported("groups chosen by other numbers of scores than top_k / chosen groups")
    ffn, shared = given.take("moe_intermediate_size"), given.take("n_shared_experts", 0)
    moe = MoEConfig(
        experts=given.take("n_routed_experts"),
        top_k=top_k,
        expert=GatedMLPConfig(ffn=ffn),
        router=RouterConfig(
            score="sigmoid",
            normalise="chosen" if given.take("norm_topk_prob", True) else "all",
            scale=given.take("routed_scaling_factor", 1.0),
            groups=groups if groups > 1 else None,
            chosen_groups=chosen if groups > 1 else None,
            balance_rate=1e-3,
        ),
        shared=SharedExpertConfig(mlp=GatedMLPConfig(ffn=ffn * shared)) if shared else None,
    )
    dense = set(range(given.take("first_k_dense_replace", 0)))
    given.take("num_nextn_predict_layers")  # not in their model
    ignore_losses(given)
    cfg = llama_config(given)
    blocks = [replace(block, mixer=mixer, norm=norm) for _, _, block in layer_places(cfg)]
    return with_experts(replace(cfg, stack=stack_of(blocks)), moe, dense)


def experts(held: Checkpoint, moe: MoEConfig, theirs: str, names: tuple[str, ...]) -> Tensors:
    each = [gated(held, f"{theirs}.experts.{number}", "mlp.experts", names) for number in range(moe.experts)]
    return {
        "mlp.router": held.one(f"{theirs}.gate.weight", np.transpose),
        **{path: np.stack([one[path] for one in each]) for path in each[0]},
    }


def mixtral_layer(cfg: DecoderConfig, block: BlockConfig, held: Checkpoint, layer: str) -> Tensors:
    return llama_attention(cfg, block, held, layer) | experts(held, block.mlp, f"{layer}.block_sparse_moe", MIXTRAL)


def mixture(block: BlockConfig, held: Checkpoint, layer: str, shared: str) -> Tensors:
    """The feed-forward layer. shared: their name of the one for all tokens."""
    if not isinstance(block.mlp, MoEConfig):
        return gated(held, f"{layer}.mlp", "mlp")
    actual = experts(held, block.mlp, f"{layer}.mlp", GATED)
    if block.mlp.shared is not None:
        actual |= gated(held, f"{layer}.mlp.{shared}", "mlp.shared")
        if block.mlp.shared.gate:
            actual["mlp.shared_gate"] = held.one(f"{layer}.mlp.{shared}_gate.weight", np.transpose)
    return actual


def qwen_layer(cfg: DecoderConfig, block: BlockConfig, held: Checkpoint, layer: str) -> Tensors:
    return llama_attention(cfg, block, held, layer) | mixture(block, held, layer, "shared_expert")


def deepseek_layer(cfg: DecoderConfig, block: BlockConfig, held: Checkpoint, layer: str) -> Tensors:
    mixer, name = block.mixer, f"{layer}.self_attn"
    rank, heads, content = mixer.key_value_rank, mixer.heads, mixer.content_dim

    def of_heads(w: np.ndarray) -> np.ndarray:
        return w.T.reshape(w.shape[1], heads, -1)

    down = held.one(f"{name}.kv_a_proj_with_mqa.weight", np.transpose)
    up = held.one(f"{name}.kv_b_proj.weight", of_heads)
    actual = {
        "mixer.down": down[:, :rank],
        "mixer.position_key": down[:, rank:],
        "mixer.key": up[..., :content],
        "mixer.value": up[..., content:],
        "mixer.output": held.one(f"{name}.o_proj.weight", lambda w: w.T.reshape(heads, -1, cfg.hidden)),
    }
    if mixer.query_rank is None:
        actual["mixer.query"] = held.one(f"{name}.q_proj.weight", of_heads)
    else:
        actual["mixer.query_down"] = held.one(f"{name}.q_a_proj.weight", np.transpose)
        actual["mixer.query"] = held.one(f"{name}.q_b_proj.weight", of_heads)
        actual |= held.norm("mixer.query_norm", f"{name}.q_a_layernorm")
    actual |= held.norm("mixer.norm", f"{name}.kv_a_layernorm")
    actual |= held.norm("mixer_norm", f"{layer}.input_layernorm")
    actual |= held.norm("mlp_norm", f"{layer}.post_attention_layernorm")
    return actual | mixture(block, held, layer, "shared_experts")


def read_with(read_layer):
    """(cfg, checkpoint) -> arrays by path; biases that balance experts among them, at the place of the observation."""

    def weights(cfg: DecoderConfig, held: Checkpoint) -> Tensors:
        actual = {"tokens": held.one("model.embed_tokens.weight")}
        actual |= stacked_layers(cfg, lambda layer, block: read_layer(cfg, block, held, layer))
        biases: dict[str, list[np.ndarray]] = {}
        for number, (path, _, _) in enumerate(layer_places(cfg)):
            name = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
            if name in held.tensors:
                bias = held.one(name)
                biases.setdefault(f"{path}.mlp.load.sum", []).append(np.stack([bias, np.zeros_like(bias)]))
        actual |= {path: np.stack(rows) for path, rows in biases.items()}
        return actual | held.norm("norm", "model.norm") | ({} if cfg.tied else {"head": held.one("lm_head.weight")})

    return weights


FAMILIES = {
    "mixtral": (mixtral_config, read_with(mixtral_layer)),
    "qwen2_moe": (qwen_config, read_with(qwen_layer)),
    "qwen3_moe": (qwen_config, read_with(qwen_layer)),
    "deepseek_v3": (deepseek_config, read_with(deepseek_layer)),
}


@pytest.mark.parametrize("case", cases(case for case, kind in kinds().items() if kind in FAMILIES))
def test_checkpoint(case: str, oracle_dir: Path) -> None:
    folder = oracle_dir / "hf" / case
    cfg, arrays = load_case(folder, FAMILIES)
    kept = {path: array for path, array in arrays.items() if path.endswith(".sum")}
    given = json.loads((folder / "config.json").read_text())
    with np.load(folder / "io.npz") as stored:
        # Their balancing loss takes all layers as one; ours is of each layer.
        extra = given["router_aux_loss_coef"] * float(stored["aux_loss"]) if "aux_loss" in stored else 0.0
    params = {path: array for path, array in arrays.items() if path not in kept}
    check_case(case, folder, cfg, params, kept, extra)
