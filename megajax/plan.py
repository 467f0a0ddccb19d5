"""Show a plan before it runs: `python -m megajax.plan --schedule=1f1b --stages=4 --microbatches=8`."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from megajax.config.builds import resolve
from megajax.config.command_line import Flag, front_door, parse
from megajax.config.errors import ConfigError, UserError

DESCRIPTION = """Draw a pipeline schedule: which stage works on which microbatch at each tick, what share of the time
stages wait (the bubble), and how many activations each stage keeps."""
FLAGS = (
    Flag("schedule", str, required=True, help="gpipe: all forwards, then all backwards; 1f1b: backwards as early as "
         "they can be; interleaved: 1f1b over several virtual stages"),
    Flag("stages", int, required=True, help="pipeline stages, one device (or group of devices) each"),
    Flag("microbatches", int, required=True, help="microbatches of a step; with virtual stages, a multiple of stages"),
    Flag("virtual-stages", int, 1, help="chunks of layers each stage holds: shorter bubbles, more traffic"),
    Flag("png", Path | None, help="also draw it into this file (extra plot)"),
)  # fmt: skip
MOST_ENTRIES = 1_000_000


def main(argv: list[str]) -> int:
    """Print the table and its figures; with --png, draw it.

    Raises:
        UserError: for what the user has to change.
    """
    command = parse(argv, verb="plan", flags=FLAGS, with_config=False, description=DESCRIPTION)
    flags = command.flags
    name = flags["schedule"]
    sizes = {"stages": flags["stages"], "microbatches": flags["microbatches"], "chunks": flags["virtual_stages"]}
    problems = resolve("megajax.pipeline.schedule:problems")(name, **sizes)
    if problems:
        flagged = [replace(problem, where=f"--{problem.where.replace('_', '-')}") for problem in problems]
        raise ConfigError(flagged, "command line")
    _refuse_the_endless(**sizes)
    schedule = resolve("megajax.pipeline.schedule:build")(name, **sizes)
    resolve("megajax.pipeline.check:check")(schedule)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    picture = flags["png"]
    if picture is not None:
        resolve("megajax.pipeline.drawing:save_picture")(schedule, picture)
    print(resolve("megajax.pipeline.drawing:report")(schedule, width))
    if picture is not None:
        print(f"{'picture':<11} {picture}")
    return 0


def _refuse_the_endless(stages: int, microbatches: int, chunks: int) -> None:
    entries = stages * microbatches * chunks
    if entries > MOST_ENTRIES:
        raise UserError(
            f"{stages} stages of {chunks} chunks and {microbatches} microbatches make {entries:,} entries, more than "
            f"the {MOST_ENTRIES:,} that are drawn.\nGive fewer --microbatches: the pattern repeats."
        )


if __name__ == "__main__":
    front_door(main)
