"""The tokenizer that Megatron-LM's flags describe."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from megajax.config.errors import UserError
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
from megajax.tools.flags import Arguments

GPT2_VOCABULARY = 50257
TIKTOKEN_VOCABULARY = 1 << 17
"""Ids of TikTokenizer without --vocab-size."""
SENTINELS = 100
"""<extra_id_0>, … of BertWordPieceCase."""
IMAGE = "<image>"
UNSET = "unset"
"""A path that is missing, which is a problem already."""


def tokenizer_of(args: Arguments) -> tuple[TokenizerConfig, int]:
    """The tokenizer of --tokenizer-type, and the number of its ids."""
    kind = args["tokenizer-type"]
    read = TYPES.get(kind)
    if read is None:
        args.wrong("tokenizer-type", f"expected one of {', '.join(TYPES)}, got {kind}")
        return NullTokenizerConfig(vocabulary_size=1), 1
    if args["special-tokens"] and read not in (_sentencepiece, _tiktoken, _multimodal):
        args.refuse("special-tokens", "special tokens are those of the tokenizer's own file")
    return read(args)


def tokenizer_with_images(args: Arguments) -> tuple[MultimodalTokenizerConfig, int, int]:
    """The same with <image>, the number of ids, and the id of <image>: behind the others unless it is among them."""
    told, size = tokenizer_of(args)
    if not isinstance(told, MultimodalTokenizerConfig):
        told, size = MultimodalTokenizerConfig(base=told, image=IMAGE), size + 1
    if isinstance(told.base, NullTokenizerConfig):
        text = f"{args['tokenizer-type']} has no words for captions: bytes stand in for it; --vocab-size is the model's"
        args.remark("tokenizer-type", text)
        told = replace(told, base=ByteTokenizerConfig())
    try:
        built = told.build()
    except UserError:
        return told, size, size - 1 - len(told.added)
    return told, max(size, built.vocabulary_size), built.specials["image"]


def _null(args: Arguments) -> tuple[TokenizerConfig, int]:
    # The id behind the last one ends a document.
    size = _told(args, None) + 1
    return NullTokenizerConfig(vocabulary_size=size), size


def _null_multimodal(args: Arguments) -> tuple[TokenizerConfig, int]:
    base, size = _null(args)
    args.remark("tokenizer-type", f"{IMAGE} has an id of its own behind the others; Megatron-LM's is -200")
    return MultimodalTokenizerConfig(base=base, image=IMAGE), size + 1


def _hugging_face(args: Arguments) -> tuple[TokenizerConfig, int]:
    path = _model(args)
    return HuggingFaceTokenizerConfig(path=path), _count_ids(path) or _told(args, path)


def _multimodal(args: Arguments) -> tuple[TokenizerConfig, int]:
    base, size = _hugging_face(args)
    others = {f"special_{place}": token for place, token in enumerate(args["special-tokens"] or ()) if token != IMAGE}
    config = MultimodalTokenizerConfig(base=base, image=IMAGE, added=others)
    return config, _built(config) or size + 1 + len(others)


def _gpt2(args: Arguments) -> tuple[TokenizerConfig, int]:
    told = args["vocab-size"]
    if args["vocab-file"] is None or args["merge-file"] is None:
        missing = "vocab-file" if args["vocab-file"] is None else "merge-file"
        args.wrong(missing, "must be given with --tokenizer-type GPT2BPETokenizer, the default")
    file, merges = args["vocab-file"] or UNSET, args["merge-file"] or UNSET
    counted = _count_ids(file)
    if counted is None and told is None and args["vocab-file"] is not None:
        text = f"{file} is not here to be counted: taken to be GPT-2's own, of {GPT2_VOCABULARY} tokens"
        args.remark("vocab-file", f"{text}; a run whose file has more tokens ends at its start; see --vocab-size")
    return GPT2TokenizerConfig(vocabulary=file, merges=merges), counted or told or GPT2_VOCABULARY


def _wordpiece(args: Arguments) -> tuple[TokenizerConfig, int]:
    lower = args["tokenizer-type"] == "BertWordPieceLowerCase"
    if args["vocab-file"] is None:
        args.wrong("vocab-file", f"must be given with --tokenizer-type {args['tokenizer-type']}")
    sentinels = args["vocab-extra-ids"]
    if sentinels is None:
        sentinels = 0 if lower else SENTINELS
    file = args["vocab-file"] or UNSET
    config = WordPieceTokenizerConfig(vocabulary=file, lower=lower, extra_ids=sentinels)
    return config, _built(config) or _told(args, file)


def _sentencepiece(args: Arguments) -> tuple[TokenizerConfig, int]:
    path, legacy, tokens = _model(args), args["tokenizer-sentencepiece-legacy"], tuple(args["special-tokens"] or ())
    if tokens and not legacy:
        args.wrong("special-tokens", "needs --tokenizer-sentencepiece-legacy beside a SentencePiece model")
    config = SentencePieceTokenizerConfig(path=path, special_tokens=tokens, extra_ids=args["vocab-extra-ids"] or 0)
    return config, _built(config) or _told(args, path)


def _tiktoken(args: Arguments) -> tuple[TokenizerConfig, int]:
    size = args["vocab-size"] or TIKTOKEN_VOCABULARY
    pattern = args["tiktoken-pattern"] or "v2"
    if pattern not in ("v1", "v2"):
        args.wrong("tiktoken-pattern", f"expected v1 or v2, got {pattern}")
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
"""--tokenizer-type -> what reads its flags."""


def _model(args: Arguments) -> str:
    if args["tokenizer-model"] is None:
        args.wrong("tokenizer-model", f"must be given with --tokenizer-type {args['tokenizer-type']}")
    return args["tokenizer-model"] or UNSET


def _told(args: Arguments, file: str | None) -> int:
    """--vocab-size, which must be given where no file can be counted."""
    if not args["vocab-size"] and file != UNSET:
        args.wrong("vocab-size", "must be given" + (f": {file} is not here to be counted" if file else ""))
    return args["vocab-size"] or 1


def _built(config: TokenizerConfig) -> int | None:
    """Ids of a tokenizer; None where it cannot be built here."""
    try:
        return config.build().vocabulary_size
    except UserError:
        return None


def _count_ids(name: str) -> int | None:
    """Ids in a vocab.json, in a tokenizer.json or in the folder that holds it, None where it can't be read."""
    try:
        path = Path(name).expanduser()
        saved = json.loads((path / "tokenizer.json" if path.is_dir() else path).read_bytes())
        tokens, added = (saved["model"]["vocab"], saved.get("added_tokens", [])) if "model" in saved else (saved, [])
        ids = tokens.values() if isinstance(tokens, dict) else range(len(tokens))
        return max([*ids, *(token["id"] for token in added)]) + 1
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
