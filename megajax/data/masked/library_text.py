"""A corpus of English sentences without a download: docstrings and comments of Python's standard library."""

import platform
import re
from collections.abc import Iterator
from pathlib import Path

from megajax.batch import Schema
from megajax.data.masked.config import LibraryTextConfig, LibraryWordPieceConfig
from megajax.data.rows.row_source import data_seed
from megajax.data.rows.splits import Rows, Splits
from megajax.data.text.indexed_dataset import IndexedTokens, IndexedWriter, token_dtype
from megajax.data.text.split_sentences import split_sentences
from megajax.data.text.standard_library import library_root, load_or_create, select_files
from megajax.storage.index_cache import atomic_write, content_key
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import WordPieceTokenizerConfig
from megajax.tokenizers.wordpiece import WordPieceTokenizer, train_vocabulary

PROSE = re.compile(
    r"""
      ^[ \t]*[rRuU]? (\"{3}|'{3}) (?P<docstring>.*?) \1   # at the start of a line
    | (?P<comment> (?:^[ \t]*\#[ ][^\n]*\n){2,} )          # of two lines or more
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
SENTENCE = re.compile(r"[A-Z][a-zA-Z0-9 ,;:'\"()`/.-]*[.!?]")
FEWEST_WORDS, PLAIN_SHARE = 4, 0.75
"""Minimum words of a sentence, and minimum share of purely alphabetic words, which is lower in code and tables."""


def sentences(source: str) -> Iterator[str]:
    """The English sentences of a source file, each without line breaks."""
    for match in PROSE.finditer(source):
        text = match["docstring"] or re.sub(r"(?m)^[ \t]*# ?", "", match["comment"] or "")
        for raw in split_sentences(text.encode(errors="replace")):
            words = raw.decode().split()
            plain = sum(word.isalpha() for word in words)
            if len(words) >= FEWEST_WORDS and plain >= PLAIN_SHARE * len(words) and SENTENCE.fullmatch(" ".join(words)):
                yield " ".join(words)


def documents(files: list[tuple[str, int]]) -> Iterator[list[str]]:
    """The sentences of each file that has at least two."""
    for name, _ in files:
        document = list(sentences((library_root() / name).read_text(encoding="utf-8", errors="replace")))
        if len(document) > 1:
            yield document


def _key(files: list[tuple[str, int]], **more: object) -> str:
    """Key of a file in the cache: a hash of its inputs."""
    rule = [PROSE.pattern, SENTENCE.pattern, FEWEST_WORDS, PLAIN_SHARE]
    description = {"files": [list(entry) for entry in files], "rule": rule, **more}
    return f"{platform.python_version()}-{content_key(description)[:16]}"


def corpus(config: LibraryTextConfig, tokenizer: Tokenizer, seed: int) -> IndexedTokens:
    """The token file, a sequence for each sentence, written if it does not exist; see `standard_library.corpus`.

    Raises:
        UserError: this Python has no library sources, or no folder can be written.
    """
    files = select_files(config.megabytes, seed)
    name = f"english-{_key(files, tokenizer=tokenizer.identity)}"

    def write(prefix: Path) -> None:
        with IndexedWriter(prefix, token_dtype(tokenizer.vocabulary_size)) as writer:
            for document in documents(files):
                writer.add_document([tokenizer.encode(sentence) for sentence in document])

    return load_or_create(config.cache_dir, name, IndexedTokens, write)


def build_splits(config: LibraryTextConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int) -> Splits:
    """Rows of masked sentences or spans; file choice and row order follow the seed.

    Raises:
        UserError: the tokenizer lacks special tokens that the rows need; see also `corpus`.
    """
    own_seed = data_seed(config.seed, seed)
    tokens = corpus(config, tokenizer, own_seed)
    masked = config.masked(str(tokens.prefix))
    return masked.build(tokenizer=tokenizer, schema=schema, rows=rows, seed=own_seed)


def build_tokenizer(config: LibraryWordPieceConfig) -> WordPieceTokenizer:
    """The tokenizer, whose vocabulary is trained if it does not exist.

    Raises:
        UserError: this Python has no library sources, no folder can be written, or the extra `tokenizers` is missing.
    """
    files = select_files(config.megabytes, 0)

    def read(path: Path) -> WordPieceTokenizer:
        return WordPieceTokenizer(WordPieceTokenizerConfig(vocabulary=str(path), extra_ids=config.extra_ids))

    def write(path: Path) -> None:
        text = [sentence for document in documents(files) for sentence in document]
        vocabulary = train_vocabulary(lambda: text, size=config.size)
        with atomic_write(path) as file:
            file.write("".join(f"{token}\n" for token in vocabulary).encode())

    return load_or_create(config.cache_dir, f"english-{_key(files, size=config.size)}.txt", read, write)
