"""Where rows come from, from Megatron-LM's flags."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.data.config import BlendConfig, ChatConfig, CyclicConfig, FillInMiddleConfig, LoaderConfig, MockConfig
from megajax.data.splits import NAMES, parse_paths
from megajax.tools.flags import Arguments, Settings
from megajax.tools.megatron_model import needed


def data(args: Arguments) -> Settings:
    """Where rows come from, and their order."""
    return ordered(args, _source(args))


def ordered(args: Arguments, settings: dict[str, Any]) -> Settings:
    """Settings of data, with the order of --dataloader-type."""
    order = args["dataloader-type"]
    if order == "cyclic":
        args.remark("dataloader-type", "the order depends on the number of data-parallel devices, as there")
        cyclic = CyclicConfig(buckets=not args["no-data-sharding"])
        settings["data"] = replace(settings["data"], loader=LoaderConfig(cyclic=cyclic))
    elif order != "single":
        args.refuse("dataloader-type", "single and cyclic are the orders of rows; other data is a config of your own")
    return settings


def _source(args: Arguments) -> dict[str, Any]:
    isolated = args["dataloader-inter-document-masking"]
    if args["mock-data"]:
        return {"data": MockConfig(isolate_documents=isolated)}
    if args["sft"]:
        return {"data": _chats(args)}
    shared: dict[str, Any] = {
        "cache_dir": args["data-cache-path"],
        "reset_positions": args["reset-position-ids"],
        "reset_attention_mask": args["reset-attention-mask"],
        "eod_mask_loss": args["eod-mask-loss"],
        "isolate_documents": isolated,
        "surplus": args["mid-level-dataset-surplus"],
    }
    if args["reset-attention-mask"]:
        args.remark("reset-attention-mask", "documents are kept apart here; Megatron-LM's fused attention ignores it")
    kind: type[BlendConfig] = BlendConfig
    if args["fim-data"]:
        kind, shared = FillInMiddleConfig, shared | _fill_in_middle(args)
    return files(args, kind, shared)


def files(args: Arguments, kind: Callable[..., Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Data of this kind from the files that the flags name; shared: its settings besides those."""
    apart: dict[str, Any] = {
        f"{split}_paths": tuple(args[f"{split}-data-path"] or ()) for split in ("train", "valid", "test")
    }
    apart |= _split_file(args)
    if any(apart.values()):
        sets = {}
        if args["multiple-validation-sets"]:
            configs = {name: kind(valid_paths=(path,), **shared) for name, path in _sets(args, apart).items()}
            sets, apart["valid_paths"] = {"evaluation.sets": configs}, ()
        return {"data": kind(**apart, **shared), **sets}
    paths = args["data-path"] or _words_of(args, "data-args-path")
    if not paths:
        args.wrong("data-path", "no data: give it, --train-data-path or --mock-data")
    return {"data": kind(paths=tuple(paths or ("unset",)), split=re.sub(r"[\s'\"]", "", args["split"]), **shared)}


FORMATS = ("identity", "nemotron-h-aligned", "nemotron-nano-v2")
"""Values of --sft-tokenizer-prompt-format that name a template here, too."""


def _chats(args: Arguments) -> ChatConfig:
    """Conversations, a row for each line, with Megatron-LM's rules of loss."""
    form, model = args["sft-tokenizer-prompt-format"], args["tokenizer-model"]
    if form not in (*FORMATS, "default"):
        args.refuse("sft-tokenizer-prompt-format", f"this version has default, {', '.join(FORMATS)}")
    own = str(Path(model or "unset") / "tokenizer_config.json")
    if form == "default":
        text = f"the template is that of {own}; the whole text is learned, questions too, as there"
        args.remark("sft-tokenizer-prompt-format", text)
    text = "rows are lines, and no loss falls on the pad token, as there: see data.packing and data.mask_pad"
    args.remark("sft", text)
    lists: dict[str, Any] = {}
    for setting, flag in [("paths", "data-path"), *((f"{name}_paths", f"{name}-data-path") for name in NAMES)]:
        lists[setting], weights = parse_paths(args[flag]) if args[flag] else ((), None)
        if weights is not None and len(weights) > 1:
            args.refuse(flag, "conversations are not blended by weights: give the files alone")
    if not any(lists.values()):
        args.wrong("data-path", "no data: give it, or --train-data-path")
        lists["paths"] = ("unset",)
    return ChatConfig(
        **lists,
        split=re.sub(r"[\s'\"]", "", args["split"]),
        template=form if form in FORMATS else own,
        loss="all" if form == "default" else "answers",
        packing="lines",
        isolate_padding=False,
        cut_long=True,
        mask_pad=True,
        cache_dir=args["data-cache-path"],
    )


def _fill_in_middle(args: Arguments) -> dict[str, Any]:
    """Documents with their middle at the end."""
    text = "each row draws its own random numbers; data.sequential_draws=true has those of Megatron-LM without workers"
    args.remark("fim-data", text)
    settings = {
        "rate": args["fim-rate"],
        "spm_rate": args["fim-spm-rate"],
        "unchanged_prefix": args["fim-no-prefix"],
        **{f"{name}_token": args[f"fim-{name}-token"] for name in ("prefix", "middle", "suffix")},
    }
    if args["fim-split-sample"] is not None:
        settings["fragment_token"] = args["fim-split-sample"]
        settings["fragment_rate"] = needed(args, "fim-fragment-rate")
    return settings


def _sets(args: Arguments, apart: dict[str, Any]) -> dict[str, str]:
    """Validation sets apart: a name of each -> its prefix."""
    paths, weights = parse_paths(apart["valid_paths"] or ("unset",))
    if weights is not None or not apart["valid_paths"]:
        args.wrong("multiple-validation-sets", "wants --valid-data-path with prefixes alone, without weights")
    names = [re.sub(r"[^\w.-]", "_", Path(path).name) or "set" for path in paths]
    return {name if names.count(name) == 1 else f"{name}.{n}": path
            for n, (name, path) in enumerate(zip(names, paths, strict=True))}  # fmt: skip


def _words_of(args: Arguments, name: str) -> list[str]:
    """The words of the file that a flag names."""
    if args[name] is None:
        return []
    try:
        return Path(args[name]).expanduser().read_text(encoding="utf-8").split()
    except OSError as error:
        args.wrong(name, f"{args[name]} cannot be read: {error.strerror}", "give what it holds by --data-path")
        return []


def _split_file(args: Arguments) -> dict[str, Any]:
    name = "per-split-data-args-path"
    words = " ".join(_words_of(args, name))
    try:
        lists = json.loads(words or "{}")
        return {f"{split}_paths": tuple(map(str, lists[split] or ())) for split in ("train", "valid", "test")
                if split in lists}  # fmt: skip
    except (ValueError, TypeError) as error:
        args.wrong(name, f"{args[name]} is no JSON file of lists named train, valid and test: {error}")
        return {}
