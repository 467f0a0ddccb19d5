"""Recomputation and offload to host memory, from Megatron-LM's flags."""

from collections.abc import Mapping
from types import MappingProxyType

from megajax.interop.megatron.flags.reading import Arguments, Settings
from megajax.layers.stack.remat import PARTS, SELECTIVE, Part, Recompute

RECOMPUTED_PARTS: Mapping[str, tuple[Part, ...]] = MappingProxyType(
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
"""Modules that Megatron-LM recomputes -> parts here; attention scores are never saved."""

OFFLOADED_INPUTS: Mapping[str, tuple[Part, ...]] = MappingProxyType(
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
"""Modules whose inputs Megatron-LM moves to host memory -> parts here; outputs of norms are never saved."""


def recompute(args: Arguments) -> Settings:
    """The recomputed parts or layers, and the offloaded parts."""
    selective = args["recompute-activations"] or args["moe-layer-recompute"]
    kind = args["recompute-granularity"] or ("selective" if selective else None)
    if kind is None and args["activations-checkpoint-method"]:
        args.remark("activations-checkpoint-method", "removed from Megatron-LM: read as --recompute-granularity full")
        kind = "full"
    if kind not in (None, "selective", "full"):
        args.problem("recompute-granularity", f"expected selective or full, got {kind}")
    megatron_fsdp = args["use-megatron-fsdp"] and args["data-parallel-sharding-strategy"] == "optim_grads_params"
    torch_fsdp = args["use-torch-fsdp2"] and not args["torch-fsdp2-no-reshard-after-forward"]
    if kind is None and (megatron_fsdp or torch_fsdp):
        # Without recomputation, the gathered weights of all layers would be saved for the backward pass.
        name = "use-megatron-fsdp" if megatron_fsdp else "use-torch-fsdp2"
        args.remark(name, "sets model.recompute=selective here, which gathers weights again; the numbers are equal")
        kind = "selective"
    offloaded = {part for name in offloaded_modules(args) for part in OFFLOADED_INPUTS[name]}
    if offloaded and kind is None:
        args.remark("offload-modules", "sets model.recompute=selective here, which saves tensors by name")
        kind = "selective"
    if kind is None and (parts := _parts_of_fixed_sizes(args)):
        return {"model.recompute": parts, "model.offload": ()}
    settings: Settings = {"model.recompute": kind or "none", "model.offload": tuple(p for p in PARTS if p in offloaded)}
    if kind == "selective":
        settings["model.recompute"] = recomputed_parts(args)
    elif kind == "full":
        settings |= recomputed_layers(args)
    return settings


def _parts_of_fixed_sizes(args: Arguments) -> Recompute | None:
    """What to recompute so that a run without recomputation needs no more memory here than in Megatron-LM."""
    if args["expert-model-parallel-size"] > 1 and args["num-experts"] and args["moe-expert-capacity-factor"] is None:
        text = "experts have room for the worst case, in which all tokens choose those of one device, so their layers"
        text += (
            " are recomputed, which changes no numbers; model.recompute=none saves them, dispatch.room sets the room"
        )
        args.remark("expert-model-parallel-size", text)
        return "norm", "mlp", "activation"
    if args["fp8-param-gather"] and (args["fp8-format"] or args["fp8-hybrid"] or args["fp8-e4m3"]):
        text = "weights are gathered and kept in precision.compute, with a byte more for each: norms and activations"
        text += " are recomputed instead, which costs little and changes no numbers; model.recompute=none saves them"
        args.remark("fp8-param-gather", text)
        return "selective"
    return None


def recomputed_parts(args: Arguments) -> Recompute:
    """The parts that selective recomputation recomputes."""
    names = [*args["recompute-modules"], *["moe"] * args["moe-layer-recompute"]]
    for name in set(names) - set(RECOMPUTED_PARTS):
        args.refuse("recompute-modules", f"{name}: this version has no such layers")
    supported = [name for name in names if name in RECOMPUTED_PARTS]
    parts = set(SELECTIVE).union(*(RECOMPUTED_PARTS[name] for name in supported))
    if "mla_up_proj" in supported:
        parts.remove("latent")
    if not {"layernorm", "moe_act"} <= set(supported):
        args.remark("recompute-modules", "norms and activations are recomputed too, which costs little")
    return "selective" if parts == set(SELECTIVE) else tuple(part for part in PARTS if part in parts)


def recomputed_layers(args: Arguments) -> Settings:
    """The number of layers per checkpoint of full recomputation, or the number of recomputed layers."""
    count, method = args["recompute-num-layers"] or 1, args["recompute-method"] or args["activations-checkpoint-method"]
    if method not in (None, "uniform", "block"):
        args.problem("recompute-method", f"expected uniform or block, got {method}")
    if method == "block":
        args.remark("recompute-method", "the other layers of a stage recompute norms and activations")
        return {"model.recompute_layers": count}
    return {"model.layers_per_checkpoint": count}


def offloaded_modules(args: Arguments) -> list[str]:
    """The modules whose inputs are offloaded to host memory."""
    if not args["fine-grained-activation-offloading"]:
        return []
    names = args["offload-modules"] or []
    for name in names:
        if name not in OFFLOADED_INPUTS:
            args.problem("offload-modules", f"expected {', '.join(OFFLOADED_INPUTS)}, got {name}")
        elif not OFFLOADED_INPUTS[name]:
            args.remark("offload-modules", f"the input of {name} is a norm's output, which is recomputed, not saved")
    return [name for name in names if name in OFFLOADED_INPUTS]
