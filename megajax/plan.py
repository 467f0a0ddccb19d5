"""Plan a run on virtual GPU devices, or draw a pipeline's schedule: `python -m megajax.plan`."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.bounds import Count, Index, Positive
from megajax.config.class_references import resolve
from megajax.config.errors import UserError
from megajax.config.settings_tree import plain_name
from megajax.training.run_config import COMMON

DESCRIPTION = """With --config and --devices: compile the config's train step for virtual GPU devices, and print
the memory of each, whether it fits, every collective, and the predicted time of a step. With --formula, the same by
formulas, in a second and without a compiler. Overrides are as in training; data need not exist. --search finds the
fastest layout, --compare shows two plans side by side, --sweep scales the number of devices or a setting.

With --schedule, --stages and --microbatches: draw a pipeline schedule: which stage works on which microbatch at each
tick, what share of the time stages wait (the bubble), and how many activations each stage keeps."""

PNG = Flag("png", Path | None, help="of a schedule or a sweep: also draw it into this file (extra plot)")
FLAGS = (
    Flag("devices", str | None, help="as GPU:N, of a100-40gb, a100-80gb, h20, h100, h200, b200, b300, gb200, gb300"),
    Flag("gpus-per-node", Count | None, help="GPUs that NVLink connects; 8, of gb200 and gb300 72, unless given"),
    Flag("audit", help="of a compiled plan: bytes through memory, by class of kernel"),
    Flag("formula", help="compile nothing: memory, traffic and speed by formulas"),
    Flag("search", help="find the fastest layout; settings given on the command line stay"),
    Flag("compile", Index | None, help="of a search: layouts to compile; 3 with the extra aot, else 0"),
    Flag("out", Path | None, help="of a search: write the best into this YAML file, a config based on --config"),
    Flag("serve", help="text generation: tokens of cache beside the weights, and a bound of its speed"),
    Flag("context", Count | None, help="with --serve: tokens of a request; the model's sequence_length unless given"),
    Flag("compare", str | None, help="another plan, in quotes: OTHER.py, GPU:N, --setting=value ..., or several"),
    Flag("sweep", str | None, help="curves over devices:64,128,...,16384, or over a setting: NAME:1,2,4"),
    Flag("device-file", Path | None, help="with --formula: YAML file that describes another device"),
    Flag("calibration", Path | None, help="constants measured by `benchmarks calibrate`, instead of the defaults"),
    Flag("nvlink", Positive | None, help="GB/s from a GPU to others of its node, one direction"),
    Flag("network", Positive | None, help="GB/s from a GPU to other nodes, one direction"),
    Flag("json", Path | None, help="also write the plan to this file"),
    PNG,
)
SCHEDULE_FLAGS = (
    Flag("schedule", str, required=True, help="gpipe: all forwards, then all backwards; 1f1b: backwards as early "
         "as possible; interleaved: 1f1b over several virtual stages"),
    Flag("stages", int, required=True, help="pipeline stages, one device (or group of devices) each"),
    Flag("microbatches", int, required=True, help="microbatches of a step; with virtual stages, a multiple of stages"),
    Flag("virtual-stages", int, 1, help="chunks of layers per stage: shorter bubbles, more traffic"),
    Flag("loss-wait", Literal[0, 1], 0, help="ticks between an output and its loss: default 0 here, 1 in training "
         "(parallel.loss_wait)"),
    PNG,
)  # fmt: skip
USAGE = """
  python -m megajax.plan --config=FILE --devices=h100:128          compiles the config for 128 GPUs (or --formula)
  python -m megajax.plan --config=FILE --devices=h100:128 --search     finds its fastest layout there
  python -m megajax.plan --schedule=1f1b --stages=4 --microbatches=8   draws a schedule"""


def main(argv: list[str]) -> int:
    """Compile or draw, depending on the flags.

    Raises:
        UserError: for anything the user has to change.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's: which instructions a schedule by costs has no cost of
    names = {plain_name(word.lstrip("-").partition("=")[0]) for word in argv if word.startswith("-")}
    if names & {"h", "help"}:
        optional = tuple(replace(flag, required=False) for flag in SCHEDULE_FLAGS if flag not in FLAGS)
        parse(argv, verb="plan", flags=(*FLAGS, *optional), description=DESCRIPTION, common=COMMON)
    match "config" in names, "schedule" in names:
        case True, False:
            for flag in SCHEDULE_FLAGS:
                if plain_name(flag.name) in names and flag not in FLAGS:
                    raise UserError(f"--{flag.name} needs --schedule, not --config{USAGE}")
            words, fixed = resolve("megajax.planning.plan_command:take_searched")(argv)
            count = resolve("megajax.planning.plan_command:count_devices")
            command = parse(words, verb="plan", flags=FLAGS, description=DESCRIPTION, count_devices=count)
            resolve("megajax.planning.plan_command:plan")(command, fixed, (sys.executable, "-m", "megajax.plan"))
        case False, True:
            command = parse(argv, verb="plan", flags=SCHEDULE_FLAGS, with_config=False, description=DESCRIPTION)
            resolve("megajax.pipeline.drawing:draw")(command.flags)
        case True, True:
            raise UserError(f"--config and --schedule exclude each other: give one of them{USAGE}")
        case _:
            raise UserError(f"nothing to plan: give --config or --schedule{USAGE}")
    return 0


if __name__ == "__main__":
    front_door(main)
