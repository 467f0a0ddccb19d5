"""Mixtures of experts from Megatron-LM's flags."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from megajax.layers.config import (
    CapacityConfig,
    DispatchConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
)
from megajax.tools.flags import Arguments

LOSSES: Mapping[str, str] = MappingProxyType(
    {"aux_loss": "aux_loss", "seq_aux_loss": "row_loss", "global_aux_loss": "global_loss"}
)
"""Megatron-LM's kinds of balancing -> settings of RouterConfig."""
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
    """The layer with experts. mlp: that of layers without them, whose width is the experts' where no other is given."""
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
    """Numbers are the same whatever the way, so without the flag it is the one that sends fewest bytes."""
    way = args.one_of("moe-token-dispatcher-type", WAYS) if args.given("moe-token-dispatcher-type") else "auto"
    if args.given("moe-token-dispatcher-type") and way == "auto":
        args.remark("moe-token-dispatcher-type", "tokens go the way that sends fewest bytes: the numbers are the same")
    return DispatchConfig(way=way, room=args["moe-expert-rank-capacity-factor"])


def _router(args: Arguments, bias: bool) -> RouterConfig:
    """bias: whether matrices have biases, which routers then have too."""
    kinds, losses = _balancing(args)
    sinkhorn, score = "sinkhorn" in kinds, args.one_of("moe-router-score-function", SCORES)
    groups, chosen = args["moe-router-num-groups"], args["moe-router-group-topk"]
    rate = args["moe-router-bias-update-rate"] if args["moe-router-enable-expert-bias"] else None
    return RouterConfig(
        score=score,
        # Scores that are no softmax are divided by their sum either way.
        normalise="all" if args["moe-router-pre-softmax"] and score == "softmax" else "chosen",
        # Weights that sinkhorn chose have no factor there.
        scale=1.0 if sinkhorn else args["moe-router-topk-scaling-factor"] or 1.0,
        groups=groups if chosen else None,
        chosen_groups=chosen if groups else None,
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
    """Kinds of balancing, and the coefficients of those that are losses."""
    name, coefficient = "moe-router-load-balancing-type", "moe-aux-loss-coeff"
    kinds, words = args[name], args[coefficient]
    try:
        values = [float(word) for word in words]
    except ValueError:
        args.wrong(coefficient, f"expected numbers, got {' '.join(words)}")
        return [], {}
    if len(values) == 1:
        values *= len(kinds)
    if len(values) != len(kinds):
        args.wrong(coefficient, f"{len(values)} coefficients of {len(kinds)} kinds in --{name} {' '.join(kinds)}")
        return [], {}
    for kind in set(kinds) - {*LOSSES, *NO_LOSS}:
        what = f"expected {', '.join((*LOSSES, *NO_LOSS))}, got {kind}"
        (args.refuse if kind.startswith("quantile") else args.wrong)(name, what)
    return kinds, {LOSSES[kind]: value for kind, value in zip(kinds, values, strict=True) if kind in LOSSES}


def _capacity(args: Arguments) -> CapacityConfig | None:
    """None where no token is dropped, which a factor below 0 says too."""
    factor = args["moe-expert-capacity-factor"]
    if factor is None or factor < 0:
        return None
    drop = args.one_of("moe-token-drop-policy", DROPS)
    if drop == "position":
        args.remark("moe-token-drop-policy", "the last tokens are dropped; there it is any that torch.topk leaves out")
    return CapacityConfig(factor=factor, drop=drop)
