"""The flag --json[=FILE] of tools that print a report."""

from pathlib import Path

from megajax.command_line.parser import Flag
from megajax.metrics.run_folder import write_output_file

JSON = Flag("json", None | bool | Path)


def show(text: str, json_text: str, output: bool | Path | None) -> None:
    """Print the text, or with --json the JSON instead; with --json=FILE, print the text and write the JSON to the file.

    Raises:
        UserError: the file cannot be written.
    """
    if isinstance(output, Path):
        write_output_file(output, json_text + "\n")
    print(json_text if output is True else text)
