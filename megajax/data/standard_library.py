"""A corpus without a download, the source text of Python's standard library: bytes, or lines for masked models."""

import os
import platform
import random
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megajax.batch import Schema
from megajax.config.errors import UserError
from megajax.data.masked.config import LibraryTextConfig, LibraryWordPieceConfig
from megajax.data.rows.row_source import data_seed
from megajax.data.rows.splits import Rows, Splits, parse_split
from megajax.data.text.config import BlendConfig, StandardLibraryConfig
from megajax.data.text.gpt import DatasetBuilder
from megajax.data.text.indexed_dataset import IndexedTokens, IndexedWriter, token_dtype
from megajax.storage.index_cache import atomic_write, content_key, user_cache
from megajax.tokenizers.base import Tokenizer
from megajax.tokenizers.config import WordPieceTokenizerConfig
from megajax.tokenizers.wordpiece import WordPieceTokenizer, train_vocabulary

BYTE_EOD = 256
FEWEST_WORDS = 4
"""Of a line for masked models."""
NOT_PYTHON_ITSELF = ("site-packages", "dist-packages", "__pycache__")


def source_files(root: Path) -> list[tuple[str, int]]:
    """(path relative to root, bytes) of the library's Python files, sorted by path, without empty files."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in NOT_PYTHON_ITSELF)
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file() and path.stat().st_size:
                files.append((path.relative_to(root).as_posix(), path.stat().st_size))
    return sorted(files)


def choose(files: list[tuple[str, int]], limit: int, seed: int) -> list[tuple[str, int]]:
    """Files in a random order by the seed, up to `limit` bytes in total, but at least one."""
    order = list(files)
    random.Random(seed).shuffle(order)
    selection, total = [], 0
    for name, size in order:
        if not selection or total + size <= limit:
            selection.append((name, size))
            total += size
    return selection


def library_root() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def select_files(megabytes: float, seed: int) -> list[tuple[str, int]]:
    """The library's files up to a size, see `choose`. Raises UserError for a Python without its sources."""
    files = choose(source_files(library_root()), int(megabytes * 1e6), seed)
    if not files:
        raise UserError(f"{library_root()}: no Python source files: this Python has no library sources.")
    return files


def _folders(cache_dir: str | None) -> Iterator[Path]:
    """Folders to try: the configured one, the user's cache, the system's temporary folder."""
    if cache_dir:
        yield Path(cache_dir)
    yield user_cache() / "standard_library"
    yield Path(tempfile.gettempdir()) / f"megajax-{os.getuid()}"


def load_or_create[T](cache_dir: str | None, name: str, read: Callable[[Path], T], write: Callable[[Path], None]) -> T:
    """The result of `read` on the path with this name, which `write` creates if it does not exist.

    Several processes may create it at once: each writes temporary files with equal content and renames them.

    Raises:
        UserError: no folder is writable.
    """
    failures = []
    for folder in _folders(cache_dir):
        try:
            return read(folder / name)
        except UserError:
            pass  # missing, or damaged by a crash: written again
        try:
            write(folder / name)
        except (OSError, UserError) as error:
            failures.append(str(error))
            continue
        return read(folder / name)
    raise UserError("the standard library's text cannot be stored anywhere:\n" + "\n".join(failures))


def text_lines(source: bytes) -> list[str]:
    """The lines of a file that have several words: text, and longer statements."""
    lines = source.decode(errors="replace").splitlines()
    return [line.strip() for line in lines if len(line.split()) >= FEWEST_WORDS]


def _name(files: list[tuple[str, int]], **rules: object) -> str:
    """Name of what is written from files; a Python upgrade and other files or rules change it."""
    key = content_key({"python": platform.python_version(), "files": [list(entry) for entry in files], **rules})
    return f"python-{platform.python_version()}-{len(files)}-{key[:16]}"


def corpus(
    config: StandardLibraryConfig | LibraryTextConfig, seed: int, tokenizer: Tokenizer | None = None
) -> IndexedTokens:
    """The token file of the selected files, created if it does not exist.

    tokenizer: makes a sequence of each of `text_lines`; None: a file is one sequence, its bytes and BYTE_EOD.

    Raises:
        UserError: this Python has no library sources, or no folder is writable.
    """
    files = select_files(config.megabytes, seed)

    def write(prefix: Path) -> None:
        dtype = token_dtype(BYTE_EOD + 1 if tokenizer is None else tokenizer.vocabulary_size)
        with IndexedWriter(prefix, dtype) as writer:
            for name, _ in files:
                source = (library_root() / name).read_bytes()
                if tokenizer is None:
                    text = np.frombuffer(source, np.uint8)
                    writer.add_document([np.append(text.astype(np.uint16), np.uint16(BYTE_EOD))])
                elif len(lines := text_lines(source)) > 1:
                    writer.add_document([tokenizer.encode(line) for line in lines])

    rules = {} if tokenizer is None else {"lines": FEWEST_WORDS, "tokenizer": tokenizer.identity}
    return load_or_create(config.cache_dir, _name(files, **rules), IndexedTokens, write)


def build_splits(
    config: StandardLibraryConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int
) -> Splits:
    """Row sources of source text; file choice and row order follow the seed.

    Raises:
        UserError: a tokenizer other than the byte tokenizer; see also `corpus`.
    """
    if tokenizer.eod != BYTE_EOD or tokenizer.vocabulary_size <= BYTE_EOD:
        raise UserError(
            f"the standard library's text is stored as bytes (256 values, end of document {BYTE_EOD}), but the "
            f"tokenizer {tokenizer.identity} has {tokenizer.vocabulary_size} tokens and ends documents with "
            f"{tokenizer.eod}. Choose the byte tokenizer, or preprocess files of your own and set data.paths."
        )
    own_seed = data_seed(config.seed, seed)
    blend = BlendConfig(seed=own_seed, cache_dir=config.cache_dir, isolate_documents=config.isolate_documents)
    builder = DatasetBuilder(blend, tokenizer=tokenizer, sequence_length=schema["tokens"].positions(), seed=own_seed)
    return builder.splits([corpus(config, own_seed)], None, parse_split(config.split), rows)


def build_masked_splits(
    config: LibraryTextConfig, *, tokenizer: Tokenizer, schema: Schema, rows: Rows, seed: int
) -> Splits:
    """Rows of masked lines or spans; file choice and row order follow the seed.

    Raises:
        UserError: the tokenizer lacks special tokens that the rows need; see also `corpus`.
    """
    own_seed = data_seed(config.seed, seed)
    masked = config.masked(str(corpus(config, own_seed, tokenizer).prefix))
    return masked.build(tokenizer=tokenizer, schema=schema, rows=rows, seed=own_seed)


def build_tokenizer(config: LibraryWordPieceConfig) -> WordPieceTokenizer:
    """The tokenizer, whose vocabulary is trained on `text_lines` if it does not exist.

    Raises:
        UserError: this Python has no library sources, no folder can be written, or the extra `tokenizers` is missing.
    """
    files = select_files(config.megabytes, 0)

    def read(path: Path) -> WordPieceTokenizer:
        return WordPieceTokenizer(WordPieceTokenizerConfig(vocabulary=str(path), extra_ids=config.extra_ids))

    def write(path: Path) -> None:
        lines = [line for name, _ in files for line in text_lines((library_root() / name).read_bytes())]
        vocabulary = train_vocabulary(lambda: lines, size=config.size)
        with atomic_write(path) as file:
            file.write("".join(f"{token}\n" for token in vocabulary).encode())

    name = f"{_name(files, lines=FEWEST_WORDS, size=config.size)}.txt"
    return load_or_create(config.cache_dir, name, read, write)
