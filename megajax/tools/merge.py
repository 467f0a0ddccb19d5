"""Join token files: `python -m megajax.tools.merge --input FOLDER --output-prefix PREFIX`."""

import argparse

from megajax.command_line.parser import front_door
from megajax.config.class_references import resolve
from megajax.config.paths_and_store_urls import path_argument


def main(argv: list[str]) -> int:
    """Join the files and print a summary.

    Raises:
        UserError: for anything the user has to change.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megajax.tools.merge",
        description="Concatenate token files in order. All must have the same dtype.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", type=path_argument, required=True, metavar="PATH", help="prefixes of token files, or "
        "folders: all files of a folder, sorted by name")  # fmt: skip
    add("--output-prefix", type=path_argument, required=True, metavar="PREFIX", help="path of the result, without "
        ".bin and .idx")  # fmt: skip
    add("--overwrite", action="store_true", help="replace existing files")
    options = parser.parse_args(argv)
    # By name, so that the front door can report a package that is not installed.
    merge = resolve("megajax.data.text.indexed_dataset:merge")
    merged = merge(options.input, options.output_prefix, overwrite=options.overwrite)
    print(f"{merged.documents:,} documents, {len(merged):,} sequences, {merged.total:,} tokens of "
          f"{merged.dtype.name}, {merged.total * merged.dtype.itemsize:,} bytes: {options.output_prefix}")  # fmt: skip
    return 0


if __name__ == "__main__":
    front_door(main)
