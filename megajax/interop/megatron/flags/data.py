"""Data and tokenizer settings from Megatron-LM's flags."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.config.read_limits import DOCUMENT, parse_json, read_json
from megajax.data.chat.config import ChatConfig
from megajax.data.rows.config import CyclicConfig, LoaderConfig
from megajax.data.rows.splits import NAMES, parse_paths
from megajax.data.text.config import BlendConfig, FillInMiddleConfig, MockConfig
from megajax.interop.megatron.flags.reading import Arguments, Settings, needed
from megajax.tokenizers.chat_template import named_tokens
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    TokenizerConfig,
    WordPieceTokenizerConfig,
)


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


def cache_folder(args: Arguments) -> str | None:
    """One folder holds indices and what is read from object stores."""
    indices, objects = args["data-cache-path"], args["object-storage-cache-path"]
    if indices and objects and indices != objects:
        args.refuse("object-storage-cache-path", f"one folder has both caches, and --data-cache-path is {indices}")
    return indices or objects


def _source(args: Arguments) -> dict[str, Any]:
    isolated = args["dataloader-inter-document-masking"]
    if args["mock-data"]:
        return {"data": MockConfig(isolate_documents=isolated)}
    if args["sft"]:
        return {"data": _chats(args)}
    shared: dict[str, Any] = {
        "cache_dir": cache_folder(args),
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


FORMATS: Mapping[str, str] = {"identity": "<unk>", "nemotron-h-aligned": "<SPECIAL_233>", "nemotron-nano-v2": "<unk>"}
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
        cache_dir=cache_folder(args),
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


GPT2_VOCABULARY = 50257
VOCABULARIES = {
    "Llama2Tokenizer": ("Llama 2's", 32000),
    "BertWordPieceCase": ("BERT's cased one", 28996),
    "BertWordPieceLowerCase": ("BERT's uncased one", 30522),
}
"""--tokenizer-type -> the vocabulary that its name says, and the number of its tokens."""
TIKTOKEN_VOCABULARY = 1 << 17
"""Number of ids of TikTokenizer without --vocab-size."""
SENTINELS = 100
"""Default number of sentinels <extra_id_0>, … of BertWordPieceCase."""
IMAGE = "<image>"
UNSET = "unset"
"""Stands for a missing path, which is among the problems already."""


def tokenizer_of(args: Arguments) -> tuple[TokenizerConfig, int]:
    """The tokenizer of --tokenizer-type and its number of ids."""
    kind = args["tokenizer-type"]
    reader = TYPES.get(kind)
    if reader is None:
        args.problem("tokenizer-type", f"expected one of {', '.join(TYPES)}, got {kind}")
        return NullTokenizerConfig(vocabulary_size=1), 1
    if args["special-tokens"] and reader not in (_sentencepiece, _tiktoken, _multimodal):
        args.refuse("special-tokens", "this tokenizer reads special tokens from its file")
    return reader(args)


def tokenizer_with_images(args: Arguments) -> tuple[MultimodalTokenizerConfig, int, int]:
    """The tokenizer with the token <image>, its number of ids, and the id of <image>, by default the last one."""
    config, size = tokenizer_of(args)
    if not isinstance(config, MultimodalTokenizerConfig):
        config, size = MultimodalTokenizerConfig(base=config, image=IMAGE), size + 1
    if isinstance(config.base, NullTokenizerConfig):
        text = f"{args['tokenizer-type']} can't encode captions: bytes replace it; --vocab-size applies to the model"
        args.remark("tokenizer-type", text)
        config = replace(config, base=ByteTokenizerConfig())
    try:
        tokenizer = config.build()
    except UserError:
        return config, size, size - 1 - len(config.added)
    return config, max(size, tokenizer.vocabulary_size), tokenizer.specials["image"]


def _null(args: Arguments) -> tuple[TokenizerConfig, int]:
    # One id after --vocab-size ends a document.
    size = _vocab_size(args, None) + 1
    return NullTokenizerConfig(vocabulary_size=size), size


def _null_multimodal(args: Arguments) -> tuple[TokenizerConfig, int]:
    base, size = _null(args)
    args.remark("tokenizer-type", f"{IMAGE} has the last id; Megatron-LM's is -200")
    return MultimodalTokenizerConfig(base=base, image=IMAGE), size + 1


def _hugging_face(args: Arguments) -> tuple[TokenizerConfig, int]:
    path = _model(args)
    return HuggingFaceTokenizerConfig(path=path), _count_ids(path) or _vocab_size(args, path)


def _multimodal(args: Arguments) -> tuple[TokenizerConfig, int]:
    base, size = _hugging_face(args)
    added = {f"special_{place}": token for place, token in enumerate(args["special-tokens"] or ()) if token != IMAGE}
    config = MultimodalTokenizerConfig(base=base, image=IMAGE, added=added)
    return config, _built_size(config) or size + 1 + len(added)


def _gpt2(args: Arguments) -> tuple[TokenizerConfig, int]:
    vocab_size = args["vocab-size"]
    if args["vocab-file"] is None or args["merge-file"] is None:
        missing = "vocab-file" if args["vocab-file"] is None else "merge-file"
        args.problem(missing, "must be given with --tokenizer-type GPT2BPETokenizer, the default")
    file, merges = args["vocab-file"] or UNSET, args["merge-file"] or UNSET
    file_size = _count_ids(file)
    if file_size is None and vocab_size is None and args["vocab-file"] is not None:
        text = f"{file} can't be read to count its tokens: assumed to be GPT-2's, with {GPT2_VOCABULARY} tokens"
        args.remark("vocab-file", f"{text}; with more tokens in the file a run fails at its start; see --vocab-size")
    return GPT2TokenizerConfig(vocabulary=file, merges=merges), file_size or vocab_size or GPT2_VOCABULARY


def _wordpiece(args: Arguments) -> tuple[TokenizerConfig, int]:
    lower = args["tokenizer-type"] == "BertWordPieceLowerCase"
    if args["vocab-file"] is None:
        args.problem("vocab-file", f"must be given with --tokenizer-type {args['tokenizer-type']}")
    sentinels = args["vocab-extra-ids"]
    if sentinels is None:
        sentinels = 0 if lower else SENTINELS
    file = args["vocab-file"] or UNSET
    config = WordPieceTokenizerConfig(vocabulary=file, lower=lower, extra_ids=sentinels)
    return config, _built_size(config) or _vocab_size(args, file)


def _sentencepiece(args: Arguments) -> tuple[TokenizerConfig, int]:
    path, legacy, tokens = _model(args), args["tokenizer-sentencepiece-legacy"], tuple(args["special-tokens"] or ())
    if tokens and not legacy:
        args.problem("special-tokens", "needs --tokenizer-sentencepiece-legacy with a SentencePiece model")
    config = SentencePieceTokenizerConfig(path=path, special_tokens=tokens, extra_ids=args["vocab-extra-ids"] or 0)
    return config, _built_size(config) or _vocab_size(args, path)


def _tiktoken(args: Arguments) -> tuple[TokenizerConfig, int]:
    size = args["vocab-size"] or TIKTOKEN_VOCABULARY
    pattern = args["tiktoken-pattern"] or "v2"
    if pattern not in ("v1", "v2"):
        args.problem("tiktoken-pattern", f"expected v1 or v2, got {pattern}")
    slots, tokens = args["tiktoken-num-special-tokens"], tuple(args["special-tokens"] or ())
    config = TiktokenTokenizerConfig(path=_model(args), pattern=pattern, special_ids=slots, vocabulary_size=size)
    return replace(config, special_tokens=tokens) if tokens else config, size


TYPES: Mapping[str, Callable[[Arguments], tuple[TokenizerConfig, int]]] = {
    "GPT2BPETokenizer": _gpt2,
    "HuggingFaceTokenizer": _hugging_face,
    "SFTTokenizer": _hugging_face,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "TikTokenizer": _tiktoken,
    "BertWordPieceLowerCase": _wordpiece,
    "BertWordPieceCase": _wordpiece,
    "MultimodalTokenizer": _multimodal,
    "NullTokenizer": _null,
    "NullMultimodalTokenizer": _null_multimodal,
}
"""--tokenizer-type -> function that reads its flags."""


def _model(args: Arguments) -> str:
    if args["tokenizer-model"] is None:
        args.problem("tokenizer-model", f"must be given with --tokenizer-type {args['tokenizer-type']}")
    return args["tokenizer-model"] or UNSET


def _vocab_size(args: Arguments, file: str | None) -> int:
    """--vocab-size, which is required if neither `file` nor the tokenizer's type gives it."""
    name, size = VOCABULARIES.get(args["tokenizer-type"], ("", 0))
    if size and not args["vocab-size"] and file != UNSET:
        size += args["vocab-extra-ids"] or (SENTINELS if args["tokenizer-type"] == "BertWordPieceCase" else 0)
        text = f"{file} can't be read to count its tokens: assumed to be {name}, with {size} tokens"
        flag = "tokenizer-model" if args["tokenizer-model"] else "vocab-file"
        args.remark(flag, f"{text}; with more tokens in the file a run fails at its start; see --vocab-size")
        return size
    if not args["vocab-size"] and file != UNSET:
        args.problem("vocab-size", "must be given" + (f": {file} can't be read to count its tokens" if file else ""))
    return args["vocab-size"] or 1


def _built_size(config: TokenizerConfig) -> int | None:
    """Number of ids of a tokenizer; None: it can't be built, such as without its files."""
    try:
        return config.build().vocabulary_size
    except UserError:
        return None


def _count_ids(name: str) -> int | None:
    """Number of ids in a vocab.json, a tokenizer.json or its folder; None: it can't be read."""
    try:
        path = Path(name).expanduser()
        saved = read_json(path / "tokenizer.json" if path.is_dir() else path, DOCUMENT)
        tokens, added = (saved["model"]["vocab"], saved.get("added_tokens", [])) if "model" in saved else (saved, [])
        ids = tokens.values() if isinstance(tokens, dict) else range(len(tokens))
        return max([*ids, *(token["id"] for token in added)]) + 1
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
