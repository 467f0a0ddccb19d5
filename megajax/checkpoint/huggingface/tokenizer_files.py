"""The tokenizer files of a model folder, and the tokenizer config of a run that reads them."""

import shutil
from pathlib import Path

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
    """Copies those that are there. Returns their names."""
    present = [name for name in NAMES if (source / name).is_file()]
    if present:
        target.mkdir(parents=True, exist_ok=True)
    for name in present:
        shutil.copyfile(source / name, target / name)
    return present


def tokenizer_config(present: list[str], folder: Path, vocabulary_size: int | None) -> TokenizerConfig:
    """Of the files in a folder; without one that we read, of token ids alone."""
    if "tokenizer.json" in present:
        return HuggingFaceTokenizerConfig(path=str(folder / "tokenizer.json"))
    if {"vocab.json", "merges.txt"} <= set(present):
        return GPT2TokenizerConfig(vocabulary=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    if models := [name for name in SENTENCEPIECE if name in present]:
        return SentencePieceTokenizerConfig(path=str(folder / models[0]))
    if "vocab.txt" in present:
        return WordPieceTokenizerConfig(vocabulary=str(folder / "vocab.txt"))
    return NullTokenizerConfig(vocabulary_size=vocabulary_size or 1)
