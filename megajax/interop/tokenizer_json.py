"""Our tokenizers as tokenizer.json and tokenizer_config.json, which AutoTokenizer of transformers reads."""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from megajax.config.errors import UserError
from megajax.config.optional_packages import require
from megajax.config.read_limits import parse_json
from megajax.tokenizers.base import Tokenizer, read_file
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    WordPieceTokenizerConfig,
)
from megajax.tokenizers.gpt2 import printable_bytes
from megajax.tokenizers.sentencepiece import SPACE
from megajax.tokenizers.tiktoken import PATTERNS

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, DEFINED = range(1, 5)
"""Kinds of pieces."""


def parsed(data: bytes) -> Any:
    """A SentencePiece model: the `ModelProto` of sentencepiece_model.proto. Raises UserError for a damaged file."""
    library = require("sentencepiece.sentencepiece_model_pb2", "A SentencePiece model")
    try:
        return library.ModelProto.FromString(data)
    except Exception as error:  # protobuf's DecodeError; Orbax and Grain require protobuf
        raise UserError(f"not a SentencePiece model: {error}") from error


def _defined(model: Any) -> list[str]:
    """Pieces that the user defined, which are recognized in every text."""
    return [piece.piece for piece in model.pieces if piece.type == DEFINED]


def _unsupported(model: Any) -> str | None:
    """Why a SentencePiece model has no equivalent; None if it has one."""
    if model.trainer_spec.model_type not in (UNIGRAM, BPE):
        return f"model_type={model.trainer_spec.model_type} of SentencePiece"
    if model.trainer_spec.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        return "blanks that end a piece or are not escaped"
    return None


ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that transformers names in tokenizer_config.json."""
NAMES = "<s></s> <unk> <pad> <|endoftext|> [CLS][SEP] <image>"
SAMPLES = (
    "", "a", " a", "a ", "  two  spaces ", "Hello, world!", "don't DON'T I'll", "line\nnext\r\n\n\tindented   \n",
    "1234567 3.14 x²",
    "naïve café – “quoted”…", "日本語と한국어", "🙂🙃 👨‍👩‍👧", "\x00\x7f\u00a0\u200b\ufeff", "a\u0301 ﬁ Ⅳ",
    "def f(x):\n    return {'a': [x] * 10}  # ok",
)  # fmt: skip
"""Texts that both sides must encode to the same ids."""


class Written(NamedTuple):
    """A tokenizer in the format of the tokenizers library."""

    content: dict[str, Any]
    """tokenizer.json."""
    split_special: bool = True
    """Whether names of its special tokens in a text are plain text."""


def tokenizer_json(config: Any, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a tokenizer. Raises UserError if the format can't express it."""
    written = _written(config, tokenizer)
    content = json.dumps(written.content, ensure_ascii=False)
    if not isinstance(config, ByteTokenizerConfig):
        _demand_same_ids(content, written.split_special, tokenizer)
    names = _names(written.content)
    if not written.split_special:  # transformers recognizes the names of these tokens in a text
        names = _added(written.content) | {
            number: names[number] for number in (tokenizer.eod, tokenizer.pad) if number is not None
        }
    settings = token_names(tokenizer, names) | {
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": written.split_special,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {"tokenizer.json": content.encode(), "tokenizer_config.json": json.dumps(settings, indent=2).encode()}


def token_names(tokenizer: Tokenizer, names: Mapping[int, str]) -> dict[str, str]:
    """The settings of special tokens in tokenizer_config.json. names: of ids."""
    roles = {**tokenizer.specials, "eos": tokenizer.eod, "pad": tokenizer.pad}
    ids = {role: number for role in ROLES if (number := roles.get(role)) is not None}
    return {f"{role}_token": names[number] for role, number in ids.items() if number in names}


def _names(content: Mapping[str, Any]) -> dict[int, str]:
    """Names of ids in a tokenizer.json."""
    vocabulary = content["model"]["vocab"]
    names = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(names))
    return dict(zip(numbers, names, strict=True)) | _added(content)


def _added(content: Mapping[str, Any]) -> dict[int, str]:
    return {token["id"]: token["content"] for token in content["added_tokens"]}


def _written(config: Any, tokenizer: Any) -> Written:
    for kind, write in WRITERS:
        if isinstance(config, kind):
            return write(config, tokenizer)
    raise UserError(f"a {type(config).__name__} has no equivalent in transformers")


def _demand_same_ids(content: str, split_special: bool, tokenizer: Tokenizer) -> None:
    """Raises UserError unless the tokenizers library gives our ids."""
    library = require("tokenizers", "Writing tokenizer.json")
    # The package raises bare Exceptions for all problems of the file, such as a pattern that it can't read.
    try:
        engine = library.Tokenizer.from_str(content)
    except Exception as error:
        raise UserError(f"the tokenizers library can't read it: {error}") from error
    engine.encode_special_tokens = split_special
    first = tokenizer.encode("").tolist()
    for text in (*SAMPLES, *[NAMES] * split_special):
        expected, ids = tokenizer.encode(text).tolist(), engine.encode(text, add_special_tokens=False).ids
        if expected != first + ids:
            raise UserError(f"the tokenizers library would encode {text!r} as {first + ids}, not as {expected}")


def _content(model: Mapping[str, Any], added: Iterable[Mapping[str, Any]], **parts: Any) -> dict[str, Any]:
    steps = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    tokens = sorted(added, key=lambda token: token["id"])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        **steps,
        **parts,
        "model": model,
    }


def _token(number: int, name: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": special}


def _byte_pairs(vocabulary: Mapping[str, int], merges: Sequence[str], **changes: Any) -> dict[str, Any]:
    unused = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **unused, **flags, **changes, "vocab": dict(vocabulary), "merges": list(merges)}


def _byte_level(*, pattern: bool) -> dict[str, Any]:
    """Bytes as characters. pattern: split the text by GPT-2's pattern first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": pattern}


def _byte(config: ByteTokenizerConfig, tokenizer: Tokenizer) -> Written:
    vocabulary, end = printable_bytes(), "<|endoftext|>"
    byte_level = _byte_level(pattern=False)
    model = _byte_pairs({**vocabulary, end: tokenizer.eod}, [])
    return Written(_content(model, [_token(tokenizer.eod, end)], pre_tokenizer=byte_level, decoder=byte_level))


def _gpt2(config: GPT2TokenizerConfig, tokenizer: Tokenizer) -> Written:
    vocabulary = parse_json(read_file(config.vocabulary, "GPT-2 vocabulary"))
    lines = read_file(config.merges, "list of GPT-2 merges").decode().split("\n")
    merges = [line.rstrip("\r") for line in lines[lines[0].startswith("#version") :] if line.strip()]
    byte_level, end = _byte_level(pattern=True), _token(tokenizer.eod, config.eod)
    model = _byte_pairs(vocabulary, merges)
    return Written(_content(model, [end], pre_tokenizer=byte_level, decoder=byte_level))


def _tiktoken(config: TiktokenTokenizerConfig, tokenizer: Any) -> Written:
    characters = {value: character for character, value in printable_bytes().items()}
    table = tokenizer.table
    special = {table[number].decode(): number for number in range(config.special_ids)}
    ranks = {
        "".join(map(characters.__getitem__, table[number])): number for number in range(config.special_ids, len(table))
    }
    pattern = {"Regex": PATTERNS.get(config.pattern, config.pattern)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Removed", "invert": True}
    byte_level = _byte_level(pattern=False)
    content = _content(
        _byte_pairs({**special, **ranks}, _merges(ranks, ranks), ignore_merges=True),
        [_token(number, name) for name, number in special.items()],
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
        decoder=byte_level,
    )
    return Written(content, split_special=not config.special_tokens_in_text)


def _merges(tokens: Iterable[str], ids: Mapping[str, int]) -> list[str]:
    """All pairs of tokens that form one of `tokens`, in their order. Its vocabulary has no blanks."""

    def pairs(token: str) -> list[tuple[str, str]]:
        splits = ((token[:place], token[place:]) for place in range(1, len(token)))
        valid = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        return sorted(valid, key=lambda pair: (ids[pair[0]], ids[pair[1]]))

    return [f"{first} {second}" for first, second in chain.from_iterable(map(pairs, tokens))]


def _sentencepiece(config: SentencePieceTokenizerConfig, tokenizer: Any) -> Written:
    model = parsed(read_file(config.path, "SentencePiece model"))
    if (reason := _unsupported(model)) is not None:
        raise UserError(f"{config.path}: {reason}, which transformers can't express")
    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    unknown = next(number for number, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    byte_fallback, add_prefix = model.trainer_spec.byte_fallback, model.normalizer_spec.add_dummy_prefix
    if model.trainer_spec.model_type == UNIGRAM:
        pairs = [[piece.piece, piece.score] for piece in model.pieces]
        vocabulary = {"type": "Unigram", "unk_id": unknown, "vocab": pairs, "byte_fallback": byte_fallback}
    else:
        best_first = sorted((piece for piece in model.pieces if piece.type == NORMAL), key=lambda piece: -piece.score)
        normal = {piece.piece: ids[piece.piece] for piece in best_first}
        merges = _merges(normal, normal)
        name = model.pieces[unknown].piece
        flags = {"fuse_unk": True, "byte_fallback": byte_fallback, "ignore_merges": bool(_defined(model))}
        vocabulary = _byte_pairs(ids, merges, unk_token=name, **flags)
    controls = tokenizer.controls()
    special = {piece.piece: ids[piece.piece] for piece in model.pieces if piece.type in (CONTROL, UNKNOWN)}
    added = [_token(number, name) for name, number in (controls or special).items()]
    first = {model.pieces[number].piece: number for number in tokenizer.encode("").tolist()}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    words = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [words, {"type": "ByteFallback"}, {"type": "Fuse"}, *[strip] * add_prefix]
    return Written(
        _content(
            vocabulary,
            added,
            normalizer={"type": "Sequence", "normalizers": _normalizers(model.normalizer_spec)},
            pre_tokenizer=_cuts(model),
            post_processor=_template(first, {}) if first else None,
            decoder={"type": "Sequence", "decoders": decoders},
        ),
        split_special=not controls,
    )


def _normalizers(spec: Any) -> list[dict[str, Any]]:
    def replace(pattern: str, content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}

    charsmap = {"type": "Precompiled", "precompiled_charsmap": b64encode(spec.precompiled_charsmap).decode()}
    return [
        *[charsmap] * bool(spec.precompiled_charsmap),
        *[replace("^ +| +$", ""), replace(" {2,}", " ")] * spec.remove_extra_whitespaces,
        *[{"type": "Prepend", "prepend": SPACE}] * spec.add_dummy_prefix,
        replace(" ", SPACE),
    ]


def _cuts(model: Any) -> dict[str, Any] | None:
    """Pieces that the user defined are never parts of others, and names of control pieces are ordinary text."""
    is_unigram = model.trainer_spec.model_type == UNIGRAM
    controls = [piece.piece for piece in model.pieces if is_unigram and piece.type not in (NORMAL, DEFINED)]
    names = [name for name in controls if len(name) > 1]
    wholes = [re.escape(text) for text in sorted(_defined(model), key=len, reverse=True)]
    beginnings = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names]
    cuts = {"Isolated": wholes, "MergedWithPrevious": beginnings}
    steps = [
        {"type": "Split", "pattern": {"Regex": "|".join(patterns)}, "behavior": behavior, "invert": False}
        for behavior, patterns in cuts.items()
        if patterns
    ]
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _library(config: HuggingFaceTokenizerConfig, tokenizer: Any) -> Written:
    return Written(json.loads(tokenizer.engine.to_str()), split_special=not config.special_tokens_in_text)


def _wordpiece(config: WordPieceTokenizerConfig, tokenizer: Any) -> Written:
    content = json.loads(tokenizer.engine.to_str())
    vocabulary = content["model"]["vocab"]
    named = {"pad": tokenizer.pad, "unk": vocabulary["[UNK]"], **tokenizer.specials}
    names = {number: name for name, number in vocabulary.items()}
    content["added_tokens"] = [_token(number, names[number]) for number in sorted(named.values())]
    content["post_processor"] = _template(*({names[named[role]]: named[role]} for role in ("cls", "sep")))
    return Written(content)


def _template(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Any]:
    """Special tokens, name -> id, before and after a text."""

    def steps(names: Iterable[str], kind: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": kind}} for name in names]

    texts = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    single = [*steps(before, 0), texts[0], *steps(after, 0)]
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in {**before, **after}.items()}
    pair = [*single, texts[1], *steps(after, 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _multimodal(config: MultimodalTokenizerConfig, tokenizer: Any) -> Written:
    written = _written(config.base, tokenizer.base)
    tokens = written.content["added_tokens"]
    known = {token["id"] for token in tokens}
    controls = tokenizer.controls().items() - tokenizer.base.controls().items()
    tokens += [_token(number, name, special=False) for name, number in controls if number not in known]
    tokens.sort(key=lambda token: token["id"])
    return written


WRITERS: Sequence[tuple[type, Callable[[Any, Any], Written]]] = (
    (ByteTokenizerConfig, _byte),
    (GPT2TokenizerConfig, _gpt2),
    (HuggingFaceTokenizerConfig, _library),
    (TiktokenTokenizerConfig, _tiktoken),
    (SentencePieceTokenizerConfig, _sentencepiece),
    (WordPieceTokenizerConfig, _wordpiece),
    (MultimodalTokenizerConfig, _multimodal),
)
"""Class of a tokenizer's config -> the function that writes it."""
