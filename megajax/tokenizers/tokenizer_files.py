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
from megajax.tokenizers.base import LIMITS, Tokenizer, local_path, read_file
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TokenizerBuilder,
    TokenizerConfig,
    WordPieceTokenizerConfig,
)
from megajax.tokenizers.folder import ADDED, ADDITIONAL, GENERATION, SETTINGS, TEMPLATE, VOCABULARIES, FolderTokens
from megajax.tokenizers.gpt2 import printable_bytes
from megajax.tokenizers.huggingface import folder_of

OLD_TEMPLATE = "chat_template.json"
"""The template of an older processor, which goes before `TEMPLATE`."""
NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE, OLD_TEMPLATE,
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files that are copied along with the weights."""
OF_MODEL = (GENERATION, "preprocessor_config.json", "processor_config.json")
"""Those of `NAMES` that belong to the model, whatever its tokenizer is."""
OF_TOKENIZER = tuple(name for name in NAMES if name not in OF_MODEL)
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def present_files(folder: Path, names: Collection[str] = NAMES) -> list[str]:
    """The existing files of `names`, and templates with names: paths in the folder.

    Raises UserError for links that lead out of the folder.
    """
    present = [name for name in names if (folder / name).is_file()]
    if TEMPLATE in names and (folder / ADDITIONAL).is_dir():
        demand_inside(folder / ADDITIONAL)
        present += [f"{ADDITIONAL}/{path.name}" for path in sorted((folder / ADDITIONAL).glob("*.jinja"))]
    for name in present:
        demand_inside(folder / name)
    return present


def contents_of(folder: Path, names: Collection[str] = NAMES) -> dict[str, bytes]:
    """The existing files of `names`: name -> content. Raises as `present_files`, and OverBudget for a huge one."""
    return {name: read_limits.read_file(folder / name, LIMITS) for name in present_files(folder, names)}


def copy_files(source: Path, target: Path) -> list[str]:
    """Copies the existing files -> their names. Raises as `contents_of`."""
    files = contents_of(source)
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return [*files]


FILES: Mapping[type, Mapping[str, str]] = {
    GPT2TokenizerConfig: {"vocabulary": "vocab.json", "merges": "merges.txt"},
    SentencePieceTokenizerConfig: {"path": "tokenizer.model"},
    WordPieceTokenizerConfig: {"vocabulary": "vocab.txt"},
}
"""Class of a tokenizer's config -> its settings that are files, and their usual names."""


def _file_settings(config: TokenizerBuilder) -> Mapping[str, str]:
    if isinstance(config, HuggingFaceTokenizerConfig):
        path = folder_of(config).vocabulary
        return {"path": path.name if path is not None and path.name in VOCABULARIES else "tokenizer.json"}
    return next((names for cls, names in FILES.items() if isinstance(config, cls)), {})


def vocabulary_files(config: TokenizerBuilder) -> dict[str, Path]:
    """The files that a tokenizer config names: usual name -> path."""
    paths = {name: local_path(getattr(config, setting)) for setting, name in _file_settings(config).items()}
    paths = {name: path / name if path.is_dir() else path for name, path in paths.items()}
    if isinstance(config, HuggingFaceTokenizerConfig) and "vocab.json" in paths:
        paths["merges.txt"] = paths["vocab.json"].with_name("merges.txt")
    return paths


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


def original_files(config: TokenizerBuilder) -> dict[str, bytes]:
    """The files that a tokenizer config names: usual name -> content."""
    files = {name: read_file(str(path), name) for name, path in vocabulary_files(config).items()}
    if isinstance(config, WordPieceTokenizerConfig):
        files[SETTINGS] = json.dumps({"do_lower_case": config.lower}).encode()
    return files


def files_of(config: TokenizerBuilder, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a run's tokenizer, which AutoTokenizer of transformers reads to the same ids: name -> content.

    Raises UserError for a tokenizer that is not written as tokenizer.json.
    """
    originals = original_files(config)
    if not isinstance(config, HuggingFaceTokenizerConfig):
        return originals | _tokenizer_json(config, tokenizer)
    folder = folder_of(config).folder
    files = contents_of(folder, OF_TOKENIZER) | originals
    settings = settings_of(folder / SETTINGS)
    names = json.loads(_tokenizer_json(config, tokenizer)[SETTINGS])
    if not settings:
        settings = names
    elif config.eod not in (None, FolderTokens(folder).end):
        settings["eos_token"] = config.eod
    if not config.special_tokens_in_text:
        settings["split_special_tokens"] = True
    if settings != settings_of(folder / SETTINGS):
        files[SETTINGS] = json.dumps(settings, indent=2).encode()
    return files


ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that transformers names in tokenizer_config.json."""


def _tokenizer_json(config: TokenizerBuilder, tokenizer: Tokenizer) -> dict[str, bytes]:
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


def _content(config: TokenizerBuilder, tokenizer: Any) -> dict[str, Any]:
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
    """The tokenizer config for the files of a model's folder; without a supported file, one for token ids only.

    A vocabulary without a class of transformers and without added tokens is read as its own format says.

    folder: of the files in the config. source: the folder that they are in now.
    """
    tokens = FolderTokens(source)
    needs = {"vocab.json": {"vocab.json", "merges.txt"}}
    name = next((name for name in VOCABULARIES if needs.get(name, {name}) <= set(present)), None)
    if name is None:
        return NullTokenizerConfig(vocabulary_size=vocabulary_size or 1)
    path = str(folder / name)
    # Only SentencePiece's files say how a text is split.
    is_known = tokens.kind or (tokens.of_model and name not in SENTENCEPIECE)
    has_more = tokens.settings.keys() & {"add_bos_token", "added_tokens_decoder", "extra_ids"} or ADDED in present
    if name != "tokenizer.json" and not is_known and not has_more:
        match name:
            case "vocab.json":
                return GPT2TokenizerConfig(vocabulary=path, merges=str(folder / "merges.txt"))
            case "vocab.txt":
                return WordPieceTokenizerConfig(vocabulary=path, lower=bool(tokens.settings.get("do_lower_case", True)))
        return SentencePieceTokenizerConfig(path=path)
    # Copies of the files have no config.json beside them.
    of_copies = FolderTokens(source, of_model=False)
    return HuggingFaceTokenizerConfig(
        path=path,
        eod=tokens.end,
        special_tokens_in_text=not tokens.splits_names,
        ends=tuple(sorted(tokens.ends - of_copies.ends)),
        kind="" if tokens.kind == of_copies.kind else tokens.kind,
    )
