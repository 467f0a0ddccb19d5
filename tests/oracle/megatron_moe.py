"""Megatron-LM's settings of mixtures of experts as MegaJAX configs."""

from dataclasses import replace

from megatron_cases import Settings, unsupported

from megajax.layers.mlp.config import MLPConfig
from megajax.layers.moe.config import CapacityConfig, MoEConfig, RouterConfig, SharedExpertConfig

SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
LOSSES = {"aux_loss": "aux_loss", "seq_aux_loss": "row_loss", "global_aux_loss": "global_loss"}
LOGGED = {
    "load_balancing_loss": "aux",
    "seq_load_balancing_loss": "row",
    "global_load_balancing_loss": "global",
    "z_loss": "z",
}
"""What Megatron-LM logs -> what a router reports."""
WITHOUT_EFFECT = {
    # How tokens reach experts, memory, kernels, precision above float32, logging.
    "moe_token_dispatcher_type", "moe_pad_expert_input_to_capacity", "moe_router_dtype", "moe_shared_expert_overlap",
    "moe_per_layer_logging", "moe_permute_fusion", "moe_router_fusion", "moe_router_aux_loss_fusion",
    "moe_layer_recompute", "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_enable_deepep",
    "moe_flex_dispatcher_backend", "moe_router_padding_for_fp8", "moe_router_padding_for_quantization",
    "moe_use_legacy_grouped_gemm", "moe_extended_tp", "moe_token_dropping",
}  # fmt: skip


def mixtures(core: Settings, mlp: MLPConfig, layers: int) -> list[MLPConfig | MoEConfig]:
    """The feed-forward layer of each layer. mlp: that of the layers without experts."""
    experts, every = core.take("num_moe_experts"), core.take("moe_layer_freq", 1)
    if experts is None:
        for name in [name for name in core.left if name.startswith("moe_")]:
            core.take(name)
        return [mlp] * layers
    one = replace(mlp, ffn=core.take("moe_ffn_hidden_size", mlp.ffn))
    shared, gated = core.take("moe_shared_expert_intermediate_size"), core.take("moe_shared_expert_gate", False)
    moe = MoEConfig(
        experts=experts,
        top_k=core.take("moe_router_topk", 2),
        expert=one,
        router=router(core, mlp.bias),
        shared=None if not shared else SharedExpertConfig(mlp=replace(mlp, ffn=shared), gate=gated),
        latent=core.take("moe_latent_size"),
    )
    core.only("moe_grouped_gemm", False)
    for name in WITHOUT_EFFECT:
        core.take(name)
    return [moe if with_experts else mlp for with_experts in layers_with_experts(every, layers)]


def layers_with_experts(every: int | list[int] | str, layers: int) -> list[bool]:
    """Which layers are mixtures of experts, by `moe_layer_freq`: every n-th from the first, or a list."""
    if isinstance(every, str):
        every = pattern(every)
    if isinstance(every, int):
        return [number % every == 0 for number in range(layers)]
    assert len(every) == layers
    return [bool(one) for one in every]


def pattern(text: str) -> int | list[int]:
    """`([0]*3+[1]*58)` -> a list, as their command line reads it; a number as it is."""
    if text.isdigit():
        return int(text)
    actual: list[int] = []
    for part in text.strip("() ").split("+"):
        inner, _, times = part.strip("() ").partition("*")
        actual += [int(one) for one in inner.strip("[] ").split(",")] * int(times.strip("() ") or 1)
    return actual


def router(core: Settings, bias: bool) -> RouterConfig:
    """bias: whether linear layers have biases; routers then have them too."""
    kinds, weights = core.take("moe_router_load_balancing_type", "aux_loss"), core.take("moe_aux_loss_coeff", 0.0)
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = [weights] * len(kinds) if isinstance(weights, int | float) else list(weights)
    for kind in set(kinds) - {*LOSSES, "none", "sinkhorn"}:
        unsupported(f"moe_router_load_balancing_type={kind}")
    losses = {LOSSES[kind]: float(weight) for kind, weight in zip(kinds, weights, strict=True) if kind in LOSSES}
    score = SCORES.get(named := core.take("moe_router_score_function", "softmax")) or unsupported(f"scores {named}")
    first = core.take("moe_router_pre_softmax", False)
    balanced, rate = core.take("moe_router_enable_expert_bias", False), core.take("moe_router_bias_update_rate", 1e-3)
    groups, chosen = core.take("moe_router_num_groups"), core.take("moe_router_group_topk")
    scale, sinkhorn = core.take("moe_router_topk_scaling_factor") or 1.0, "sinkhorn" in kinds
    factor, policy = core.take("moe_expert_capacity_factor"), core.take("moe_token_drop_policy", "probs")
    return RouterConfig(
        score=score,
        normalise="all" if first and score == "softmax" else "chosen",
        # Their sinkhorn has no factor.
        scale=1.0 if sinkhorn else float(scale),
        groups=groups if chosen else None,
        chosen_groups=chosen if groups else None,
        bias=bias,
        balance_rate=rate if balanced else None,
        z_loss=core.take("moe_z_loss_coeff") or 0.0,
        sinkhorn=sinkhorn,
        capacity=capacity(factor, policy),
        **losses,
    )


def capacity(factor: float | None, policy: str) -> CapacityConfig | None:
    """A factor below 0 is none."""
    if factor is None or factor < 0:
        return None
    if policy != "probs":
        unsupported("tokens dropped by position: theirs are any that torch.topk takes among equals, ours the last")
    return CapacityConfig(factor=factor)
