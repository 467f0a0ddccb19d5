"""The tokenizer files of a model folder, and the tokenizer config of a run that reads them."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megajax.checkpoint.named_files import demand_inside
from megajax.config.budget import read_json
from megajax.tokenizers.config import (
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TokenizerConfig,
    WordPieceTokenizerConfig,
)

NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files that are copied along with the weights."""
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def copy_files(source: Path, target: Path) -> list[str]:
    """Copies the existing files -> their names. Raises UserError for links that lead out of the folder."""
    present = [name for name in NAMES if (source / name).is_file()]
    if present:
        target.mkdir(parents=True, exist_ok=True)
    for name in present:
        demand_inside(source / name)
        shutil.copyfile(source / name, target / name)
    return present


def tokenizer_config(
    present: Collection[str], folder: Path, vocabulary_size: int | None, source: Path
) -> TokenizerConfig:
    """The tokenizer config for the files of a folder; without a supported file, one for token ids only.

    source: the folder that the files are in now. Its tokenizer_config.json names the token that ends a text.
    """
    settings = _settings(source / "tokenizer_config.json")
    if "tokenizer.json" in present:
        eod = _token(settings.get("eos_token")) or _token(settings.get("sep_token"))
        return HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json"), eod=eod)
    if {"vocab.json", "merges.txt"} <= set(present):
        return GPT2TokenizerConfig(vocabulary=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    if models := [name for name in SENTENCEPIECE if name in present]:
        return SentencePieceTokenizerConfig(path=str(folder / models[0]), extra_ids=settings.get("extra_ids") or 0)
    if "vocab.txt" in present:
        return WordPieceTokenizerConfig(
            vocabulary=str(folder / "vocab.txt"), lower=bool(settings.get("do_lower_case", True))
        )
    return NullTokenizerConfig(vocabulary_size=vocabulary_size or 1)


def _settings(path: Path) -> Mapping[str, Any]:
    """The settings of tokenizer_config.json; {} if it can't be read, because they are optional."""
    try:
        settings = read_json(path, unique=False)
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _token(entry: Any) -> str | None:
    """A special token, written as a text or as a mapping with its `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
