"""Check an installation and a machine: `python -m megajax.doctor`."""

import sys
from pathlib import Path

from megajax.command_line.parser import PROCESS_FLAGS, Flag, front_door, parse
from megajax.config.class_references import resolve

DESCRIPTION = """Check an installation and a machine. Prints ok, warn or fail for each check, and what to do. Takes
seconds without a GPU; every check has a time limit. On a cluster:
srun --ntasks-per-node=1 python -m megajax.doctor --before-run"""
FLAGS = (
    Flag("run-dir", Path | None, help="the folder for runs; default: the current folder"),
    Flag("json", help="print JSON instead of lines"),
    Flag("before-run", help="also test all devices of all processes together, as a run uses them"),
    *PROCESS_FLAGS,
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 nothing failed (there may be warnings), 1 a check failed, 2 a wrong command line, 130 interrupted.

    Raises:
        UserError: for anything the user has to change.
    """
    flags = parse(argv, verb="doctor", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    joint = resolve("megajax.machine.examine:joint_checks")(flags["init_timeout"]) if flags["before_run"] else ()
    try:
        examine = resolve("megajax.machine.examine:examine")
        return examine(flags["run_dir"], as_json=flags["json"], joint=joint)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    front_door(main)
