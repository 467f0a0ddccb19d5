"""The layout, recomputation and offload to host memory that Megatron-LM's flags describe."""

import re
from collections.abc import Mapping
from math import gcd, prod
from types import MappingProxyType
from typing import Any

from megajax.interop.megatron.flags.hybrid import hybrid_layout
from megajax.interop.megatron.flags.model import hybrid_pattern, layers
from megajax.interop.megatron.flags.reading import Arguments, Settings
from megajax.layers.recompute import PARTS, SELECTIVE, Part, Recompute

STRATEGIES = {"p2p": "ring", "all_gather": "all_gather", "a2a": "all_to_all", "a2a+p2p": "ring+all_to_all"}
SHARDING = {"no_shard": "replicate", "optim": "zero1", "optim_grads": "zero1", "optim_grads_params": "fsdp"}


def model_devices(args: Arguments) -> int:
    """Devices of one copy of the model."""
    sizes = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    product = 1
    for name in sizes:
        product *= max(args[name], 1)
    return product


def parallel(args: Arguments) -> Settings:
    """The settings of the layout."""
    tensor, pipeline = args["tensor-model-parallel-size"], args["pipeline-model-parallel-size"]
    _demand_equal_stages(args, max(pipeline, 1))
    chunks = _virtual_stages(args, max(pipeline, 1))
    if args["sequence-parallel"] and tensor == 1:
        args.remark("sequence-parallel", "is off with --tensor-model-parallel-size 1, as in Megatron-LM")
    if args.devices is not None and args.devices % model_devices(args):
        text = f"the launcher starts {args.devices} processes, not a multiple of a model copy's {model_devices(args)}"
        args.remark("tensor-model-parallel-size", text)
    settings: dict[str, Any] = {
        "parallel.sequence": args["sequence-parallel"] and tensor > 1,
        "parallel.data_sharding": _sharding(args),
        "parallel.schedule": "interleaved" if chunks > 1 else "1f1b",
        "parallel.virtual_stages": chunks,
    }
    settings |= _context(args)
    settings |= _experts(args, max(tensor, 1))
    settings |= _groups(args, settings)
    layers_per_chunk = _layers_per_chunk(args, max(pipeline, 1), chunks)
    return settings | ({"parallel.layers": layers_per_chunk} if layers_per_chunk else {}) | dict(hybrid_layout(args))


def _context(args: Arguments) -> Settings:
    """The settings of context parallelism."""
    size, kind, groups = args["context-parallel-size"], "cp-comm-type", "hierarchical-context-parallel-sizes"
    if size < 2 or not args.is_given(kind):
        # Megatron-LM's ring and the default here, a gather, give the same numbers.
        return {}
    # Megatron-LM's library calls it all_gather, its help allgather.
    strategies = {"allgather": "all_gather", **STRATEGIES}
    names = dict.fromkeys(args[kind] or ["p2p"])
    if unknown := [name for name in names if name not in strategies]:
        args.problem(kind, f"expected one of {', '.join(STRATEGIES)}, got {' '.join(unknown)}")
        return {}
    settings = {"parallel.context_strategy": strategies[next(iter(names))]}
    if len({strategies[name] for name in names}) > 1:
        args.refuse(kind, "all layers have one strategy: give one")
    if "a2a+p2p" not in names:
        return settings
    if args.is_given(groups) and args[groups]:
        levels = args.numbers(groups)
        if levels and prod(levels) != size:
            product = f"{' x '.join(map(str, levels))} = {prod(levels)}"
            args.problem(
                groups, f"{product}, but --context-parallel-size is {size}", "give two sizes with that product"
            )
        elif levels and len(levels) != 2:
            args.refuse(groups, f"must have two levels, heads and ring, not {len(levels)}")
        return settings | ({"parallel.context_heads": levels[0]} if levels else {})
    args.problem(kind, "a2a+p2p needs --hierarchical-context-parallel-sizes", "give both sizes: heads, then ring")
    return settings


def _experts(args: Arguments, tensor: int) -> Settings:
    """The settings of expert parallelism. With --expert-tensor-parallel-size 1, Megatron-LM's expert size includes the
    tensor axis."""
    name, expert = "expert-tensor-parallel-size", args["expert-model-parallel-size"]
    expert_tensor = tensor if args[name] is None else args[name]
    if expert_tensor == tensor:
        return {"parallel.expert": expert}
    if expert_tensor != 1:
        args.refuse(name, f"experts are sharded over all {tensor} devices of the tensor axis or none: {tensor} or 1")
    elif expert % tensor:
        args.refuse(name, f"--expert-model-parallel-size {expert} is not divisible by the tensor axis of {tensor}")
    else:
        return {"parallel.expert": expert // tensor, "parallel.expert_tensor": "whole"}
    return {}


def _sharding(args: Arguments) -> str:
    if args["use-torch-fsdp2"] and args["torch-fsdp2-no-reshard-after-forward"]:
        args.remark("torch-fsdp2-no-reshard-after-forward", "weights stay gathered within a step, as with zero1")
        return "zero1"
    if args["use-torch-fsdp2"]:
        return "fsdp"
    if args["use-megatron-fsdp"]:
        kind = args.one_of("data-parallel-sharding-strategy", SHARDING)
        if args["data-parallel-sharding-strategy"] == "optim_grads":
            text = "gradients are not sharded until the step's reduction: equal numbers, more memory"
            args.remark("data-parallel-sharding-strategy", text)
        return kind
    return "zero1" if args["use-distributed-optimizer"] else "replicate"


def _groups(args: Arguments, settings: Settings) -> Settings:
    """The size of the groups that shard optimizer state, of which Megatron-LM's flag gives the number."""
    name, model, expert = "num-distributed-optimizer-instances", model_devices(args), settings.get("parallel.expert", 1)
    if (groups := args[name]) == 1:
        return {}
    if settings["parallel.data_sharding"] == "replicate":
        args.problem(name, "needs --use-distributed-optimizer", "give it as well, or leave this flag out")
    elif args.devices is None:
        hint = "leave it out, and set parallel.shards to the data-parallel devices of an instance"
        args.problem(name, "can't be read, because the number of devices is unknown", hint)
    elif groups < 1 or args.devices % (model * expert * groups):
        data = f"{args.devices // model} data-parallel devices"
        experts = f" of --expert-model-parallel-size {expert}" if expert > 1 else ""
        args.problem(name, f"does not divide the {data}{experts}: {groups}", "give a divisor")
    else:
        return {"parallel.shards": args.devices // (model * expert * groups)}
    return {}


def _demand_equal_stages(args: Arguments, pipeline: int) -> None:
    """Without flags for it, Megatron-LM has no stages of different sizes."""
    uneven = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout")
    added = sum(args[f"account-for-{part}-in-pipeline-split"] for part in ("embedding", "loss"))
    count = args["num-layers"]
    if count is None or hybrid_pattern(args) is not None or any(args[name] is not None for name in uneven):
        return
    if (count + added) % pipeline:
        sizes = f"{count} layers{f' and {added} for embedding and loss' if added else ''}"
        message = f"Megatron-LM refuses {sizes} on {pipeline} stages: the number of layers has to be divisible by it"
        hint = (
            f"give --pipeline-model-parallel-size {gcd(count + added, pipeline)}, or --decoder-last-pipeline-num-layers"
        )
        args.problem("pipeline-model-parallel-size", message, hint)


def _virtual_stages(args: Arguments, pipeline: int) -> int:
    """The number of chunks of each stage."""
    if args["num-virtual-stages-per-pipeline-rank"] is not None:
        return args["num-virtual-stages-per-pipeline-rank"]
    chunk_layers = args["num-layers-per-virtual-pipeline-stage"]
    if args["pipeline-model-parallel-layout"] is not None:
        count = len(_layout(args["pipeline-model-parallel-layout"]))
        if count % pipeline:
            text = f"{count} stages are not a multiple of --pipeline-model-parallel-size {pipeline}"
            args.problem("pipeline-model-parallel-layout", text)
        return max(count // pipeline, 1)
    if chunk_layers is None:
        return 1
    split_flags = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    total = layers(args) + sum(args[name] for name in split_flags)
    if chunk_layers < 1 or total % (pipeline * chunk_layers):
        message = f"{total} layers are not a multiple of {chunk_layers} x --pipeline-model-parallel-size {pipeline}"
        args.problem("num-layers-per-virtual-pipeline-stage", message)
        return 1
    return total // (pipeline * chunk_layers)


def _layers_per_chunk(args: Arguments, pipeline: int, chunks: int) -> tuple[int, ...] | None:
    """Layers of each chunk, if the flags give them one by one."""
    if (layout := args["pipeline-model-parallel-layout"]) is not None:
        layer_counts = tuple(stage.count("t") for stage in _layout(layout))
        if 0 in layer_counts:
            text = "stages without layers are not supported or needed: all stages share embedding and loss"
            args.refuse("pipeline-model-parallel-layout", text)
            return None
        return layer_counts
    first, last = args["decoder-first-pipeline-num-layers"], args["decoder-last-pipeline-num-layers"]
    end_sizes = [size for size in (first, last) if size is not None]
    if not end_sizes:
        return None
    between, rest = pipeline - len(end_sizes), layers(args) - sum(end_sizes)
    name = "decoder-first-pipeline-num-layers" if first is not None else "decoder-last-pipeline-num-layers"
    if between < 0 or (rest % between if between else rest) or rest < between:
        args.problem(name, f"leaves {rest} layers, which can't be split evenly over {between} stages")
        return None
    middle = [rest // between] * between if between else []
    stages = [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]
    if any(size % chunks for size in stages):
        args.problem(
            name, f"stages of {', '.join(map(str, stages))} layers are not divisible by {chunks} virtual stages"
        )
        return None
    return tuple(size // chunks for size in stages) * chunks


def _layout(text: str) -> list[str]:
    """Et*3|(tt|)*2L -> Ettt, tt, tt, L: the letters of each stage."""
    text = re.sub(r"[\s,]", "", text)
    while match := re.search(r"\(([^()]*)\)(?:\*(\d+))?", text):
        text = text[: match.start()] + match[1] * min(int(match[2] or 1), 10_000) + text[match.end() :]
    return re.sub(r"(\w)\*(\d+)", lambda match: match[1] * min(int(match[2]), 10_000), text).split("|")


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
