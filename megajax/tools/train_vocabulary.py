"""Train a WordPiece vocabulary: `python -m megajax.tools.train_vocabulary --input corpus.txt --output vocab.txt`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.config.paths_and_store_urls import PathText
from megajax.storage.write_errors import write_fault

USAGE = """python -m megajax.tools.train_vocabulary --input=PATH[,PATH…] --output=FILE [--size=8000] [--cased]

Trains a WordPiece vocabulary from text and writes it as vocab.txt, one token per line, the special tokens first. The
same text gives the same file. Needs the extra `tokenizers`, and memory for the distinct words of the text.

  --input=PATH,…    text files or JSON lines, patterns or folders, also .gz and .zst, as for megajax.preprocess
  --output=FILE     the file to write; it must not exist
  --size=8000       maximum number of tokens
  --cased           keep case and accents: for --tokenizer=wordpiece-cased
  --json-key=text   the key of the text in JSON lines
"""
FLAGS = (
    Flag("input", tuple[PathText, ...], required=True),
    Flag("output", Path, required=True),
    Flag("size", int, 8000),
    Flag("cased"),
    Flag("json-key", str, "text"),
)
CHUNK_BYTES = 4 << 20
"""Bytes of text read at a time."""


def main(argv: list[str]) -> int:
    """Train and write.

    Raises:
        UserError: missing files, an impossible size, or a wrong command line.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    flags = parse(argv, verb="tools.train_vocabulary", flags=FLAGS, with_config=False).flags
    output = Path(flags["output"])
    if output.exists():
        raise UserError(f"{output} already exists: remove it, or give another --output")
    # By name, so that the front door can report a package that is not installed.
    find = resolve("megajax.data.preprocessing.text_files:find_files")
    train = resolve("megajax.tokenizers.wordpiece:train_vocabulary")
    atomic_write = resolve("megajax.storage.index_cache:atomic_write")
    files = find(flags["input"])
    tokens = train(lambda: texts(files, flags["json_key"]), size=flags["size"], lower=not flags["cased"])
    try:
        with atomic_write(output) as file:
            file.write("".join(f"{token}\n" for token in tokens).encode())
    except OSError as error:
        raise UserError(f"--output={output} cannot be written: {write_fault(error)}") from error
    kind = "wordpiece-cased" if flags["cased"] else "wordpiece"
    print(f"{output}: {len(tokens)} tokens, for megajax.preprocess --tokenizer={kind} --vocab-file={output}")
    return 0


def texts(files: Sequence[Any], key: str) -> Iterator[str]:
    """The lines of text files, and the texts of JSON lines and Parquet. UserErrors name the file and line."""
    format_of = resolve("megajax.data.preprocessing.text_formats:format_of")
    lines = resolve("megajax.data.preprocessing.text_files:EachLine")
    for file in files:
        kind = format_of(file.format, lines(), (key,))
        for chunk in kind.chunks(file, CHUNK_BYTES, len):
            for place, row in kind.rows(chunk):
                try:
                    yield kind.texts(row)[0].decode("utf-8", errors="replace")
                except UserError as error:
                    raise UserError(f"{file.path}, {kind.location(chunk, place)}: {error}") from error


if __name__ == "__main__":
    front_door(main)
