"""Where rows come from, from Megatron-LM's flags."""

import json
import re
from pathlib import Path
from typing import Any

from megajax.data.config import BlendConfig, FillInMiddleConfig, MockConfig
from megajax.data.splits import parse_paths
from megajax.tools.flags import Arguments, Settings
from megajax.tools.megatron_model import needed


def data(args: Arguments) -> Settings:
    """Where rows come from."""
    isolated = args["dataloader-inter-document-masking"]
    if args["dataloader-type"] != "single":
        args.refuse("dataloader-type", "rows are read in one order, that of single")
    if args["mock-data"]:
        return {"data": MockConfig(isolate_documents=isolated)}
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
    kind = BlendConfig
    if args["fim-data"]:
        kind, shared = FillInMiddleConfig, shared | _fill_in_middle(args)
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
