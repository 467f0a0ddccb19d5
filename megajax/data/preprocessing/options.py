"""The preprocessing job and its command line."""

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from megajax.command_line.foreign_flags import corrections
from megajax.config.class_references import Builds
from megajax.config.compose import override
from megajax.config.errors import UserError
from megajax.config.field_types import default
from megajax.config.hints import did_you_mean, download_hint
from megajax.config.paths_and_store_urls import path_argument, stored_argument
from megajax.config.settings_tree import plain_name
from megajax.data.preprocessing.text_files import DocumentRule, EachLine, EachParagraph, MarkedLines, WholeFile
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
class TokenizerName:
    """A name of `--tokenizer`: its config, the fields that options set, and the fields that the name sets."""

    config: type[Any]
    options: Mapping[str, str] = field(default_factory=dict)
    """Option, as argparse names it -> field."""
    fixed: Mapping[str, Any] = field(default_factory=dict)


KINDS: Mapping[str, TokenizerName] = {
    "byte": TokenizerName(ByteTokenizerConfig),
    "gpt2": TokenizerName(GPT2TokenizerConfig, {"vocab_file": "vocabulary", "merge_file": "merges"}),
    "null": TokenizerName(NullTokenizerConfig, {"vocab_size": "vocabulary_size"}),
    "wordpiece": TokenizerName(WordPieceTokenizerConfig, {"vocab_file": "vocabulary"}, {"lower": True}),
    "wordpiece-cased": TokenizerName(WordPieceTokenizerConfig, {"vocab_file": "vocabulary"}, {"lower": False}),
    "sentencepiece": TokenizerName(SentencePieceTokenizerConfig, {"vocab_file": "path"}),
    "tiktoken": TokenizerName(TiktokenTokenizerConfig, {"vocab_file": "path"}),
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
    kind = KINDS.get(name, TokenizerName(FILES[_suffix(name)]))
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


def _changes(config: Any, values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Options for the values, None: of all fields, that differ from the defaults."""
    usual = {field.name: default(field) for field in fields(config)}
    for name, value in ({name: getattr(config, name) for name in usual} if values is None else values).items():
        if value != usual[name]:
            text = ",".join(value) if isinstance(value, tuple) else value
            text = str(text).lower() if isinstance(value, bool) else text
            yield f"--eod-token={text}" if name == "eod" else f"{SETTINGS}{name}={text}"


TEXT_KEY = "text"
"""The key of plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing(Builds):
    """A preprocessing job.

    Attributes:
        inputs: files, patterns and folders.
        prefix: output goes to PREFIX_KEY_document.bin and .idx, for each of `keys`.
        keys: keys of text in JSON lines, or columns of Parquet; the key of plain text is "text".
        append_eod: end every document that is not empty with the tokenizer's `eod`.
        split_sentences: a sequence for each sentence, for masked data; the output is PREFIX_KEY_sentence.
        rule: divides plain text into documents.
        format: jsonl, text or parquet; None: by the names of the files.
        targets: files of plain text whose lines correspond to those of `inputs`; needs two `keys`, one for each side.
        pairs: the texts of a row form a pair, so none may be empty.
        on_error: stop: an invalid row ends the job; skip: skip and count invalid rows.
        workers: maximum number of processes.
        partitions: number of parts of the input, each read and written by a separate process, and merged in order; 1: a
            single process reads everything. Does not affect the result.
        ray: address of a Ray cluster whose machines have the workers; None: this machine.
        overwrite: replace existing output.
        chunk_bytes: bytes of text per chunk; does not affect the result.
    """

    target: ClassVar[str] = "megajax.data.preprocessing.preprocessing:preprocess"

    inputs: tuple[str, ...]
    prefix: str
    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = (TEXT_KEY,)
    append_eod: bool = False
    split_sentences: bool = False
    rule: DocumentRule = field(default_factory=WholeFile)
    format: str | None = None
    targets: tuple[str, ...] = ()
    pairs: bool = False
    on_error: Literal["stop", "skip"] = "stop"
    workers: int = 1
    partitions: int = 1
    ray: str | None = None
    overwrite: bool = False
    chunk_bytes: int = 4 << 20

    def output(self, key: str) -> str:
        """Prefix of the token files of a key."""
        return f"{self.prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"

    def settings(self, vocabulary: int) -> str:
        """The settings of a run that trains on the output, and on the vocabulary of its tokenizer."""
        name, tokenizer = type(self.tokenizer).__name__.removesuffix("Config"), "--tokenizer."
        changed = [word.replace("--eod-token", f"{tokenizer}eod") for word in _changes(self.tokenizer)]
        words = [f"{tokenizer}type={name}", *changed, f"--model.vocabulary_size={vocabulary}"]
        return " ".join([self._data_settings(), *map(shlex.quote, words)])

    def _data_settings(self) -> str:
        if not self.pairs:
            kind = "" if self.split_sentences else "--data.type=Blend "
            return f"{kind}--data.paths={','.join(map(self.output, self.keys))}"
        keys = "" if self.keys == PAIR_KEYS else f" --data.keys={','.join(self.keys)}"
        return f"--data.type=PairsConfig --data.paths={self.prefix}{keys}"


PAIR_KEYS = ("source", "target")
"""Keys of two files of plain text with corresponding lines."""
EPILOG = """examples:
  JSON lines, GPT-2 tokens, 8 processes:
    python -m megajax.preprocess --input corpus/*.jsonl.zst --output-prefix data/corpus --append-eod --workers=8 \\
      --tokenizer=gpt2 --vocab-file=vocab.json --merge-file=merges.txt
  WikiText, one document per article:
    python -m megajax.preprocess --input wiki.train.txt --output-prefix data/wiki --append-eod \\
      --tokenizer=byte --document-regex='^ = [^=].* = $'
"""
RULES = MappingProxyType({"file": WholeFile, "line": EachLine, "paragraph": EachParagraph})
FORMATS = ("auto", "jsonl", "text", "parquet")


def command_line() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m megajax.preprocess",
        description="Tokenize text into PREFIX_KEY_document.bin and .idx, which training reads (Megatron-LM's format).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", type=stored_argument, required=True, metavar="PATH", help="files, patterns or "
        "folders of .jsonl, .txt, also .gz and .zst, or .parquet, in the order of the documents; also s3:// or "
        "gs://")  # fmt: skip
    add("--target", nargs="+", type=stored_argument, default=[], metavar="PATH", help="files of plain text whose "
        "lines correspond to those of --input, as translations; writes PREFIX_source_document and "
        "PREFIX_target_document")  # fmt: skip
    add("--output-prefix", type=path_argument, required=True, metavar="PREFIX", help="path of the output, without "
        "_KEY_document and suffix")  # fmt: skip
    add("--tokenizer", metavar="KIND", help="byte; gpt2 (needs --vocab-file, --merge-file); null (text is numbers, "
        "needs --vocab-size); wordpiece, wordpiece-cased, sentencepiece or tiktoken (need --vocab-file); or the path "
        "of a Hugging Face tokenizer.json or a SentencePiece .model")  # fmt: skip
    add("--tokenizer.SETTING", metavar="VALUE", help="a setting of the tokenizer as in a run, such as "
        "--tokenizer.extra_ids=100; --tokenizer.type=CLASS chooses any tokenizer")  # fmt: skip
    add("--vocab-file", metavar="FILE", help="vocab.json of --tokenizer=gpt2, vocab.txt of WordPiece, .model of "
        "sentencepiece, ranks of tiktoken")  # fmt: skip
    add("--merge-file", metavar="FILE", help="merges.txt of --tokenizer=gpt2")
    add("--vocab-size", type=int, metavar="N", help="vocabulary of --tokenizer=null; its last id ends a document")
    add("--eod-token", metavar="TOKEN", help="token that ends a document (default: gpt2's, or the usual ones)")
    add("--append-eod", action="store_true", help="end each nonempty document with that token")
    add("--split-sentences", action="store_true", help="a sequence for each sentence, for BERT and T5; the output is "
        "PREFIX_KEY_sentence.bin and .idx")  # fmt: skip
    add("--json-keys", nargs="+", metavar="KEY", help="keys of JSON lines, or columns of Parquet, to tokenize, each "
        "into separate files (default: text)")  # fmt: skip
    add("--pairs", action="store_true", help="the texts of a row form a pair: none may be empty")
    add("--on-error", choices=("stop", "skip"), default="stop", help="what to do with an invalid row: end the job, "
        "or skip and count it (default: stop)")  # fmt: skip
    add("--format", choices=FORMATS, default="auto", help="format of the inputs (default: by their names)")
    add("--document", choices=RULES, help="plain text: the unit of a document (default: file); paragraphs are "
        "separated by blank lines, blank lines are not documents")  # fmt: skip
    add(
        "--document-regex",
        metavar="REGEX",
        help="plain text: a document begins at each line that contains this pattern",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--workers", type=int, default=cores, metavar="N", help=f"maximum number of processes (default: {cores}, the "
        "available cores); does not affect the output")  # fmt: skip
    add("--partitions", type=int, default=1, metavar="N", help="parts of the input, each read by a separate process; "
        "1: a single process reads everything; does not affect the output (default: 1)")  # fmt: skip
    add("--ray", metavar="ADDRESS", help="run the workers on a Ray cluster whose machines share the files: the address "
        "of its head, or auto; does not affect the output")  # fmt: skip
    add("--log-interval", type=float, default=10.0, metavar="SECONDS", help="time between lines of progress if the "
        "output is not a terminal (default: 10)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace existing output")
    return parser


def document_rule(options: argparse.Namespace) -> DocumentRule:
    """The rule that divides plain text into documents. Raises UserError for two options or an invalid pattern."""
    if options.document_regex is None:
        return RULES[options.document or "file"]()
    if options.document is not None:
        raise UserError("--document and --document-regex both define documents; give one of them.")
    try:
        return MarkedLines(re.compile(options.document_regex))
    except re.error as error:
        raise UserError(f"--document-regex {options.document_regex!r} is not a regular expression: {error}.") from error


def _settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the tokenizer, "--tokenizer.NAME=VALUE", and the other arguments."""
    settings, rest, remaining = [], [], list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith(SETTINGS):
            rest.append(word)
        elif "=" in word or not remaining or remaining[0].startswith("--"):
            settings.append(word)
        else:
            settings.append(f"{word}={remaining.pop(0)}")
    return settings, rest


def parse(arguments: Sequence[str]) -> tuple[Preprocessing, float]:
    """The job, and the seconds between progress lines. Raises UserError for unknown or inconsistent options."""
    parser = command_line()
    known_options = {"--", "--help", *re.findall(r"--[\w-]+", parser.format_usage())}
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known_options and not name.startswith(SETTINGS):
            flags = [plain_name(option.strip("-")) for option in known_options]
            answers = corrections({plain_name(name[2:]): argument.partition("=")[2]}, flags, config=False)
            hints = [problem.hint for problem in answers.values() if problem.hint]
            hint = "; ".join(hints) or did_you_mean(name, known_options) or "--help lists all options."
            raise UserError(f"unknown option {name}: {hint}")
    settings, rest = _settings(arguments)
    options = parser.parse_args(rest)
    if options.workers < 1:
        raise UserError(f"--workers={options.workers}: give at least 1.")
    if options.partitions < 1:
        raise UserError(f"--partitions={options.partitions}: give at least 1.")
    if options.target and (options.document or options.document_regex):
        raise UserError("--target pairs lines; --document and --document-regex do not apply. Leave them out.")
    usual = PAIR_KEYS if options.target else (TEXT_KEY,)
    job = Preprocessing(
        inputs=tuple(options.input),
        prefix=options.output_prefix,
        tokenizer=tokenizer_config(options, settings),
        keys=usual if options.json_keys is None else tuple(options.json_keys),
        append_eod=options.append_eod,
        split_sentences=options.split_sentences,
        rule=document_rule(options),
        format=None if options.format == "auto" else options.format,
        targets=tuple(options.target),
        pairs=options.pairs or bool(options.target),
        on_error=options.on_error,
        workers=options.workers,
        partitions=options.partitions,
        ray=options.ray,
        overwrite=options.overwrite,
    )
    return job, options.log_interval
