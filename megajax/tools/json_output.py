"""The flag --json[=FILE] of tools that print a report."""

from pathlib import Path

from megajax.command_line.parser import Flag
from megajax.config.errors import UserError
from megajax.config.file_paths import store_url, url_problem
from megajax.metrics.runfolder import write_output_file

JSON = Flag("json", None | bool | Path)


def show(text: str, json_text: str, output: bool | Path | None) -> None:
    """Print the text, or with --json the JSON instead; with --json=FILE, print the text and write the JSON to the file.

    Raises:
        UserError: the file cannot be written.
    """
    if isinstance(output, Path):
        write_output_file(output, json_text + "\n")
    print(json_text if output is True else text)


def first_word(argv: list[str], expected: str, usage: str, *, stored: bool = False) -> Path:
    """The path that is the first argument. Raises UserError if it is a flag or a URL. stored: accept URLs of stores."""
    if argv[0].startswith("-"):
        raise UserError(f"the first argument must be {expected}, got {argv[0]}\n{usage.splitlines()[0]}")
    if not (stored and store_url(argv[0])) and (problem := url_problem(argv[0])) is not None:
        raise UserError("\n".join(problem))
    return Path(argv[0])
