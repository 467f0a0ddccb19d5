"""The tokenizer of a preprocessing job, from the options of its command line."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megajax.config.errors import UserError
from megajax.config.nearest import download_hint
from megajax.config.schema import default
from megajax.config.tree import override
from megajax.tokenizers.config import (
    ByteTokenizerConfig,
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    NullTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    TokenizerBuilder,
    TokenizerConfig,
    WordPieceTokenizerConfig,
)

SETTINGS = "--tokenizer."
"""Begins the options that set a field of the tokenizer's config, as in a run's command line."""


@dataclass(frozen=True)
class Kind:
    """A name of `--tokenizer`: its config, the fields that options set, and the fields that the name sets."""

    config: type[Any]
    options: Mapping[str, str] = field(default_factory=dict)
    """Option, as argparse names it -> field."""
    fixed: Mapping[str, Any] = field(default_factory=dict)


KINDS: Mapping[str, Kind] = {
    "byte": Kind(ByteTokenizerConfig),
    "gpt2": Kind(GPT2TokenizerConfig, {"vocab_file": "vocabulary", "merge_file": "merges"}),
    "null": Kind(NullTokenizerConfig, {"vocab_size": "vocabulary_size"}),
    "wordpiece": Kind(WordPieceTokenizerConfig, {"vocab_file": "vocabulary"}, {"lower": True}),
    "wordpiece-cased": Kind(WordPieceTokenizerConfig, {"vocab_file": "vocabulary"}, {"lower": False}),
    "sentencepiece": Kind(SentencePieceTokenizerConfig, {"vocab_file": "path"}),
    "tiktoken": Kind(TiktokenTokenizerConfig, {"vocab_file": "path"}),
}
FILES: Mapping[str, type[Any]] = {".model": SentencePieceTokenizerConfig, "": HuggingFaceTokenizerConfig}
"""Suffix of a path given as `--tokenizer` -> the config of such files."""


@dataclass(frozen=True)
class _Chosen:
    """Root of the settings of `override`."""

    tokenizer: TokenizerConfig | TokenizerBuilder = field(default_factory=ByteTokenizerConfig)


def tokenizer_config(options: argparse.Namespace, settings: Sequence[str] = ()) -> TokenizerConfig:
    """The tokenizer of the options, changed by settings such as "--tokenizer.extra_ids=100".

    Raises:
        UserError: inconsistent options, or an unknown or invalid setting.
    """
    typed = any(word.startswith(f"{SETTINGS}type=") for word in settings)
    if options.tokenizer is None and not typed:
        raise UserError(f"the tokenizer is missing: give --tokenizer=KIND or PATH, one of {', '.join(KINDS)}.")
    config = _by_name(options.tokenizer, options) if options.tokenizer else ByteTokenizerConfig()
    return override(_Chosen(config), *settings, place="the options").tokenizer if settings else config


def _by_name(name: str, options: argparse.Namespace) -> TokenizerConfig:
    kind = KINDS.get(name, Kind(FILES[_suffix(name)]))
    for option in ("vocab_file", "merge_file", "vocab_size"):
        if (getattr(options, option) is None) == (option in kind.options):
            state = "needs" if option in kind.options else "has no use for"
            raise UserError(f"--tokenizer={name} {state} --{option.replace('_', '-')}.")
    values = {field: getattr(options, option) for option, field in kind.options.items()} | dict(kind.fixed)
    if name not in KINDS:
        if not os.path.exists(name):
            names = ", ".join(KINDS)
            hint = download_hint(name, "give {}/tokenizer.json instead")
            message = f"--tokenizer={name}: neither one of {names} nor a tokenizer.json or .model that exists."
            raise UserError(message + f"\n    {hint}" * bool(hint))
        values["path"] = name
    if options.eod_token is not None:
        if "eod" not in {field.name for field in fields(kind.config)}:
            end_token = "[EOS]" if kind.config is WordPieceTokenizerConfig else "its last id"
            raise UserError(f"--tokenizer={name} has no use for --eod-token: {end_token} ends a document.")
        values["eod"] = options.eod_token
    return kind.config(**values)


def _suffix(path: str) -> str:
    return next(suffix for suffix in FILES if path.endswith(suffix))


def tokenizer_options(config: Any) -> list[str]:
    """Options for a tokenizer of this package, the inverse of `tokenizer_config`; [] for other tokenizers."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, kind in KINDS.items():
        if type(config) is kind.config and all(values[field] == value for field, value in kind.fixed.items()):
            options = [f"--{option.replace('_', '-')}={values.pop(field)}" for option, field in kind.options.items()]
            rest = {field: value for field, value in values.items() if field not in kind.fixed}
            return [f"--tokenizer={name}", *options, *_changes(config, rest)]
    if type(config) is HuggingFaceTokenizerConfig:
        return [f"--tokenizer={values.pop('path')}", *_changes(config, values)]
    return []


def _changes(config: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """Options for the values that differ from the defaults."""
    usual = {field.name: default(field) for field in fields(config)}
    for name, value in values.items():
        if value != usual[name]:
            text = ",".join(value) if isinstance(value, tuple) else value
            text = str(text).lower() if isinstance(value, bool) else text
            yield f"--eod-token={text}" if name == "eod" else f"{SETTINGS}{name}={text}"
