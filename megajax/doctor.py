"""Check whether this machine is fit for training: `python -m megajax.doctor`."""

import sys
from pathlib import Path

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve

DESCRIPTION = """Check an installation and a machine, a line for each check: ok, warn or fail, and what to do. Takes
seconds without a GPU; what hangs is given up after a while. On a cluster:
srun --ntasks-per-node=1 python -m megajax.doctor"""
FLAGS = (
    Flag("run-dir", Path | None, help="where runs are to be written; none: the folder this is started in"),
    Flag("json", help="print JSON instead of lines"),
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 nothing failed (there may be warnings), 1 a check failed, 2 a wrong command line, 130 interrupted.

    Raises:
        UserError: for what the user has to change.
    """
    flags = parse(argv, verb="doctor", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    try:
        return resolve("megajax.reporting.machine.examine:examine")(flags["run_dir"], as_json=flags["json"])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    front_door(main)
