"""The error for missing token files, with the command that creates them."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megajax.config.config_files import download_of
from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import store_url
from megajax.config.read_limits import parse_json
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.data.preprocessing.options import TEXT_KEY, tokenizer_options
from megajax.data.rows.config import TokenFilesConfig
from megajax.data.rows.splits import parse_paths
from megajax.data.text.indexed_dataset import index_path, tokens_path
from megajax.tokenizers.config import (
    GPT2TokenizerConfig,
    HuggingFaceTokenizerConfig,
    MultimodalTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    WordPieceTokenizerConfig,
)

TEXT = re.compile(r"\.(txt|text|md|jsonl?|parquet|csv)(\.(gz|zst))?$")
"""Ends of the names of files of text."""
KEY_BYTES = 1 << 20
"""Of the first line of a file, which is searched for its keys."""
SOURCES: Mapping[type, str] = {
    GPT2TokenizerConfig: "GPT-2's vocab.json and merges.txt: https://huggingface.co/openai-community/gpt2",
    WordPieceTokenizerConfig: "BERT's vocab.txt: https://huggingface.co/google-bert/bert-base-uncased",
    HuggingFaceTokenizerConfig: "A tokenizer.json comes with every model on https://huggingface.co",
    SentencePieceTokenizerConfig: "A .model file comes with the weights of the model, or make one with spm_train",
    TiktokenTokenizerConfig: "A file of ranks comes with the weights of the model",
}


def demand_files(data: object, tokenizer: object) -> None:
    """Checks that the token files of a data config and a tokenizer.json exist, before any file is read.

    Raises:
        UserError: names the missing files, including those of the tokenizer, and the command that gets them.
    """
    tokenizer = tokenizer.base if isinstance(tokenizer, MultimodalTokenizerConfig) else tokenizer
    if isinstance(data, TokenFilesConfig):
        _demand_tokens(data, tokenizer)
    if not isinstance(tokenizer, HuggingFaceTokenizerConfig) or store_url(tokenizer.path) is not None:
        return
    if not (path := Path(tokenizer.path)).exists():
        folder = path.parent if path.suffix == ".json" else path
        command = f"hf download ORGANIZATION/NAME {path.name} --local-dir {folder}" if folder.is_dir() else ""
        raise UserError(
            f"tokenizer.path={path}: no such file or folder in {Path.cwd()}. It comes with its model:\n"
            f"  {command or download_of(folder)}"
        )


def _demand_tokens(data: TokenFilesConfig, tokenizer: object) -> None:
    """Checks that the token files exist. Raises UserError, see `demand_files`."""
    lists = [items for items in (data.paths, data.train_paths, data.valid_paths, data.test_paths) if items]
    paths = [prefix for items in lists for prefix in parse_paths(items)[0]]
    prefixes = [file for prefix in paths if store_url(prefix) is None for file in data.token_files(prefix)]
    absent = [path for prefix in prefixes for path in (tokens_path(prefix), index_path(prefix)) if not path.is_file()]
    if not absent:
        return
    if texts := [path for path in paths if Path(path).exists() or TEXT.search(path)]:
        raise UserError(_of_text(Path(texts[0]), data, tokenizer_options(tokenizer) or ["--tokenizer=TOKENIZER"]))
    lines = [f"data: no such file: {', '.join(map(str, absent))} (looked for in {Path.cwd()})"]
    unread = [path for path in _files(tokenizer) if not Path(path).exists()]
    lines += [f"tokenizer: no such file: {', '.join(unread)}"] if unread else []
    options = tokenizer_options(tokenizer)
    match = re.fullmatch(r"(.+)_([^_/]+)_(document|sentence)", str(absent[0].with_suffix("")))
    if options and match:
        key = [] if match[2] == "text" else [f"--json-keys={match[2]}"]
        kind = ["--append-eod"] if match[3] == "document" else ["--split-sentences"]
        flags = data.preprocess_flags() or [*key, *kind]
        options = ["--input", "corpus.jsonl", "--output-prefix", match[1], *options, *flags]
        lines += ["Make the token files from your own text, corpus.jsonl here (JSON lines or plain text):"]
        lines += [f"  python -m megajax.preprocess {shlex.join(options)}"]
    else:
        lines += ["Files of tokens are PREFIX.bin and PREFIX.idx; python -m megajax.preprocess writes them"]
    lines += [SOURCES[type(tokenizer)]] if unread else []
    raise UserError("\n".join(lines))


def _of_text(path: Path, data: TokenFilesConfig, options: Sequence[str]) -> str:
    """The message for text in place of token files: the commands that preprocess it and read it."""
    key, name = TEXT_KEY, TEXT.sub("", path.name) or "corpus"
    if re.search(r"\.jsonl$", path.name) and path.is_file():
        with path.open("rb") as file, suppress(ValueError, AttributeError):
            row = parse_json(file.readline(KEY_BYTES))
            if {"messages", "conversations"} & row.keys():
                return f"data.paths={path} has conversations: read them with --data.type=ChatConfig --data.paths={path}"
            texts = [key for key, value in row.items() if isinstance(value, str)]
            key = texts[0] if texts and key not in texts else key
    is_masked = isinstance(data, MaskedSentencesConfig | MaskedSpansConfig)
    keys = [f"--json-keys={key}"] if key != TEXT_KEY else []
    flags = data.preprocess_flags() or [*keys, "--split-sentences" if is_masked else "--append-eod"]
    prefix = (
        f"data/{name}" if data.preprocess_flags() else f"data/{name}_{key}_{'sentence' if is_masked else 'document'}"
    )
    command = ["--input", str(path), "--output-prefix", f"data/{name}", *options, *flags]
    is_there = "" if path.exists() else f", and there is no such file in {Path.cwd()}"
    lines = [f"data.paths={path} is text{is_there}: preprocess it, and give the prefix of the token files"]
    lines += [f"  python -m megajax.preprocess {shlex.join(command)}", f"  --data.paths={prefix}"]
    if not is_masked and re.search(r"\.(jsonl(\.gz|\.zst)?|parquet)$", path.name):
        text = f" --data.text={key}" if key != TEXT_KEY else ""
        lines += ["or let the run tokenize it as it reads", f"  --data.type=StreamConfig --data.paths={path}{text}"]
    return "\n".join(lines)


def _files(tokenizer: object) -> tuple[str, ...]:
    values = [getattr(tokenizer, name, None) for name in ("vocabulary", "merges", "path")]
    return tuple(value for value in values if value) if type(tokenizer) in SOURCES else ()
