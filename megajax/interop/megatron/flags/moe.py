"""Mixtures of experts from Megatron-LM's flags."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from megajax.interop.megatron.flags.reading import Arguments
from megajax.layers.mlp.config import MLPConfig
from megajax.layers.moe.config import CapacityConfig, DispatchConfig, MoEConfig, RouterConfig, SharedExpertConfig

LOSSES: Mapping[str, str] = MappingProxyType(
    {"aux_loss": "aux_loss", "seq_aux_loss": "row_loss", "global_aux_loss": "global_loss"}
)
"""Megatron-LM's kinds of load balancing -> settings of RouterConfig."""
NO_LOSS = ("none", "sinkhorn")
SCORES: Mapping[str, Literal["softmax", "sigmoid", "sqrt_softplus"]] = MappingProxyType(
    {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
)
WAYS: Mapping[str, Literal["auto", "gather"]] = MappingProxyType(
    {"allgather": "gather", "alltoall": "auto", "flex": "auto"}
)
DROPS: Mapping[str, Literal["probability", "position"]] = MappingProxyType(
    {"probs": "probability", "position": "position"}
)


def mixture(args: Arguments, mlp: MLPConfig) -> MoEConfig:
    """The layer with experts. mlp: the MLP of dense layers; its width is the default width of experts."""
    shared = args["moe-shared-expert-intermediate-size"]
    return MoEConfig(
        experts=args["num-experts"],
        top_k=args["moe-router-topk"],
        expert=replace(mlp, ffn=args["moe-ffn-hidden-size"] or mlp.ffn),
        router=_router(args, mlp.bias),
        shared=SharedExpertConfig(mlp=replace(mlp, ffn=shared), gate=args["moe-shared-expert-gate"])
        if shared
        else None,
        latent=args["moe-latent-size"],
        dispatch=_dispatch(args),
    )


def _dispatch(args: Arguments) -> DispatchConfig:
    """The dispatcher. All give equal numbers, so the default is the one that sends the fewest bytes."""
    way = args.one_of("moe-token-dispatcher-type", WAYS) if args.is_given("moe-token-dispatcher-type") else "auto"
    if args.is_given("moe-token-dispatcher-type") and way == "auto":
        args.remark(
            "moe-token-dispatcher-type", "the dispatcher that sends the fewest bytes is used: the numbers are equal"
        )
    return DispatchConfig(way=way, room=args["moe-expert-rank-capacity-factor"])


def _router(args: Arguments, bias: bool) -> RouterConfig:
    """The router. bias: whether matrices, and so routers, have biases."""
    kinds, losses = _balancing(args)
    sinkhorn, score = "sinkhorn" in kinds, args.one_of("moe-router-score-function", SCORES)
    groups, top_groups = args["moe-router-num-groups"], args["moe-router-group-topk"]
    rate = args["moe-router-bias-update-rate"] if args["moe-router-enable-expert-bias"] else None
    if args["calculate-per-token-loss"] and (any(losses.values()) or args["moe-z-loss-coeff"]):
        message = "losses of routers are means over positions; Megatron-LM multiplies them by positions / labels"
        args.remark("calculate-per-token-loss", message)
    return RouterConfig(
        score=score,
        # Other scores than softmax are divided by their sum in both cases.
        normalise="all" if args["moe-router-pre-softmax"] and score == "softmax" else "chosen",
        # Megatron-LM does not scale weights that Sinkhorn balancing chose.
        scale=1.0 if sinkhorn else args["moe-router-topk-scaling-factor"] or 1.0,
        groups=groups if top_groups else None,
        chosen_groups=top_groups if groups else None,
        bias=bias,
        balance_rate=rate,
        z_loss=args["moe-z-loss-coeff"] or 0.0,
        jitter=args["moe-input-jitter-eps"] or 0.0,
        sinkhorn=sinkhorn,
        force_balance=args["moe-router-force-load-balancing"],
        capacity=_capacity(args),
        **losses,
    )


def _balancing(args: Arguments) -> tuple[list[str], dict[str, Any]]:
    """The kinds of load balancing, and the coefficients of balancing losses."""
    name, coefficient = "moe-router-load-balancing-type", "moe-aux-loss-coeff"
    kinds, texts = args[name], args[coefficient]
    try:
        values = [float(text) for text in texts]
    except ValueError:
        args.problem(coefficient, f"expected numbers, got {' '.join(texts)}")
        return [], {}
    if len(values) == 1:
        values *= len(kinds)
    if len(values) != len(kinds):
        args.problem(coefficient, f"{len(values)} coefficients for {len(kinds)} kinds in --{name} {' '.join(kinds)}")
        return [], {}
    for kind in set(kinds) - {*LOSSES, *NO_LOSS}:
        message = f"expected {', '.join((*LOSSES, *NO_LOSS))}, got {kind}"
        (args.refuse if kind.startswith("quantile") else args.problem)(name, message)
    return kinds, {LOSSES[kind]: value for kind, value in zip(kinds, values, strict=True) if kind in LOSSES}


def _capacity(args: Arguments) -> CapacityConfig | None:
    """The capacity of experts. None: no token is dropped, as with a factor below 0."""
    factor = args["moe-expert-capacity-factor"]
    if factor is None or factor < 0:
        return None
    drop = args.one_of("moe-token-drop-policy", DROPS)
    if drop == "position":
        args.remark(
            "moe-token-drop-policy", "drops the last tokens; Megatron-LM drops those that torch.topk leaves out"
        )
    return CapacityConfig(factor=factor, drop=drop)
