"""The tokenizer from Megatron-LM's flags."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from megajax.config.budget import DOCUMENT, read_json
from megajax.config.errors import UserError
from megajax.interop.megatron.flags.reading import Arguments
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
