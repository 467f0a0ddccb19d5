"""Data settings from Megatron-LM's flags."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.config.budget import parse_json
from megajax.data.configs import BlendConfig, ChatConfig, CyclicConfig, FillInMiddleConfig, LoaderConfig, MockConfig
from megajax.data.rows.splits import NAMES, parse_paths
from megajax.interop.megatron.flags.model import needed
from megajax.interop.megatron.flags.reading import Arguments, Settings
from megajax.tokenizers.chat_template import named_tokens


def data(args: Arguments) -> Settings:
    """The data set and the order of its rows."""
    return ordered(args, _source(args))


def ordered(args: Arguments, settings: dict[str, Any]) -> Settings:
    """`settings` of data, with the order of --dataloader-type."""
    order = args["dataloader-type"]
    if order == "cyclic":
        args.remark("dataloader-type", "the order depends on the number of data-parallel devices, as in Megatron-LM")
        cyclic = CyclicConfig(buckets=not args["no-data-sharding"])
        settings["data"] = replace(settings["data"], loader=LoaderConfig(cyclic=cyclic))
    elif order != "single":
        args.refuse(
            "dataloader-type", "only single and cyclic are supported; write a data config of your own for other orders"
        )
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
        args.remark("reset-attention-mask", "documents are isolated here; Megatron-LM's fused attention ignores it")
    dataset: type[BlendConfig] = BlendConfig
    if args["fim-data"]:
        dataset, shared = FillInMiddleConfig, shared | _fill_in_middle(args)
    return files(args, dataset, shared)


def files(args: Arguments, dataset: Callable[..., Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """A data config of class `dataset` with the files that the flags name; shared: its other settings."""
    split_paths: dict[str, Any] = {
        f"{split}_paths": tuple(args[f"{split}-data-path"] or ()) for split in ("train", "valid", "test")
    }
    split_paths |= _split_file(args)
    if any(split_paths.values()):
        sets = {}
        if args["multiple-validation-sets"]:
            configs = {name: dataset(valid_paths=(path,), **shared) for name, path in _sets(args, split_paths).items()}
            sets, split_paths["valid_paths"] = {"evaluation.sets": configs}, ()
        return {"data": dataset(**split_paths, **shared), **sets}
    paths = args["data-path"] or _words_of(args, "data-args-path")
    if not paths:
        args.problem("data-path", "no data: give --data-path, --train-data-path or --mock-data")
    return {"data": dataset(paths=tuple(paths or ("unset",)), split=re.sub(r"[\s'\"]", "", args["split"]), **shared)}


FORMATS: Mapping[str, str] = {
    "identity": "<unk>",
    "nemotron-h-aligned": "<SPECIAL_233>",
    "nemotron-nano-v2": "<unk>",
}
"""Value of --sft-tokenizer-prompt-format that is also the name of a template here -> its pad token."""


def _chats(args: Arguments) -> ChatConfig:
    """Conversations, one row for each line, with Megatron-LM's loss mask."""
    prompt_format, model = args["sft-tokenizer-prompt-format"], args["tokenizer-model"]
    if prompt_format not in (*FORMATS, "default"):
        args.refuse("sft-tokenizer-prompt-format", f"supported formats: default, {', '.join(FORMATS)}")
    template_file, pad_token = str(Path(model or "unset") / "tokenizer_config.json"), FORMATS.get(prompt_format)
    if prompt_format == "default":
        names = named_tokens(Path(template_file))
        pad_token = names.get("pad_token", names.get("eos_token"))
        text = f"the template is read from {template_file}; the loss covers questions too, as in Megatron-LM"
        args.remark("sft-tokenizer-prompt-format", text)
    if prompt_format == "identity":
        args.remark("sft-tokenizer-prompt-format", "Megatron-LM 0.19.2 has a loss on questions too: set data.loss=all")
    text = "one row for each line, pad tokens without loss, and no end token beyond the template's, as in Megatron-LM"
    args.remark("sft", f"{text}: see data.packing, data.mask_pad and data.end_token")
    lists: dict[str, Any] = {}
    for setting, flag in [("paths", "data-path"), *((f"{name}_paths", f"{name}-data-path") for name in NAMES)]:
        lists[setting], weights = parse_paths(args[flag]) if args[flag] else ((), None)
        if weights is not None and len(weights) > 1:
            args.refuse(flag, "conversations can't be blended by weights: give only the files")
    if not any(lists.values()):
        args.problem("data-path", "no data: give --data-path or --train-data-path")
        lists["paths"] = ("unset",)
    return ChatConfig(
        **lists,
        split=re.sub(r"[\s'\"]", "", args["split"]),
        template=prompt_format if prompt_format in FORMATS else template_file,
        loss="all" if prompt_format == "default" else "answers",
        end_token="template",
        packing="lines",
        pad_token=pad_token,
        isolate_padding=False,
        cut_long=True,
        mask_pad=True,
        cache_dir=args["data-cache-path"],
    )


def _fill_in_middle(args: Arguments) -> dict[str, Any]:
    """The settings of fill-in-the-middle."""
    text = "each row has its own random numbers; data.sequential_draws=true draws those of Megatron-LM without workers"
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


def _sets(args: Arguments, split_paths: dict[str, Any]) -> dict[str, str]:
    """Validation sets that are evaluated separately: name -> prefix."""
    paths, weights = parse_paths(split_paths["valid_paths"] or ("unset",))
    if weights is not None or not split_paths["valid_paths"]:
        args.problem("multiple-validation-sets", "needs --valid-data-path with prefixes and no weights")
    names = [re.sub(r"[^\w.-]", "_", Path(path).name) or "set" for path in paths]
    return {name if names.count(name) == 1 else f"{name}.{n}": path
            for n, (name, path) in enumerate(zip(names, paths, strict=True))}  # fmt: skip


def _words_of(args: Arguments, name: str) -> list[str]:
    """The whitespace-separated words of the file that a flag names."""
    if args[name] is None:
        return []
    try:
        return Path(args[name]).expanduser().read_text(encoding="utf-8").split()
    except OSError as error:
        args.problem(name, f"{args[name]} cannot be read: {error.strerror}", "give its contents to --data-path")
        return []


def _split_file(args: Arguments) -> dict[str, Any]:
    name = "per-split-data-args-path"
    text = " ".join(_words_of(args, name))
    try:
        lists = parse_json(text or "{}")
        return {f"{split}_paths": tuple(map(str, lists[split] or ())) for split in ("train", "valid", "test")
                if split in lists}  # fmt: skip
    except (ValueError, TypeError) as error:
        args.problem(name, f"{args[name]} is not a JSON file with the lists train, valid and test: {error}")
        return {}
