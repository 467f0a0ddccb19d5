"""The flag --json[=FILE] of tools that show something."""

from pathlib import Path

from megajax.command_line import Flag
from megajax.config.errors import UserError
from megajax.metrics.runfolder import write_output_file

JSON = Flag("json", None | bool | Path)


def show(text: str, json_text: str, asked: bool | Path | None) -> None:
    """Print the text, or with --json the JSON in its place; with --json=FILE, write the JSON to the file as well.

    Raises:
        UserError: the file cannot be written.
    """
    if isinstance(asked, Path):
        write_output_file(asked, json_text + "\n")
    print(json_text if asked is True else text)


def first_word(argv: list[str], what: str, usage: str) -> Path:
    """The path that such a tool begins with. Raises UserError if a flag stands in its place."""
    if argv[0].startswith("-"):
        raise UserError(f"the first word must be {what}, got {argv[0]}\n{usage.splitlines()[0]}")
    return Path(argv[0])
