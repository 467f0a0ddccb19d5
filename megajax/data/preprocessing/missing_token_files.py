"""The error for missing token files, with the command that creates them."""

import re
import shlex
from pathlib import Path
from typing import Any

from megajax.config.errors import UserError
from megajax.config.file_paths import store_url
from megajax.data.preprocessing.options import tokenizer_options
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

SOURCES = {
    GPT2TokenizerConfig: "GPT-2's vocab.json and merges.txt: https://huggingface.co/openai-community/gpt2",
    WordPieceTokenizerConfig: "BERT's vocab.txt: https://huggingface.co/google-bert/bert-base-uncased",
    HuggingFaceTokenizerConfig: "A tokenizer.json comes with every model on https://huggingface.co",
    SentencePieceTokenizerConfig: "A .model file comes with the weights of the model, or make one with spm_train",
    TiktokenTokenizerConfig: "A file of ranks comes with the weights of the model",
}


def demand_files(data: Any, tokenizer: Any) -> None:
    """Checks that the token files of a data config exist, before the tokenizer is built or any file is read.

    Raises:
        UserError: names the missing files, including those of the tokenizer, and the command that writes them.
    """
    if not isinstance(data, TokenFilesConfig):
        return
    lists = [items for items in (data.paths, data.train_paths, data.valid_paths, data.test_paths) if items]
    prefixes = [prefix for items in lists for prefix in parse_paths(items)[0]]
    prefixes = [file for prefix in prefixes if store_url(prefix) is None for file in data.token_files(prefix)]
    absent = [path for prefix in prefixes for path in (tokens_path(prefix), index_path(prefix)) if not path.is_file()]
    if not absent:
        return
    tokenizer = tokenizer.base if isinstance(tokenizer, MultimodalTokenizerConfig) else tokenizer
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


def _files(tokenizer: Any) -> tuple[str, ...]:
    values = [getattr(tokenizer, name, None) for name in ("vocabulary", "merges", "path")]
    return tuple(value for value in values if value) if type(tokenizer) in SOURCES else ()
