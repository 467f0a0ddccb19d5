"""The tokenizer files of a model folder, and the tokenizer config of a run that reads them."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megajax.config import read_limits
from megajax.config.errors import UserError
from megajax.config.read_limits import parse_json, settings_of
from megajax.storage.safe_paths import demand_inside
from megajax.tokenizers.base import LIMITS, Tokenizer, local_path, read_file, sentinel_name
from megajax.tokenizers.chat_template import TEMPLATE, token_text
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TokenizerConfig,
    WordPieceTokenizerConfig,
)
from megajax.tokenizers.gpt2 import printable_bytes
from megajax.tokenizers.sentencepiece import engine_of

OLD_TEMPLATE, TEMPLATES = "chat_template.json", "additional_chat_templates"
"""The template of an older processor, which goes before `TEMPLATE`; and the folder of templates with names, *.jinja."""
NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE, OLD_TEMPLATE,
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files that are copied along with the weights."""
GENERATION, SETTINGS = "generation_config.json", "tokenizer_config.json"
OF_MODEL = (GENERATION, "preprocessor_config.json", "processor_config.json")
"""Those of `NAMES` that belong to the model, whatever its tokenizer is."""
OF_TOKENIZER = tuple(name for name in NAMES if name not in OF_MODEL)
MOST_SENTINELS = 10_000
"""T5 has 100. Each is a token of the vocabulary that is built."""
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def present_files(folder: Path, names: Collection[str] = NAMES) -> list[str]:
    """The existing files of `names`, and templates with names: paths in the folder.

    Raises UserError for links that lead out of the folder.
    """
    present = [name for name in names if (folder / name).is_file()]
    if TEMPLATE in names and (folder / TEMPLATES).is_dir():
        demand_inside(folder / TEMPLATES)
        present += [f"{TEMPLATES}/{path.name}" for path in sorted((folder / TEMPLATES).glob("*.jinja"))]
    for name in present:
        demand_inside(folder / name)
    return present


def copy_files(source: Path, target: Path) -> list[str]:
    """Copies the existing files -> their names.

    Raises UserError for links that lead out of the folder, and OverBudget for a file that no reader would accept.
    """
    present = present_files(source)
    for name in present:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(read_limits.read_file(source / name, LIMITS))
    return present


FILES: Mapping[type, Mapping[str, str]] = {
    HuggingFaceTokenizerConfig: {"path": "tokenizer.json"},
    GPT2TokenizerConfig: {"vocabulary": "vocab.json", "merges": "merges.txt"},
    SentencePieceTokenizerConfig: {"path": "tokenizer.model"},
    WordPieceTokenizerConfig: {"vocabulary": "vocab.txt"},
}
"""Class of a tokenizer's config -> its settings that are files, and their usual names."""


def _file_settings(config: Any) -> Mapping[str, str]:
    return next((names for cls, names in FILES.items() if isinstance(config, cls)), {})


def vocabulary_files(config: Any) -> dict[str, Path]:
    """The files that a tokenizer config names: usual name -> path."""
    paths = {name: local_path(getattr(config, setting)) for setting, name in _file_settings(config).items()}
    return {name: path / name if path.is_dir() else path for name, path in paths.items()}


def with_copies(config: Any, copies: Path, folder: Path) -> Any:
    """A tokenizer config that reads the files of `copies`, in case the originals are gone; the same one without them.

    folder: the path of `copies` in the result.
    """
    if isinstance(config, MultimodalTokenizerConfig):
        return replace(config, base=with_copies(config.base, copies, folder))
    names = {setting: _copy(name, copies) for setting, name in _file_settings(config).items()}
    paths = {setting: str(folder / name) for setting, name in names.items() if name is not None}
    return replace(config, **paths) if names and len(paths) == len(names) else config


def _copy(name: str, folder: Path) -> str | None:
    """The name of the copy of a file of a tokenizer; None if there is none."""
    names = SENTENCEPIECE if name in SENTENCEPIECE else (name,)
    return next((candidate for candidate in names if (folder / candidate).is_file()), None)


def original_files(config: Any) -> dict[str, bytes]:
    """The files that a tokenizer config names: usual name -> content."""
    files = {name: read_file(str(path), name) for name, path in vocabulary_files(config).items()}
    if isinstance(config, WordPieceTokenizerConfig):
        files[SETTINGS] = json.dumps({"do_lower_case": config.lower}).encode()
    return files


def files_of(config: Any, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a run's tokenizer, which AutoTokenizer of transformers reads to the same ids: name -> content.

    Raises UserError for a tokenizer that is not written as tokenizer.json.
    """
    originals = original_files(config)
    if not isinstance(config, HuggingFaceTokenizerConfig):
        return originals | _tokenizer_json(config, tokenizer)
    folder = vocabulary_files(config)["tokenizer.json"].parent
    files = {name: read_file(str(folder / name), name) for name in present_files(folder, OF_TOKENIZER)} | originals
    settings = settings_of(folder / SETTINGS)
    names = json.loads(_tokenizer_json(config, tokenizer)[SETTINGS])
    if not settings:
        settings = names
    elif config.eod is not None and token_text(settings.get("eos_token")) != config.eod:
        settings["eos_token"] = config.eod
    if not config.special_tokens_in_text:
        settings["split_special_tokens"] = True
    if settings != settings_of(folder / SETTINGS):
        files[SETTINGS] = json.dumps(settings, indent=2).encode()
    return files


ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that transformers names in tokenizer_config.json."""


def _tokenizer_json(config: Any, tokenizer: Tokenizer) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json. Raises UserError for a tokenizer of another kind."""
    content = _content(config, tokenizer)
    base = config.base if isinstance(config, MultimodalTokenizerConfig) else config
    split_special = not getattr(base, "special_tokens_in_text", False)
    names = _names(content)
    if not split_special:  # transformers recognizes the names of these tokens in a text
        names = _added_names(content) | {
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
            controls, known = tokenizer.controls().items() - tokenizer.base.controls().items(), _added_names(content)
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
    return {number: name for name, number in vocabulary.items()} | _added_names(content)


def _added_names(content: Mapping[str, Any]) -> dict[int, str]:
    return {token["id"]: token["content"] for token in content["added_tokens"]}


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Special tokens for a config.json. A token is None if the tokenizer has no such token."""
    roles = {**tokenizer.specials, "eos": tokenizer.eod, "pad": tokenizer.pad}
    return {f"{role}_token_id": roles.get(role) for role in ("bos", "eos", "pad")}


def tokenizer_config(
    present: Collection[str], folder: Path, vocabulary_size: int | None, source: Path
) -> TokenizerConfig:
    """The tokenizer config for the files of a folder; without a supported file, one for token ids only.

    source: the folder that the files are in now. Its tokenizer_config.json names the token that ends a text.
    """
    settings = settings_of(source / SETTINGS)
    if "tokenizer.json" in present:
        eod = token_text(settings.get("eos_token")) or token_text(settings.get("sep_token"))
        return HuggingFaceTokenizerConfig(
            path=str(folder / "tokenizer.json"),
            eod=eod,
            special_tokens_in_text=settings.get("split_special_tokens") is not True,
        )
    if {"vocab.json", "merges.txt"} <= set(present):
        return GPT2TokenizerConfig(vocabulary=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    if models := [name for name in SENTENCEPIECE if name in present]:
        added, end = _added_tokens(source / models[0], settings), token_text(settings.get("eos_token"))
        return SentencePieceTokenizerConfig(
            path=str(folder / models[0]),
            special_tokens=added,
            extra_ids=_extra_ids(settings),
            eod=end if end in added else None,
        )
    if "vocab.txt" in present:
        return WordPieceTokenizerConfig(
            vocabulary=str(folder / "vocab.txt"), lower=bool(settings.get("do_lower_case", True))
        )
    return NullTokenizerConfig(vocabulary_size=vocabulary_size or 1)


def _added_tokens(model: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Tokens after the pieces of a SentencePiece model, by id, without the sentinels of extra_ids.

    added_tokens.json or tokenizer_config.json beside the model names them. Raises UserError for tokens that can't be
    added in this order.
    """
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    pairs = [(token_text(entry), number) for number, entry in entries]
    pairs += settings_of(model.with_name("added_tokens.json")).items()
    if not pairs:
        return ()
    count = len(engine_of(str(model), read_file(str(model), "SentencePiece model")))
    names = {int(number): str(name) for name, number in pairs if str(number).isdecimal() and len(str(number)) < 10}
    added = {number: names[number] for number in sorted(names) if number >= count}
    sentinels = {sentinel_name(number) for number in range(_extra_ids(settings))}
    tokens = [name for name in added.values() if name not in sentinels]
    if [*added] != [*range(count, count + len(added))] or [*added.values()][: len(tokens)] != tokens:
        examples = ", ".join(f"{name}: {number}" for number, name in [*added.items()][:5])
        raise UserError(
            f"{model}: of the {len(added)} tokens added to its {count} pieces, ids are missing, or tokens follow the "
            f"sentinels: {examples[:200]}. "
            "Let transformers write a tokenizer.json: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return tuple(tokens)


def _extra_ids(settings: Mapping[str, Any]) -> int:
    """Number of sentinels. Raises UserError for more than MOST_SENTINELS."""
    count = settings.get("extra_ids")
    if isinstance(count, int) and count > MOST_SENTINELS:
        raise UserError(f"{SETTINGS}: extra_ids={count}, at most {MOST_SENTINELS:,} are read")
    return count if isinstance(count, int) and count > 0 else 0
