"""Plan a run on virtual GPU devices, or draw a pipeline's schedule: `python -m megajax.plan`."""

import shutil
import sys
from dataclasses import replace
from typing import Literal

from megajax.command_line import Flag, front_door, parse
from megajax.config.builds import resolve
from megajax.config.errors import ConfigError, UserError
from megajax.config.patch import plain_name
from megajax.planning.command import FLAGS, PNG, count_devices, plan, take_searched
from megajax.training.run_config import COMMON

DESCRIPTION = """With --config and --devices: compile the config's train step for virtual GPU devices, and print
the memory of each, whether it fits, every collective, and the predicted time of a step. With --formula, the same by
formulas, in a second and without a compiler. Overrides are as in training; data need not exist. --search finds the
fastest layout, --compare shows two plans side by side, --sweep scales the number of devices or a setting.

With --schedule, --stages and --microbatches: draw a pipeline schedule: which stage works on which microbatch at each
tick, what share of the time stages wait (the bubble), and how many activations each stage keeps."""

SCHEDULE_FLAGS = (
    Flag("schedule", str, required=True, help="gpipe: all forwards, then all backwards; 1f1b: backwards as early as "
         "they can be; interleaved: 1f1b over several virtual stages"),
    Flag("stages", int, required=True, help="pipeline stages, one device (or group of devices) each"),
    Flag("microbatches", int, required=True, help="microbatches of a step; with virtual stages, a multiple of stages"),
    Flag("virtual-stages", int, 1, help="chunks of layers each stage holds: shorter bubbles, more traffic"),
    Flag("loss-wait", Literal[0, 1], 0, help="ticks between an output and its loss: 0 unless given here, 1 in training "
         "(parallel.loss_wait)"),
    PNG,
)  # fmt: skip
MOST_ENTRIES = 1_000_000
USAGE = """
  python -m megajax.plan --config=FILE --devices=h100:128          compiles the config for 128 GPUs (or --formula)
  python -m megajax.plan --config=FILE --devices=h100:128 --search     finds its fastest layout there
  python -m megajax.plan --schedule=1f1b --stages=4 --microbatches=8   draws a schedule"""


def main(argv: list[str]) -> int:
    """Compile or draw, as the flags ask for.

    Raises:
        UserError: for what the user has to change.
    """
    names = {plain_name(word.lstrip("-").partition("=")[0]) for word in argv if word.startswith("-")}
    if names & {"h", "help"}:
        optional = tuple(replace(flag, required=False) for flag in SCHEDULE_FLAGS if flag not in FLAGS)
        parse(argv, verb="plan", flags=(*FLAGS, *optional), description=DESCRIPTION, common=COMMON)
    match "config" in names, "schedule" in names:
        case True, False:
            for flag in SCHEDULE_FLAGS:
                if plain_name(flag.name) in names and flag not in FLAGS:
                    raise UserError(f"--{flag.name} goes with --schedule, not with --config{USAGE}")
            return plan_config(argv)
        case False, True:
            return draw(argv)
        case True, True:
            raise UserError(f"--config and --schedule ask for two plans: give one of them{USAGE}")
        case _:
            raise UserError(f"nothing to plan: give --config or --schedule{USAGE}")


def plan_config(argv: list[str]) -> int:
    """Plan a config; print the tables and write what is asked for."""
    words, fixed = take_searched(argv)
    command = parse(words, verb="plan", flags=FLAGS, description=DESCRIPTION, count_devices=count_devices)
    plan(command, fixed)
    return 0


def draw(argv: list[str]) -> int:
    """Print a schedule's table and its figures; with --png, draw it."""
    command = parse(argv, verb="plan", flags=SCHEDULE_FLAGS, with_config=False, description=DESCRIPTION)
    flags = command.flags
    name = flags["schedule"]
    sizes = {"stages": flags["stages"], "microbatches": flags["microbatches"], "chunks": flags["virtual_stages"]}
    problems = resolve("megajax.pipeline.schedule:problems")(name, **sizes)
    if problems:
        flagged = [replace(problem, where=f"--{problem.where.replace('_', '-')}") for problem in problems]
        raise ConfigError(flagged, "command line")
    _refuse_the_endless(**sizes)
    schedule = resolve("megajax.pipeline.schedule:build")(name, **sizes, loss_wait=flags["loss_wait"])
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
