"""The layout that Megatron-LM's flags describe."""

import re
from math import prod
from typing import Any

from megajax.tools.flags import Arguments, Settings
from megajax.tools.megatron_hybrid import hybrid_cut
from megajax.tools.megatron_model import layers

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
    """The layout."""
    tensor, pipeline = args["tensor-model-parallel-size"], args["pipeline-model-parallel-size"]
    chunks = _virtual_stages(args, max(pipeline, 1))
    if args["sequence-parallel"] and tensor == 1:
        args.remark("sequence-parallel", "is off with --tensor-model-parallel-size 1, there as here")
    if args.devices is not None and args.devices % model_devices(args):
        text = f"the launcher starts {args.devices} processes, which copies of {model_devices(args)} do not divide"
        args.remark("tensor-model-parallel-size", text)
    settings: dict[str, Any] = {
        "parallel.sequence": args["sequence-parallel"] and tensor > 1,
        "parallel.data_sharding": _sharding(args),
        "parallel.schedule": "interleaved" if chunks > 1 else "1f1b",
        "parallel.virtual_stages": chunks,
    }
    settings |= _context(args)
    settings |= _experts(args, max(tensor, 1))
    cut = _cut(args, max(pipeline, 1), chunks)
    return settings | ({"parallel.layers": cut} if cut else {}) | dict(hybrid_cut(args))


def _context(args: Arguments) -> Settings:
    """How rows are cut over devices, and how attention reaches the other parts."""
    size, kind, groups = args["context-parallel-size"], "cp-comm-type", "hierarchical-context-parallel-sizes"
    if size < 2 or not args.given(kind):
        # Megatron-LM's ring and the gather that is the default here give the same numbers.
        return {}
    # The name is all_gather in its library and allgather in its help.
    ways = {"allgather": "all_gather", **STRATEGIES}
    words = dict.fromkeys(args[kind] or ["p2p"])
    if unknown := [word for word in words if word not in ways]:
        args.wrong(kind, f"expected one of {', '.join(STRATEGIES)}, got {' '.join(unknown)}")
        return {}
    settings = {"parallel.context_strategy": ways[next(iter(words))]}
    if len({ways[word] for word in words}) > 1:
        args.refuse(kind, "all layers exchange rows in one way: give one")
    if "a2a+p2p" not in words:
        return settings
    if args.given(groups) and args[groups]:
        levels = args.numbers(groups)
        if levels and prod(levels) != size:
            what = f"{' x '.join(map(str, levels))} devices are {prod(levels)}, and --context-parallel-size is {size}"
            args.wrong(groups, what, "give two sizes with that product")
        elif levels and len(levels) != 2:
            args.refuse(groups, f"there are two levels, of heads and of a ring, not {len(levels)}")
        return settings | ({"parallel.context_heads": levels[0]} if levels else {})
    args.wrong(kind, "a2a+p2p needs --hierarchical-context-parallel-sizes", "give both sizes: heads, then ring")
    return settings


def _experts(args: Arguments, tensor: int) -> Settings:
    """Megatron-LM counts the devices of `tensor` among those of experts where these are not cut over it."""
    name, spread = "expert-tensor-parallel-size", args["expert-model-parallel-size"]
    cut = tensor if args[name] is None else args[name]
    if cut == tensor:
        return {"parallel.expert": spread}
    if cut != 1:
        args.refuse(name, f"experts are cut over all {tensor} devices of tensor or over none: {tensor} or 1")
    elif spread % tensor:
        args.refuse(name, f"--expert-model-parallel-size {spread} is not divisible by the {tensor} devices of tensor")
    else:
        return {"parallel.expert": spread // tensor, "parallel.expert_tensor": "whole"}
    return {}


def _sharding(args: Arguments) -> str:
    if args["use-torch-fsdp2"] and args["torch-fsdp2-no-reshard-after-forward"]:
        args.remark("torch-fsdp2-no-reshard-after-forward", "weights are whole within a step: that is zero1")
        return "zero1"
    if args["use-torch-fsdp2"]:
        return "fsdp"
    if args["use-megatron-fsdp"]:
        kind = args.one_of("data-parallel-sharding-strategy", SHARDING)
        if args["data-parallel-sharding-strategy"] == "optim_grads":
            text = "gradients are whole until the step's reduction: the numbers are the same, memory differs"
            args.remark("data-parallel-sharding-strategy", text)
        return kind
    return "zero1" if args["use-distributed-optimizer"] else "replicate"


def _virtual_stages(args: Arguments, pipeline: int) -> int:
    """Chunks of each stage."""
    if args["num-virtual-stages-per-pipeline-rank"] is not None:
        return args["num-virtual-stages-per-pipeline-rank"]
    each = args["num-layers-per-virtual-pipeline-stage"]
    if args["pipeline-model-parallel-layout"] is not None:
        count = len(_layout(args["pipeline-model-parallel-layout"]))
        if count % pipeline:
            text = f"{count} stages are no multiple of --pipeline-model-parallel-size {pipeline}"
            args.wrong("pipeline-model-parallel-layout", text)
        return max(count // pipeline, 1)
    if each is None:
        return 1
    ends = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    total = layers(args) + sum(args[name] for name in ends)
    if each < 1 or total % (pipeline * each):
        what = f"{each} layers x --pipeline-model-parallel-size {pipeline} do not divide the {total} layers"
        args.wrong("num-layers-per-virtual-pipeline-stage", what)
        return 1
    return total // (pipeline * each)


def _cut(args: Arguments, pipeline: int, chunks: int) -> tuple[int, ...] | None:
    """Layers of each chunk where they are said one by one."""
    if (layout := args["pipeline-model-parallel-layout"]) is not None:
        cut = tuple(stage.count("t") for stage in _layout(layout))
        if 0 in cut:
            text = "stages without layers can't be had, nor are they of use: all stages share embedding and loss"
            args.refuse("pipeline-model-parallel-layout", text)
            return None
        return cut
    first, last = args["decoder-first-pipeline-num-layers"], args["decoder-last-pipeline-num-layers"]
    ends = [size for size in (first, last) if size is not None]
    if not ends:
        return None
    between, rest = pipeline - len(ends), layers(args) - sum(ends)
    name = "decoder-first-pipeline-num-layers" if first is not None else "decoder-last-pipeline-num-layers"
    if between < 0 or (rest % between if between else rest) or rest < between:
        args.wrong(name, f"leaves {rest} layers for {between} stages, which do not divide them")
        return None
    middle = [rest // between] * between if between else []
    stages = [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]
    if any(size % chunks for size in stages):
        args.wrong(name, f"stages of {', '.join(map(str, stages))} layers are not divisible by {chunks} virtual stages")
        return None
    return tuple(size // chunks for size in stages) * chunks


def _layout(text: str) -> list[str]:
    """Et*3|(tt|)*2L -> Ettt, tt, tt, L: the letters of each stage."""
    text = re.sub(r"[\s,]", "", text)
    while match := re.search(r"\(([^()]*)\)(?:\*(\d+))?", text):
        text = text[: match.start()] + match[1] * min(int(match[2] or 1), 10_000) + text[match.end() :]
    return re.sub(r"(\w)\*(\d+)", lambda match: match[1] * min(int(match[2]), 10_000), text).split("|")
