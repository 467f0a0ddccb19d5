"""What Megatron-LM's flags say of recomputation, and of what waits in host memory."""

from collections.abc import Mapping
from types import MappingProxyType

from megajax.layers.remat import PARTS, SELECTIVE, Part, Recompute
from megajax.tools.flags import Arguments, Settings

MODULES: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "core_attn": (),
        "layernorm": ("norm",),
        "moe_act": ("activation",),
        "mla_up_proj": ("query_key_value",),
        "mlp": ("mlp", "activation"),
        "moe": ("mlp", "activation"),
        "shared_experts": ("mlp", "activation"),
    }
)
"""What modules that Megatron-LM computes again are here; attention scores are never kept."""

MOVED: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "attn_norm": ("input",),
        "qkv_linear": (),
        "core_attn": ("query_key_value",),
        "attn_proj": ("core_attention",),
        "mlp_norm": ("residual",),
        "expert_fc1": (),
        "moe_act": ("mlp",),
    }
)
"""What inputs of modules that Megatron-LM moves to host memory are here; outputs of norms are not kept at all."""


def recompute(args: Arguments) -> Settings:
    """Nothing unless asked for; what modules keep, and where."""
    again = args["recompute-activations"] or args["moe-layer-recompute"]
    kind = args["recompute-granularity"] or ("selective" if again else None)
    if kind not in (None, "selective", "full"):
        args.wrong("recompute-granularity", f"expected selective or full, got {kind}")
    whole = args["use-megatron-fsdp"] and args["data-parallel-sharding-strategy"] == "optim_grads_params"
    torch = args["use-torch-fsdp2"] and not args["torch-fsdp2-no-reshard-after-forward"]
    if kind is None and (whole or torch):
        # Kept whole for the backward pass, gathered weights would be all of them.
        name = "use-megatron-fsdp" if whole else "use-torch-fsdp2"
        args.remark(name, "goes with model.recompute=selective here, which gathers weights again and changes no number")
        kind = "selective"
    away = {part for name in offloaded_modules(args) for part in MOVED[name]}
    if away and kind is None:
        args.remark("offload-modules", "goes with model.recompute=selective here, which keeps tensors by name")
        kind = "selective"
    settings: Settings = {"model.recompute": kind or "none", "model.offload": tuple(p for p in PARTS if p in away)}
    if kind == "selective":
        settings["model.recompute"] = modules_again(args)
    elif kind == "full":
        settings |= layers_again(args)
    return settings


def modules_again(args: Arguments) -> Recompute:
    """The parts that selective recomputation computes again."""
    names = [*args["recompute-modules"], *["moe"] * args["moe-layer-recompute"]]
    for name in set(names) - set(MODULES):
        args.refuse("recompute-modules", f"{name}: there are no such layers in this version")
    known = [name for name in names if name in MODULES]
    again = set(SELECTIVE).union(*(MODULES[name] for name in known))
    if "mla_up_proj" in known:
        again.remove("latent")
    if not {"layernorm", "moe_act"} <= set(known):
        args.remark("recompute-modules", "norms and activations are computed again too, which costs little")
    return "selective" if again == set(SELECTIVE) else tuple(part for part in PARTS if part in again)


def layers_again(args: Arguments) -> Settings:
    """Which layers full recomputation takes together, or leaves out."""
    count, method = args["recompute-num-layers"] or 1, args["recompute-method"]
    if method not in (None, "uniform", "block"):
        args.wrong("recompute-method", f"expected uniform or block, got {method}")
    if method == "block":
        args.remark("recompute-method", "the other layers of a stage compute norms and activations again")
        return {"model.recompute_layers": count}
    return {"model.layers_per_checkpoint": count}


def offloaded_modules(args: Arguments) -> list[str]:
    """Those whose inputs go to host memory."""
    if not args["fine-grained-activation-offloading"]:
        return []
    names = args["offload-modules"] or []
    for name in names:
        if name not in MOVED:
            args.wrong("offload-modules", f"expected {', '.join(MOVED)}, got {name}")
        elif not MOVED[name]:
            args.remark("offload-modules", f"{name} reads a norm's output, which is computed again, not kept")
    return [name for name in names if name in MOVED]
