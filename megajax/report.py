"""Report what a run did, as a page or as text: `python -m megajax.report RUN_DIR`."""

from pathlib import Path

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve

DESCRIPTION = """Write what a run did (curves, events, time by cause, config) into one HTML page that can be read
offline: python -m megajax.report RUN_DIR. With --text, print the same facts instead. The run may be under way, or have
crashed."""
FLAGS = (
    Flag("run-dir", Path, required=True, help="the folder of the run; its name alone does: megajax.report RUN_DIR"),
    Flag("output", Path | None, help="the page's file; none: RUN_DIR/report.html, or no page with --text"),
    Flag("text", help="print the report as text"),
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 2 no run there, or the page cannot be written.

    Raises:
        UserError: for what the user has to change.
    """
    flags = parse(_named(argv), verb="report", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    resolve("megajax.reporting.write:report")(flags["run_dir"], flags["output"], as_text=flags["text"])
    return 0


def _named(argv: list[str]) -> list[str]:
    """The folder, a word on its own wherever it stands, as the flag it stands for."""
    words, after = [], ""
    for word in argv:
        alone = not word.startswith("-") and after not in ("--output", "--run-dir", "--run_dir")
        words.append(f"--run-dir={word}" if alone else word)
        after = word
    return words


if __name__ == "__main__":
    front_door(main)
