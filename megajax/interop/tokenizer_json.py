"""Tokenizers of bytes, GPT-2 and tokenizer.json as the files that AutoTokenizer of transformers reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.config.errors import UserError
from megajax.config.read_limits import parse_json
from megajax.tokenizers.base import Tokenizer, read_file
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
)
from megajax.tokenizers.gpt2 import printable_bytes

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that transformers names in tokenizer_config.json."""


def tokenizer_json(config: Any, tokenizer: Tokenizer) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json. Raises UserError for a tokenizer of another kind."""
    content = _content(config, tokenizer)
    base = config.base if isinstance(config, MultimodalTokenizerConfig) else config
    split_special = not getattr(base, "special_tokens_in_text", False)
    names = _names(content)
    if not split_special:  # transformers recognizes the names of these tokens in a text
        names = _added(content) | {
            number: names[number] for number in (tokenizer.eod, tokenizer.pad) if number is not None
        }
    ids = {**tokenizer.specials, "eos": tokenizer.eod, "pad": tokenizer.pad}
    settings = {f"{role}_token": names[number] for role in ROLES if (number := ids.get(role)) in names} | {
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": split_special,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(content, ensure_ascii=False)
    return {"tokenizer.json": text.encode(), "tokenizer_config.json": json.dumps(settings, indent=2).encode()}


def _content(config: Any, tokenizer: Any) -> dict[str, Any]:
    match config:
        case ByteTokenizerConfig():
            end = "<|endoftext|>"
            return _byte_pairs({**printable_bytes(), end: tokenizer.eod}, [], _token(tokenizer.eod, end), split=False)
        case GPT2TokenizerConfig():
            vocabulary = parse_json(read_file(config.vocabulary, "GPT-2 vocabulary"))
            lines = read_file(config.merges, "list of GPT-2 merges").decode().split("\n")
            merges = [line.rstrip("\r") for line in lines[lines[0].startswith("#version") :] if line.strip()]
            return _byte_pairs(vocabulary, merges, _token(tokenizer.eod, config.eod), split=True)
        case HuggingFaceTokenizerConfig():
            return json.loads(tokenizer.engine.to_str())
        case MultimodalTokenizerConfig():
            content = _content(config.base, tokenizer.base)
            controls, known = tokenizer.controls().items() - tokenizer.base.controls().items(), _added(content)
            tokens = [_token(number, name, special=False) for name, number in controls if number not in known]
            tokens = sorted((*content["added_tokens"], *tokens), key=lambda token: token["id"])
            return content | {"added_tokens": tokens}
    raise UserError(
        f"a {type(config).__name__} is not written as tokenizer.json; use a tokenizer.json that transformers writes "
        "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), with HuggingFaceTokenizerConfig"
    )


def _byte_pairs(
    vocabulary: Mapping[str, int], merges: Sequence[str], end: Mapping[str, Any], *, split: bool
) -> dict[str, Any]:
    """Byte-level BPE. split: split the text by GPT-2's pattern first."""
    unused = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": split}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", **unused, **flags, "vocab": dict(vocabulary), "merges": list(merges)},
    }


def _token(number: int, name: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": special}


def _names(content: Mapping[str, Any]) -> dict[int, str]:
    """Names of ids in a tokenizer.json."""
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return {number: name for name, number in vocabulary.items()} | _added(content)


def _added(content: Mapping[str, Any]) -> dict[int, str]:
    return {token["id"]: token["content"] for token in content["added_tokens"]}
