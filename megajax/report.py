"""Report on a run, as an HTML page or as text: `python -m megajax.report RUN_DIR`."""

from pathlib import Path

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.class_references import resolve

DESCRIPTION = """Write a report on a run (curves, events, use of time, config) as one HTML page that can be read
offline: python -m megajax.report RUN_DIR. With --text, print it instead. The run may be in progress or have crashed."""
FLAGS = (
    Flag(
        "run-dir",
        Path,
        required=True,
        help="the folder of the run; the flag's name may be omitted: megajax.report RUN_DIR",
    ),
    Flag("output", Path | None, help="file of the page; default: RUN_DIR/report.html, or no page with --text"),
    Flag("text", help="print the report as text"),
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 2 no run in the folder, or the page can't be written.

    Raises:
        UserError: for anything the user has to change.
    """
    flags = parse(
        _with_run_dir_flag(argv), verb="report", flags=FLAGS, with_config=False, description=DESCRIPTION
    ).flags
    resolve("megajax.reporting.write_report:report")(flags["run_dir"], flags["output"], as_text=flags["text"])
    return 0


def _with_run_dir_flag(argv: list[str]) -> list[str]:
    """The arguments, with --run-dir= before the argument that is neither a flag nor the value of one."""
    arguments, previous = [], ""
    for argument in argv:
        is_folder = not argument.startswith("-") and previous not in ("--output", "--run-dir", "--run_dir")
        arguments.append(f"--run-dir={argument}" if is_folder else argument)
        previous = argument
    return arguments


if __name__ == "__main__":
    front_door(main)
