"""Report on a run, as an HTML page or as text: `python -m megajax.report RUN_DIR`."""

from pathlib import Path

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve

DESCRIPTION = """Write a report on a run (curves, events, where the time went, config) into one HTML page that can be
read offline: python -m megajax.report RUN_DIR. With --text, print it instead. The run may still be running, or have
crashed."""
FLAGS = (
    Flag(
        "run-dir",
        Path,
        required=True,
        help="the folder of the run; the flag's name may be left out: megajax.report RUN_DIR",
    ),
    Flag("output", Path | None, help="file of the page; none: RUN_DIR/report.html, or no page with --text"),
    Flag("text", help="print the report as text"),
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 2 no run in the folder, or the page can't be written.

    Raises:
        UserError: for errors that the user can mend.
    """
    flags = parse(_named(argv), verb="report", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    resolve("megajax.reporting.write:report")(flags["run_dir"], flags["output"], as_text=flags["text"])
    return 0


def _named(argv: list[str]) -> list[str]:
    """The words, with --run-dir= before the one that is neither a flag nor the value of one."""
    words, after = [], ""
    for word in argv:
        alone = not word.startswith("-") and after not in ("--output", "--run-dir", "--run_dir")
        words.append(f"--run-dir={word}" if alone else word)
        after = word
    return words


if __name__ == "__main__":
    front_door(main)
