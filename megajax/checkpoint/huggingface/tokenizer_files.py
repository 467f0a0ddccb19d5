"""The tokenizer files of a model folder, and the tokenizer config of a run that reads them."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megajax.checkpoint.huggingface.safetensors import demand_inside
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
"""Files that travel along with the weights."""
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def copy_files(source: Path, target: Path) -> list[str]:
    """Copies those that are there. Returns their names. Raises UserError for links that lead out of the folder."""
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
    """Of the files that will be in a folder; without one that we read, of token ids alone.

    source: where the files are now. Its tokenizer_config.json says which token ends a text.
    """
    given = _settings(source / "tokenizer_config.json")
    if "tokenizer.json" in present:
        eod = _token(given.get("eos_token")) or _token(given.get("sep_token"))
        return HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json"), eod=eod)
    if {"vocab.json", "merges.txt"} <= set(present):
        return GPT2TokenizerConfig(vocabulary=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    if models := [name for name in SENTENCEPIECE if name in present]:
        return SentencePieceTokenizerConfig(path=str(folder / models[0]), extra_ids=given.get("extra_ids") or 0)
    if "vocab.txt" in present:
        return WordPieceTokenizerConfig(
            vocabulary=str(folder / "vocab.txt"), lower=bool(given.get("do_lower_case", True))
        )
    return NullTokenizerConfig(vocabulary_size=vocabulary_size or 1)


def _settings(path: Path) -> Mapping[str, Any]:
    """Of tokenizer_config.json; none where it can't be read: it only adds to the other files."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _token(given: Any) -> str | None:
    """A special token, which is a text or has one."""
    text = given.get("content") if isinstance(given, dict) else given
    return text if isinstance(text, str) else None
